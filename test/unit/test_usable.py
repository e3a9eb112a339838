"""A record that the op could not serve with here stands over none that it could: it is told, the start is warm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from flashinfer.autotuner import AutoTuner

from sglang.cli.autotune import main
from sglang.srt.autotune.records.document import parse_document
from sglang.srt.autotune.records.environment import ENVIRONMENT_FIELDS
from sglang.srt.autotune.records.record import Record, by_question, with_runner
from sglang.srt.autotune.records.store import RecordStore
from sglang.srt.autotune.usable import sort_out
from sglang.srt.layers.moe.base import MoEShape
from sglang.srt.layers.moe.portfolio import OP_NAME, FlashInferCutlassMoE, TorchGroupedMoE
from sglang.srt.layers.moe.reference import DenseMoE, SortedMoE
from support.tiny_host import start

ENVIRONMENT = {name: "1" for name in ENVIRONMENT_FIELDS}
ODD_TACTICS = [
    True,
    False,
    None,
    "",
    "0",
    1.0,
    -1.0,
    0.5,
    -2,
    99,
    2**62,
    [],
    [0],
    [[0]],
    ["few"],
    [None, [1]],
]
UNUSABLE = [("WarpMoE", 3, "name WarpMoE, which is no runner"), ("SortedMoE", 99, "does not have here (99)")]


@pytest.fixture(autouse=True)
def clean_tuner():
    yield
    AutoTuner.get().clear_cache()


class Op:
    name = OP_NAME

    def __init__(self, *runners) -> None:
        self.runners = runners


def record(runner: str, tactic: object, bucket: int = 8, **fields) -> Record:
    profile = f"(({bucket}, 16), ({bucket}, 2), ({bucket}, 2), (4, 16, 16), (4, 16, 8))"
    return Record(f"('{OP_NAME}', '{runner}', {profile}, ('torch.float32', 2))", runner, tactic, **fields)


def sorted_out(*records: Record, runners=None) -> tuple[list[object], list[str]]:
    op = Op(*(runners or (SortedMoE(), DenseMoE())))
    kept, unusable = sort_out({item.key: item for item in records}, [op])
    return [item.tactic for item in kept.values()], [item.reason for item in unusable]


def every_runner() -> list:
    from sglang.srt.layers.moe.triton_grouped import TritonGroupedMoE

    triton = TritonGroupedMoE.__new__(TritonGroupedMoE)  # judging a tactic needs the shape and no GPU
    triton.shape = MoEShape(16, 8, 4, 4, 2, torch.bfloat16, 64)
    adapters = [kind.__new__(kind) for kind in (TorchGroupedMoE, FlashInferCutlassMoE)]
    return [SortedMoE(), DenseMoE(), *adapters, triton]


@pytest.mark.parametrize("runner", every_runner(), ids=lambda runner: type(runner).__name__)
def test_no_runner_takes_a_tactic_of_an_odd_kind(runner):
    name = type(runner).__name__
    for tactic in ODD_TACTICS:
        (stored,) = parse_document(
            json.dumps({record(name, 0).key: [name, tactic]}).encode(), "x"
        ).records.values()
        assert sorted_out(stored, runners=[runner])[0] == [], tactic
    assert sorted_out(record(name, -1), runners=[runner]) == ([-1], [])


def test_one_line_says_how_many_records_and_what_they_name():
    records = [record("SortedMoE", tactic, bucket=tactic) for tactic in (1, 9, 10, 11, 12)]
    assert sorted_out(*records) == (
        [1],
        ["4 records name a tactic that SortedMoE of sglang::moe does not have here (9; 10; 11; ...)"],
    )
    assert sorted_out(record("WarpMoE", 0)) == (
        [],
        ["1 record names WarpMoE, which is no runner of sglang::moe here"],
    )


@pytest.mark.parametrize("shape", ["((-1, 16),)", "((99999999999999999999999999,),)", "()"])
def test_what_cannot_be_judged_is_left_to_the_lookup(shape):
    odd = Record(f"('{OP_NAME}', 'SortedMoE', {shape}, ())", "SortedMoE", 1)
    foreign = Record("('trtllm::fused_moe::gemm1', 'MoERunner', ((8, 16),), ())", "MoERunner", [1, 2])
    text = Record("no key", "R", 0)
    assert sorted_out(odd, foreign, text) == ([1, [1, 2], 0], [])


def edited(report, runner: str, tactic: object, **note) -> dict:
    """The user's file of a start, every record changed to this runner and tactic."""
    document = json.loads(Path(report.cache_path).read_text())
    document.pop("_generation")
    notes = document["_metadata"]["sglang"]["records"]
    for key in [key for key in document if not key.startswith("_")]:
        policy = document.pop(key)[2:]
        renamed = with_runner(key, runner)
        document[renamed] = [runner, tactic, *policy]
        notes[renamed] = {"tactic": tactic, "tuned_at": "2030-01-01T00:00:00+00:00", **note}
    return document


