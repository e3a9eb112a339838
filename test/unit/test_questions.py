"""One question has one record, whichever runner answers it: in merges, in files, in the commands and in the tuner.

FlashInfer's lookup takes the first runner of an op that has a record, so a second one would hide or be hidden.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from flashinfer.autotuner import AutoTuner

from sglang.cli.autotune import main
from sglang.srt.autotune import flashinfer_api
from sglang.srt.autotune.records.environment import ENVIRONMENT_FIELDS
from sglang.srt.autotune.records.merging import merge_sources
from sglang.srt.autotune.records.record import (
    Record,
    RecordSet,
    StepEntry,
    by_question,
    describe_choice,
    question_of,
    with_runner,
)
from sglang.srt.autotune.records.store import RecordStore
from sglang.srt.layers.moe.portfolio import OP_NAME
from support.tiny_host import start

ENVIRONMENT = {name: "1" for name in ENVIRONMENT_FIELDS}


@pytest.fixture(autouse=True)
def clean_tuner():
    yield
    AutoTuner.get().clear_cache()


def key_of(runner: str, bucket: int = 8, extras: str = "('torch.bfloat16', 8)") -> str:
    return f"('sglang::moe', '{runner}', (({bucket}, 16), ({bucket}, 2)), {extras})"


def record(runner: str, tactic: object = 0, bucket: int = 8, **fields) -> Record:
    return Record(key_of(runner, bucket), runner, tactic, **{"source": "tuned", **fields})


def records(*found: Record) -> RecordSet:
    return RecordSet({item.key: item for item in found})


def choices(content: RecordSet) -> list[tuple[str, object]]:
    return sorted((item.runner, item.tactic) for item in content.records.values())


# --- the rule ---------------------------------------------------------------------------------------------------


def test_a_question_is_the_key_without_its_runner():
    assert question_of(key_of("A")) == question_of(key_of("B"))
    other = [key_of("A", 16), key_of("A", extras="('torch.float16', 8)"), key_of("A").replace("moe", "mlp")]
    assert len({question_of(key) for key in [key_of("A"), *other]}) == 4
    assert with_runner(key_of("A"), "B") == key_of("B")


@pytest.mark.parametrize("text", ["", "nonsense", "('op'", "('op', R, ((8,),), ())", "['op', 'R']"])
def test_a_text_that_is_no_key_is_a_question_of_its_own(text):
    assert question_of(text) == text and with_runner(text, "B") == text


def test_of_several_records_a_pinned_one_stands_then_the_newest():
    old, new = record("A", 1, tuned_at="2026-01-01"), record("B", 2, tuned_at="2026-01-02")
    for pair in ([old, new], [new, old]):
        assert list(by_question(pair).values()) == [new]
    pinned = record("A", 1, tuned_at="2025-01-01", pinned=True)
    for pair in ([pinned, new], [new, pinned]):
        assert list(by_question(pair).values()) == [pinned]


@pytest.mark.parametrize(
    ("tactic", "words"),
    [
        (-1, "R default"),
        (7, "R 7"),
        ((128, 4), "R [128, 4]"),
        (["few", [16, 128, 4, 3], [8, 256, 4, 2]], "R few 16,128,4,3 / 8,256,4,2"),
        (("many", (64, 64), 5), "R many 64,64 / 5"),
        (("few",), "R few"),
    ],
)
def test_a_choice_in_words(tactic, words):
    assert describe_choice("R", tactic) == words


# --- merging ----------------------------------------------------------------------------------------------------


def test_the_more_explicit_source_wins_whichever_runner_it_names_and_the_loss_is_told():
    merged = merge_sources(
        [records(record("B", 1), record("A", 5, bucket=16))],
        records(record("C", 2)),
        [records(record("A", 3))],
    )
    assert choices(merged) == [("A", 3), ("A", 5)]
    assert merged.count_by_source() == {"seed": 1, "user": 0, "given": 1}
    assert [item.words().split(" for ")[0] for item in merged.overridden] == [
        "user record C 2 stands over seed record B 1",
        "given record A 3 stands over user record C 2",
    ]


def test_two_records_of_one_file_are_no_tie_either():
    old, new = record("A", 1, tuned_at="2026-01-01"), record("B", 2, tuned_at="2026-01-02")
    merged = merge_sources([], records(new, old))
    assert choices(merged) == [("B", 2)]
    assert [item.dropped.runner for item in merged.overridden] == ["A"]


def test_what_was_tuned_under_another_runner_is_new():
    merged = merge_sources([], records(record("A", 1)))
    (fresh,) = merged.new_in({key_of("B"): ["B", 1]})
    assert (fresh.runner, fresh.source) == ("B", "tuned")


# --- the store --------------------------------------------------------------------------------------------------


def test_what_is_committed_replaces_another_runners_record_of_that_question(tmp_path):
    store = RecordStore(tmp_path / "r.json", ENVIRONMENT)
    store.commit([record("A", 1), record("A", 1, bucket=16)])
    RecordStore(tmp_path / "r.json", ENVIRONMENT).commit([record("B", 2)])
    assert not store.verify(), "what another engine put there since is not put back beside it"
    assert choices(RecordStore(tmp_path / "r.json", ENVIRONMENT).load()) == [("A", 1), ("B", 2)]


def test_a_pinned_record_stands_against_another_runners(tmp_path):
    store = RecordStore(tmp_path / "r.json", ENVIRONMENT)
    store.commit([record("A", 1, pinned=True)])
    store.commit([record("B", 2)])
    assert choices(RecordStore(tmp_path / "r.json", ENVIRONMENT).load()) == [("A", 1)]


# --- a start ----------------------------------------------------------------------------------------------------


def edit(report, change) -> Path:
    """Rewrite the user's file by hand: ``change`` gets the document without its checks."""
    path = Path(report.cache_path)
    document = json.loads(path.read_text())
    document.pop("_generation")
    change(document)
    path.write_text(json.dumps(document))
    return path


