"""A start that is killed, crashes, runs out of disk, may not write, or is not alone: what was written is not lost."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import json
import os
import random
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from flashinfer.autotuner import AutoTuner

from sglang.srt.autotune import flashinfer_api
from sglang.srt.autotune.plan import Shape
from sglang.srt.autotune.records.document import Document, read_document
from sglang.srt.autotune.records.store import RecordStore
from sglang.srt.layers.moe.portfolio import OP_NAME
from support.forks import fork, join, run_as_ordinary_user
from support.tiny_host import TinyHost, start

STEPS = 5


@pytest.fixture(autouse=True)
def clean_tuner() -> Iterator[None]:
    AutoTuner.get()  # forked processes find FlashInfer loaded
    yield
    AutoTuner.get().clear_cache()


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user can reach, unlike pytest's own."""
    directory = Path(tempfile.mkdtemp(prefix="sglang-start-"))
    directory.chmod(0o777)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def begin(root: Path, report: Path, between: Callable[[Shape], None] = lambda shape: None, **settings) -> int:
    """A start in a process of its own, which writes its report to ``report``; returns the pid."""
    return fork(
        lambda: report.write_text(json.dumps(start(root, TinyHost(between=between), **settings).to_json()))
    )


def run(root: Path, between: Callable[[Shape], None] = lambda shape: None, **settings) -> dict:
    report = root.parent / f"{root.name}.report"
    assert join(begin(root, report, between, **settings)) == 0
    return json.loads(report.read_text())


def stored(root: Path) -> dict[str, list]:
    """What is on disk, which every reader must be able to use at every moment."""
    found: dict[str, list] = {}
    for path in root.rglob("rank_*.json"):
        document = read_document(path, check_generation=True)
        assert isinstance(document, Document) and document.rejected == () and not document.edited
        found.update({key: record.to_json_entry() for key, record in document.records.items()})
    return found


@pytest.mark.timeout(240)
def test_fifty_kills_at_random_moments_lose_nothing_that_was_written(place):
    dice = random.Random(20)
    killed = 0
    for number in range(10):
        root = place / str(number)
        before: dict[str, list] = {}
        for _ in range(5):
            pid = begin(root, place / "report", lambda shape: time.sleep(0.02))
            time.sleep(dice.uniform(0.0, 0.4))
            os.kill(pid, signal.SIGKILL)
            killed += join(pid) == -signal.SIGKILL
            after = stored(root)
            assert before.items() <= after.items()
            before = after
        report = run(root)
        assert report["status"] == "completed" and report["fallbacks"] == 0
        assert all("without an error" in left["reason"] for left in report["left_out"])
        left_out = {left["step"] for left in report["left_out"]}
        assert report["profiles_tuned"] + report["records"]["user"] >= STEPS - len(left_out)
        again = run(root)
        assert again["profiles_tuned"] == 0 and {left["step"] for left in again["left_out"]} == left_out
        assert not [path for path in root.rglob("*") if ".bad-" in path.name]
    assert killed >= 25, "the kills hardly ever came in time"


def crash_by_abort() -> None:
    os.abort()


def crash_by_segmentation_fault() -> None:
    ctypes.string_at(0)


CRASHES = {signal.SIGABRT: crash_by_abort, signal.SIGSEGV: crash_by_segmentation_fault}


def crash_at(bucket: int, number: signal.Signals, shape: Shape) -> None:
    if shape.op_tokens == bucket:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.disable()  # pytest's, which would print a page
        CRASHES[number]()


@pytest.mark.parametrize("number", CRASHES)
@pytest.mark.parametrize("records_first", [False, True])
def test_a_step_that_crashes_the_process_is_tried_once_more_and_then_left_out(place, number, records_first):
    """With ``records_first`` the crash comes while stored records are checked, as a stored tactic can cause it."""
    root, crash = place / "root", functools.partial(crash_at, 4, number)
    if records_first:
        run(root)
    for _ in range(2):
        assert join(begin(root, place / "report", crash)) == -number
    report = run(root, crash)
    assert report["status"] == "completed"
    assert [left["step"] for left in report["left_out"]] == ["decode 4"]
    assert "2 earlier starts ended there without an error" in report["left_out"][0]["reason"]
    assert not any(step["winners"].get(OP_NAME) for step in report["steps"] if step["num_tokens"] == 4)