@pytest.mark.parametrize(("runner", "tactic", "words"), UNUSABLE)
def test_a_given_record_that_cannot_be_used_does_not_hide_what_was_tuned_here(
    tmp_path, runner, tactic, words
):
    given = tmp_path / "given.json"
    given.write_text(json.dumps(edited(start(tmp_path), runner, tactic)))
    report = start(tmp_path, given_records=(given,))
    assert report.profiles_tuned == 0 and {step.source for step in report.steps} == {"user"}
    assert (report.records.user, report.records.given, report.records.superseded) == (5, 0, [])
    (rejected,) = report.records.rejected
    assert words in rejected["reason"] and rejected["reason"].endswith(str(given))


@pytest.mark.parametrize(("runner", "tactic", "words"), UNUSABLE)
def test_a_pin_on_what_cannot_be_used_stays_and_the_next_start_is_warm(
    tmp_path, monkeypatch, runner, tactic, words
):
    # The last candidate wins, DenseMoE's.
    monkeypatch.setattr("sglang.srt.autotune.profiler.choose", lambda times, margin: len(times) - 1)
    path = Path((first := start(tmp_path, verify="off")).cache_path)
    path.write_text(json.dumps(edited(first, runner, tactic, pinned=True)))
    cold = start(tmp_path, verify="off")
    assert cold.profiles_tuned == 5 and cold.fallbacks == 0
    for _ in range(2):
        warm = start(tmp_path, verify="off")
        assert warm.profiles_tuned == 0 and {step.source for step in warm.steps} == {"user"}
        (rejected,) = warm.records.rejected
        assert words in rejected["reason"] and "5 of them pinned" in rejected["reason"]
        stored = RecordStore(path).load().records
        assert sorted({item.runner for item in stored.values()}) == sorted({"DenseMoE", runner})
        assert {item.runner for item in by_question(stored.values()).values()} == {runner}, (
            "where it is there"
        )

    remedy = rejected["reason"].split("let them go: sglang autotune ")[1]
    assert main(remedy.split()) == 0
    start(tmp_path, verify="off")
    after = start(tmp_path, verify="off")
    assert after.profiles_tuned == 0 and after.records.rejected == []
    assert runner not in path.read_text()


def test_the_same_key_has_room_for_one_record_only(tmp_path):
    pinned, tuned = record("SortedMoE", 99, pinned=True), record("SortedMoE", 1, source="tuned")
    for passes_over, tactic in ((False, 99), (True, 1)):
        path = tmp_path / f"{passes_over}.json"
        RecordStore(path, ENVIRONMENT).commit([pinned])
        store = RecordStore(path, ENVIRONMENT)
        store.pass_over([pinned.key] if passes_over else [])
        store.commit([tuned])
        assert [item.tactic for item in store.load().records.values()] == [tactic]


def test_what_another_writer_lost_is_put_back_beside_a_pin_that_is_passed_over(tmp_path):
    pinned = record("WarpMoE", 3, pinned=True)
    store = RecordStore(tmp_path / "r.json", ENVIRONMENT)
    store.pass_over([pinned.key])
    store.commit([record("SortedMoE", 1, source="tuned")])
    (tmp_path / "r.json").unlink()
    RecordStore(tmp_path / "r.json", ENVIRONMENT).commit([pinned])
    assert store.verify() and not store.verify()
    assert sorted(item.runner for item in store.load().records.values()) == ["SortedMoE", "WarpMoE"]
