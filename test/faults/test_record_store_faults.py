"""What the disk and other processes can do to the record file, done to it."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import random
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from sglang.srt.autotune.records.document import Document, read_document
from sglang.srt.autotune.records.environment import ENVIRONMENT_FIELDS
from sglang.srt.autotune.records.record import Record, StepEntry
from sglang.srt.autotune.records.store import RecordStore
from sglang.srt.environ import envs
from support.forks import fork, join, run_as_ordinary_user

pytestmark = pytest.mark.faults

ENVIRONMENT = {name: "1" for name in ENVIRONMENT_FIELDS}
WRITERS, RECORDS, ROUNDS = 4, 50, 20


def record(writer: int, number: int) -> Record:
    key = f"('op{writer}', 'R', (({number + 1}, 64),), (torch.bfloat16,))"
    return Record(key, "R", (number, 4), ("l2_cache_policy", "hot"), source="tuned")


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user can reach, unlike pytest's own."""
    directory = Path(tempfile.mkdtemp(prefix="sglang-records-"))
    directory.chmod(0o755)
    yield directory
    for path in [directory, *directory.rglob("*")]:
        with contextlib.suppress(OSError):
            path.chmod(0o755)
    shutil.rmtree(directory)


def reported(log: Path) -> list[tuple[int, int]]:
    """`(writer, number)` of every commit that had returned when it was noted."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [(int(a), int(b)) for a, b in (line.split() for line in lines)]


def write_records(path: Path, log: Path, writer: int, count: int) -> None:
    store = RecordStore(path, ENVIRONMENT)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in range(count):
        assert store.commit(
            [record(writer, number)],
            namespaces={f"n{writer}": {str(number): number}},
            steps=[StepEntry(f"decode:{writer}-{number}", (record(writer, number).key,))],
        )
        assert store.writable, store.reason
        os.write(descriptor, b"%d %d\n" % (writer, number))


def committed_and_found(path: Path, log: Path) -> tuple[set[str], Document]:
    found = read_document(path, check_generation=True)
    assert isinstance(found, Document), found
    assert found.rejected == () and not found.edited
    return {record(*entry).key for entry in reported(log)}, found


@pytest.mark.timeout(300)
def test_writers_lose_nothing_when_one_of_them_is_killed_mid_write(place):
    dice = random.Random(7)
    cut_short = 0
    for number in range(ROUNDS):
        path, log = place / str(number) / "r.json", place / f"{number}.log"
        path.parent.mkdir()
        pids = [fork(partial(write_records, path, log, w, RECORDS)) for w in range(WRITERS)]
        kill_after = dice.randrange(1, RECORDS - 5)
        deadline_s = time.monotonic() + 60
        while sum(writer == 0 for writer, _ in reported(log)) < kill_after:
            assert time.monotonic() < deadline_s, "the writers do not get on"
            assert not isinstance(read_document(path), Document) or read_document(path).rejected == ()
            time.sleep(0.003)
        time.sleep(dice.uniform(0, 0.01))
        os.kill(pids[0], signal.SIGKILL)
        cut_short += join(pids[0]) == -signal.SIGKILL
        while any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None for pid in pids[1:]):
            assert isinstance(read_document(path), Document), "a reader met a half-written file"
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
        assert [join(pid) for pid in pids[1:]] == [0] * (WRITERS - 1)

        committed, found = committed_and_found(path, log)
        assert committed <= found.records.keys()
        assert {record(w, n).key for w in range(1, WRITERS) for n in range(RECORDS)} <= found.records.keys()
        assert all(set(step.keys) <= found.records.keys() for step in found.steps.values())
        assert [name for name in os.listdir(path.parent) if ".bad-" in name] == []
    assert cut_short >= ROUNDS // 2, "the kill hardly ever came in time"


@pytest.mark.timeout(120)
def test_writers_lose_nothing_where_locks_do_not_work(place):
    def write_one(path: Path, writer: int, start: int) -> None:
        store = RecordStore(path, ENVIRONMENT, locking=False)
        os.read(start, 1)  # all begin at the same moment
        assert store.commit([record(writer, 0)]) and store.writable

    for number in range(10):
        path = place / str(number) / "r.json"
        start, go = os.pipe()
        pids = [fork(partial(write_one, path, writer, start)) for writer in range(WRITERS + 2)]
        os.write(go, b"x" * len(pids))
        assert [join(pid) for pid in pids] == [0] * len(pids)
        os.close(start), os.close(go)
        found = read_document(path)
        assert isinstance(found, Document) and len(found.records) == len(pids)


def test_a_writer_that_hangs_with_the_lock_does_not_stop_the_others(place):
    store = RecordStore(place / "r.json", ENVIRONMENT, lock_timeout_s=0.1)
    with open(place / "r.json.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert store.commit([record(0, 0)]) and store.writable


def test_a_lock_that_cannot_be_made_does_not_stop_the_writer(place):
    (place / "r.json.lock").mkdir()
    assert RecordStore(place / "r.json", ENVIRONMENT).commit([record(0, 0)])


def test_what_a_killed_writer_left_is_cleared_after_an_hour(place):
    old, young = place / ".r.json.1-aa.tmp", place / ".r.json.2-bb.tmp"
    for path in (old, young, place / ".other.json.1-aa.tmp"):
        path.write_text("x")
        os.utime(path, (time.time() - 7200,) * 2 if path != young else None)
    RecordStore(place / "r.json", ENVIRONMENT).commit([record(0, 0)])
    assert sorted(os.listdir(place)) == [".other.json.1-aa.tmp", young.name, "r.json", "r.json.lock"]


def degraded(store: RecordStore, caplog: pytest.LogCaptureFixture) -> None:
    """Assert that a store which cannot write keeps going in memory and has said so once."""
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        for number in (1, 2):
            assert not store.commit([record(9, number)])
    assert not store.writable and store.reason
    assert [entry.levelname for entry in caplog.records] == ["WARNING"]
    assert {record(9, 1).key, record(9, 2).key} <= store.load().records.keys()


def test_a_full_disk_keeps_the_old_file_and_the_new_records_in_memory(place, caplog):
    path = place / "r.json"
    RecordStore(path, ENVIRONMENT).commit([record(0, number) for number in range(50)])
    before, listing = path.read_bytes(), sorted(os.listdir(place))

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # every larger write fails as on a full disk
        degraded(RecordStore(path, ENVIRONMENT), caplog)

    assert join(fork(work)) == 0
    assert path.read_bytes() == before and sorted(os.listdir(place)) == listing


@pytest.mark.skipif(os.getuid() != 0, reason="mounting needs root")
def test_a_file_system_without_space_degrades_and_recovers(place, caplog):
    mount = place / "mount"
    mount.mkdir()
    if os.system(f"mount -t tmpfs -o size=64k tmpfs {mount} 2>/dev/null"):
        pytest.skip("this container may not mount")
    try:
        store = RecordStore(mount / "r.json", ENVIRONMENT)
        assert store.commit([record(0, 0)])
        filler = mount / "filler"
        with contextlib.suppress(OSError), open(filler, "wb") as stream:
            stream.write(b"x" * 200_000)
        degraded(store, caplog)
        assert isinstance(read_document(mount / "r.json"), Document)
        filler.unlink()
        assert store.commit([record(0, 3)]) and store.writable
        assert len(RecordStore(mount / "r.json", ENVIRONMENT).load().records) == 4
    finally:
        os.system(f"umount {mount}")


def test_a_read_only_root_is_read_and_not_written(place, caplog):
    path = place / "r.json"
    RecordStore(path, ENVIRONMENT).commit([record(0, 0)])
    place.chmod(0o555)
    listing = sorted(os.listdir(place))

    def work() -> None:
        store = RecordStore(path, ENVIRONMENT)
        assert record(0, 0).key in store.load().records
        degraded(store, caplog)

    run_as_ordinary_user(work)
    assert sorted(os.listdir(place)) == listing


def test_a_root_that_cannot_be_created_is_memory_only(place, caplog):
    place.chmod(0o555)
    run_as_ordinary_user(lambda: degraded(RecordStore(place / "a" / "b" / "r.json", ENVIRONMENT), caplog))


def test_a_file_that_may_not_be_read_is_left_as_it_is(place, caplog):
    path = place / "r.json"
    RecordStore(path, ENVIRONMENT).commit([record(0, 0)])
    before = path.read_bytes()
    path.chmod(0)
    place.chmod(0o777)

    def work() -> None:
        store = RecordStore(path, ENVIRONMENT)
        assert "Permission denied" in store.load().problems[0]
        degraded(store, caplog)

    run_as_ordinary_user(work)
    path.chmod(0o644)
    assert path.read_bytes() == before


def test_a_user_without_a_home_still_keeps_records(place):
    place.chmod(0o777)

    def work() -> None:
        os.environ.clear()
        os.environ["TMPDIR"] = str(place)
        tempfile.tempdir = None
        root = Path(envs.SGLANG_CACHE_DIR.get())
        assert root.is_absolute()
        if root.is_relative_to(place):  # else the password database knew a home, which may be anyone's
            assert RecordStore(root / "r.json", ENVIRONMENT).commit([record(0, 0)])
            assert RecordStore(root / "r.json", ENVIRONMENT).load().records

    run_as_ordinary_user(work, uid=54321)


def test_a_root_copied_to_another_place_is_warm_there(place):
    RecordStore(place / "one" / "r.json", ENVIRONMENT).commit([record(0, 0)])
    shutil.copytree(place / "one", place / "two")
    copied = RecordStore(place / "two" / "r.json", ENVIRONMENT)
    assert record(0, 0).key in copied.load().records
    assert copied.commit([record(0, 1)])