def test_a_step_that_crashed_once_and_then_works_is_tuned(place):
    root = place / "root"
    assert (
        join(begin(root, place / "report", functools.partial(crash_at, 4, signal.SIGABRT))) == -signal.SIGABRT
    )
    report = run(root)
    assert report["left_out"] == [] and report["records"]["user"] == 2 and report["profiles_tuned"] == 3
    assert not list(root.rglob("*.journal"))


def test_engines_that_start_at_once_on_one_root_disturb_each_other_in_nothing(place):
    for number in range(8):
        root = place / str(number)
        reports = [place / f"{number}-{engine}" for engine in range(3)]
        pids = [begin(root, report, lambda shape: time.sleep(0.01)) for report in reports]
        assert [join(pid) for pid in pids] == [0, 0, 0]
        for report in (json.loads(path.read_text()) for path in reports):
            assert report["status"] == "completed" and report["fallbacks"] == 0
            assert report["left_out"] == [] and report["records"]["rejected"] == []
        assert len(stored(root)) == STEPS and not list(root.rglob("*.journal"))
        assert run(root)["profiles_tuned"] == 0


def test_a_disk_that_takes_nothing_leaves_the_start_without_records_but_alive(place):
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))  # every larger write fails, in every directory
        report = start(place / "root")
        assert report.status in ("failed", "completed") and report.reason

    assert join(fork(limited)) == 0
    assert run(place / "root")["status"] == "completed"


@pytest.mark.skipif(os.getuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize("left_bytes", [0, 4096, 8192])
def test_a_root_on_a_full_disk_is_memory_only(place, left_bytes):
    mount = place / "mount"
    mount.mkdir()
    if os.system(f"mount -t tmpfs -o size=64k tmpfs {mount} 2>/dev/null"):
        pytest.skip("this container may not mount")
    try:
        with contextlib.suppress(OSError), open(mount / "filler", "wb", buffering=0) as filler:
            while os.statvfs(mount).f_bavail * 4096 > left_bytes:
                filler.write(b"x" * 4096)
        assert join(begin(mount / "root", place / "report")) == 0
        report = json.loads((place / "report").read_text())
        assert (
            report["status"] == "completed" and report["fallbacks"] == 0 and report["profiles_tuned"] == STEPS
        )
        assert report["cache_path"] is None and "memory" in " ".join(report["warnings"])
        stored(mount)
    finally:
        os.system(f"umount {mount}")


def test_a_read_only_root_is_used_and_left_as_it_is(place):
    run(place / "root", include_prefill=False)
    before = sorted(path.relative_to(place) for path in (place / "root").rglob("*"))
    for path in [place / "root", *(place / "root").rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)

    def as_nobody() -> None:
        warm = start(place / "root", include_prefill=False)
        assert warm.status == "completed" and warm.profiles_tuned == 0 and warm.records.user == 3
        more = start(place / "root")
        assert more.status == "completed" and more.profiles_tuned == 2 and more.fallbacks == 0
        assert more.cache_path is None

    run_as_ordinary_user(as_nobody)
    assert sorted(path.relative_to(place) for path in (place / "root").rglob("*")) == before


def test_a_clock_that_jumps_changes_nothing(place, monkeypatch):
    dice, plain = random.Random(3), time.time
    monkeypatch.setattr(time, "time", lambda: plain() + dice.uniform(-1e9, 1e9))
    report = run(place / "root", budget_s=300.0)
    assert report["status"] == "completed" and report["profiles_tuned"] == STEPS and report["left_out"] == []
    assert 0 < report["seconds"] < 600 and all(step["seconds"] < 600 for step in report["steps"])
    assert run(place / "root")["profiles_tuned"] == 0


def test_a_file_of_a_million_entries_is_refused_at_once(place):
    path = Path(start(place / "root").cache_path)
    path.write_text(json.dumps({str(number): 0 for number in range(1_000_000)}))
    loaded = RecordStore(path, flashinfer_api.environment()).load()
    assert loaded.rejected_file is not None and "20000 entries" in loaded.rejected_file.reason
    assert start(place / "root").profiles_tuned == 5