def rename_all(document: dict, runner: str) -> None:
    for key in [key for key in document if not key.startswith("_")]:
        document[with_runner(key, runner)] = [runner, *document.pop(key)[1:]]


def test_records_of_an_unknown_runner_are_told_once_and_replaced_by_what_is_tuned(tmp_path, caplog):
    path = edit(start(tmp_path), lambda document: rename_all(document, "SomeKernelOfTomorrow"))
    report = start(tmp_path)
    assert report.status == "completed" and report.fallbacks == 0 and report.profiles_tuned == 5
    (rejected,) = report.records.rejected
    assert rejected["reason"] == "5 records name SomeKernelOfTomorrow, which is no runner of sglang::moe here"
    assert rejected["reason"] in caplog.text
    assert "SomeKernelOfTomorrow" not in path.read_text()
    assert start(tmp_path).profiles_tuned == 0


def test_a_record_of_the_first_runner_does_not_hide_a_newer_one_of_the_second(tmp_path):
    def both(document):
        for key in [key for key in document if not key.startswith("_")]:
            policy = document.pop(key)[2:]
            for runner in ("SortedMoE", "DenseMoE"):
                document[with_runner(key, runner)] = [runner, 1, *policy]
        notes = {
            key: {"tactic": 1, "tuned_at": "2026-01-02" if "DenseMoE" in key else "2026-01-01"}
            for key in document
            if not key.startswith("_")
        }
        document["_metadata"]["sglang"] = {**document["_metadata"]["sglang"], "records": notes}

    edit(start(tmp_path), both)
    report = start(tmp_path)
    assert report.profiles_tuned == 0
    assert {step.winners[OP_NAME] for step in report.steps} == {"DenseMoE 1"}
    assert len(report.records.superseded) == 5
    assert len(flashinfer_api.stored_entries()) == 5


# --- the commands -----------------------------------------------------------------------------------------------


def committed(path: Path, *found: Record) -> str:
    keys = tuple(item.key for item in found)
    steps = [StepEntry("decode 8", keys, tuned_ms=1.0)]
    assert RecordStore(path, ENVIRONMENT).commit(found, steps=steps)
    return str(path)


