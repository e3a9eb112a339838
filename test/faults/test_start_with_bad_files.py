"""No file can harm a start: whatever lies in a record's place, the stage completes, says why and heals it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("flashinfer")

from flashinfer.autotuner import AutoTuner

from sglang.srt.autotune.records.record import with_runner
from sglang.srt.autotune.report import StageReport
from support.tiny_host import start

pytestmark = pytest.mark.faults


@pytest.fixture(autouse=True)
def clean_tuner() -> Iterator[None]:
    yield
    AutoTuner.get().clear_cache()


def as_bytes(data: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(data) and None


def edited(edit: Callable[[dict], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = json.loads(path.read_text())
        edit(content)
        path.write_text(json.dumps(content))

    return damage


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


BAD_FILES = {
    "empty": as_bytes(b""),
    "zeros": as_bytes(b"\0" * 4096),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:300]) and None,
    "binary": as_bytes(bytes(range(256))),
    "a list": as_bytes(b"[1, 2]"),
    "deep": as_bytes(b'{"a":' * 50_000),
    "a fifo": fifo,
    "a directory": directory,
    "no stamp": edited(lambda content: content.pop("_metadata")),
    "a stamp that is a list": edited(lambda content: content.update(_metadata=[])),
    "another gpu": edited(lambda content: content["_metadata"].update(gpu="NVIDIA H100")),
    "another flashinfer": edited(lambda content: content["_metadata"].update(flashinfer_version="0.0.1")),
}
BAD_ENTRIES = {
    "a comment": edited(lambda content: content.update(_comment="hello")),
    "namespaces that are none": edited(lambda content: content.update(_records=7)),
    "a short entry": edited(lambda content: content.update({"('x', 'R', ((1,),), ())": []})),
    "a tactic that is an object": edited(
        lambda content: content.update({"('x', 'R', ((1,),), ())": ["R", {}]})
    ),
    "not a number": edited(lambda content: content.update({"('x', 'R', ((1,),), ())": ["R", float("nan")]})),
}


def rename(runner: str, tactic: object) -> Callable[[Path], None]:
    """Every record of the file names another runner, as one of another build or version would."""

    def change(content: dict) -> None:
        for key in [key for key in content if not key.startswith("_")]:
            policy = content.pop(key)[2:]
            content[with_runner(key, runner)] = [runner, tactic, *policy]

    return edited(change)


STRANGE_RUNNERS = {
    "a runner of tomorrow": (
        rename("WarpMoE", ["fast", [1, 2]]),
        "5 records name WarpMoE, which is no runner of",
    ),
    "a runner of GPUs": (rename("TritonGroupedMoE", 0), "5 records name TritonGroupedMoE"),
    "a tactic that the runner does not have": (
        rename("DenseMoE", ["few", [16, 4], [8, 2]]),
        "5 records name a tactic that DenseMoE of sglang::moe does not have here (few 16,4 / 8,2)",
    ),
}


def one_file(report: StageReport) -> Path:
    assert report.cache_path is not None
    return Path(report.cache_path)


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_file_that_cannot_be_used_is_told_tuned_anew_and_kept_aside(tmp_path, kind):
    path = one_file(start(tmp_path))
    BAD_FILES[kind](path)
    report = start(tmp_path)
    assert report.status == "completed" and report.fallbacks == 0 and report.profiles_tuned == 5
    assert str(path) in report.records.rejected[0]["reason"]
    assert [name for name in os.listdir(path.parent) if ".bad-" in name]
    healed = start(tmp_path)
    assert healed.profiles_tuned == 0 and healed.records.rejected == []


@pytest.mark.parametrize("kind", BAD_ENTRIES)
def test_one_bad_entry_costs_one_entry(tmp_path, kind):
    path = one_file(start(tmp_path))
    BAD_ENTRIES[kind](path)
    report = start(tmp_path)
    assert report.status == "completed" and report.profiles_tuned == 0 and report.records.user == 5
    assert len(report.records.rejected) == 1


@pytest.mark.parametrize("kind", [*BAD_FILES, *BAD_ENTRIES])
def test_a_bad_given_file_is_told_and_left_as_it_is(tmp_path, kind):
    given = tmp_path / "given.json"
    given.write_bytes(one_file(start(tmp_path / "one")).read_bytes())
    {**BAD_FILES, **BAD_ENTRIES}[kind](given)
    before = given.read_bytes() if given.is_file() else None
    report = start(tmp_path / "two", given_records=(given,))
    assert report.status == "completed" and report.fallbacks == 0
    assert "given.json" in report.records.rejected[0]["reason"]
    assert (given.read_bytes() if given.is_file() else None) == before


@pytest.mark.parametrize("kind", STRANGE_RUNNERS)
def test_records_of_a_runner_that_is_not_here_are_told_tuned_anew_and_replaced(tmp_path, kind):
    path = one_file(start(tmp_path))
    damage, words = STRANGE_RUNNERS[kind]
    damage(path)
    report = start(tmp_path)
    assert report.status == "completed" and report.fallbacks == 0 and report.profiles_tuned == 5
    reasons = [item["reason"] for item in report.records.rejected]
    assert len(reasons) == 1 and reasons[0].startswith(words)
    healed = start(tmp_path)
    assert healed.profiles_tuned == 0 and healed.records.rejected == [] and healed.records.user == 5


def test_a_root_that_cannot_be_used_leaves_the_start_in_memory(tmp_path, caplog):
    (tmp_path / "root").write_text("a file where the directory should be")
    report = start(tmp_path / "root")
    assert report.status == "completed" and report.profiles_tuned == 5 and report.fallbacks == 0
    assert report.cache_path is None and "memory" in " ".join(report.warnings)
    assert sum("cannot be written" in entry.message for entry in caplog.records) == 1