def output(capsys, *argv, code=0) -> dict:
    assert main([*argv, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_diff_calls_another_runner_a_change(tmp_path, capsys):
    old = committed(tmp_path / "old.json", record("A", 1))
    new = committed(tmp_path / "new.json", record("B", 2))
    (change,) = output(capsys, "diff", old, new, code=1)["records"]
    assert (change["change"], change["old"], change["new"]) == ("changed", "A 1", "B 2")


@pytest.mark.parametrize(("prefer", "kept"), [("later", "B"), ("faster", "A")])
def test_merge_keeps_one_of_two_runners(tmp_path, capsys, prefer, kept):
    files = [
        committed(tmp_path / "a.json", record("A", 1, tuned_ms=1.0)),
        committed(tmp_path / "b.json", record("B", 1, tuned_ms=2.0)),
    ]
    out = str(tmp_path / "out.json")
    result = output(capsys, "merge", *files, "-o", out, "--prefer", prefer)
    assert (result["records"], result["conflicts"]) == (1, 1)
    (shown,) = output(capsys, "show", out, "--no-check")["files"]
    assert [item["runner"] for item in shown["records"]] == [kept]
    assert all(step["complete"] for step in shown["steps"])


@pytest.mark.parametrize(("prefer", "kept", "took_ms"), [("later", "B", 2.0), ("faster", "A", 1.0)])
def test_the_times_that_a_start_noted_by_step_decide_and_go_with_the_choice(
    tmp_path, capsys, prefer, kept, took_ms
):
    files = []
    for runner, tuned_ms in (("A", 1.0), ("B", 2.0)):
        path = tmp_path / f"{runner}.json"
        steps = [StepEntry("decode 8", (key_of(runner),), default_ms=3.0, tuned_ms=tuned_ms)]
        RecordStore(path, ENVIRONMENT).commit([record(runner, 1)], steps=steps)
        files.append(str(path))
    (change,) = output(capsys, "diff", *files, code=1)["records"]
    assert (change["old_ms"], change["new_ms"]) == (1.0, 2.0)
    out = str(tmp_path / "out.json")
    output(capsys, "merge", *files, "-o", out, "--prefer", prefer)
    (shown,) = output(capsys, "show", out, "--no-check")["files"]
    assert [item["runner"] for item in shown["records"]] == [kept]
    assert [step["tuned_ms"] for step in shown["steps"]] == [took_ms]


@pytest.mark.parametrize("change", ["by hand", "since"])
def test_a_time_of_another_choice_is_no_time_of_this_one(tmp_path, capsys, change):
    old = committed(tmp_path / "old.json", record("A", 1))
    new = committed(tmp_path / "new.json", record("A", 2))
    if change == "since":
        RecordStore(new, ENVIRONMENT).commit([record("A", 3, tuned_at="2999-01-01")])
    else:
        document = json.loads(Path(new).read_text())
        document[key_of("A")][1] = 3
        Path(new).write_text(json.dumps(document))
    (difference,) = output(capsys, "diff", old, new, code=1)["records"]
    assert (difference["old_ms"], difference["new"], difference["new_ms"]) == (1.0, "A 3", None)


def test_show_and_export_seed_pass_over_what_a_start_would(tmp_path, capsys):
    both = committed(tmp_path / "r.json", record("A", 1, tuned_at="2026-01-01"))
    document = json.loads(Path(both).read_text())
    document.pop("_generation")
    document[key_of("B")] = ["B", 2]
    Path(both).write_text(json.dumps(document))
    (shown,) = output(capsys, "show", both, "--no-check")["files"]
    (rejected,) = shown["rejected"]
    assert rejected == {"key": key_of("B"), "reason": "the record of A answers the same question"}
    fields = ("model_type=x", "sm=sm90", "dtype=bfloat16", "tp=1", "pp=1", "ep=1")
    applies = [word for field in fields for word in ("--applies", field)]
    seed = output(capsys, "export-seed", both, "-o", str(tmp_path / "seed.json"), *applies)
    assert [entry[0] for entry in seed["records"].values()] == ["A"]
