"""The record file: FlashInfer's format both ways, merging, and bad files that never harm a start."""

from __future__ import annotations

import json
import logging
import os

import pytest

from sglang.srt.autotune.records.document import (
    Document,
    RejectedFile,
    parse_document,
    read_document,
    to_bytes,
)
from sglang.srt.autotune.records.environment import ENVIRONMENT_FIELDS, compare_environment
from sglang.srt.autotune.records.record import Record, RecordSet, StepEntry
from sglang.srt.autotune.records.store import RecordStore, load_file

ENVIRONMENT = {name: "unknown" for name in ENVIRONMENT_FIELDS} | {
    "flashinfer_version": "0.7.2",
    "gpu": "NVIDIA H200",
}
POLICY = ("cuda_graph_profile_replays", None, "l2_cache_policy", "hot")


def key_of(bucket: int, op: str = "op") -> str:
    return f"('{op}', 'R', (({bucket}, 64),), (torch.bfloat16,))"


def record(bucket: int, tactic=1, **fields) -> Record:
    return Record(key_of(bucket), "R", tactic, POLICY, **{"source": "tuned", **fields})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a" / "rank_tp0_pp0_dp0.json"


def store_at(path, **kwargs) -> RecordStore:
    return RecordStore(path, ENVIRONMENT, **kwargs)


def choices(loaded) -> dict[str, object]:
    return {key: found.tactic for key, found in loaded.records.items()}


# --- the format ---------------------------------------------------------------------------------------------


def test_what_is_committed_is_loaded_by_the_next_start(path):
    step = StepEntry("decode:8", (key_of(8),), default_ms=2.0, tuned_ms=0.5)
    store_at(path).commit(
        [record(8, (128, 4), tuned_ms=0.5)], namespaces={"megamoe": {"8": {"m": 1}}}, steps=[step]
    )
    loaded = store_at(path).load()
    found = loaded.records[key_of(8)]
    assert (found.tactic, found.policy, found.source, found.tuned_ms) == ((128, 4), POLICY, "tuned", 0.5)
    assert found.tuned_at is not None
    assert loaded.namespaces == {"megamoe": {"8": {"m": 1}}}
    assert loaded.steps["decode:8"].keys == step.keys
    assert loaded.problems == []


def test_the_generation_is_the_one_that_flashinfer_computes(path):
    store_at(path).commit([record(8)])
    found = read_document(path, check_generation=True)
    assert isinstance(found, Document) and found.generation and not found.edited
    content = json.loads(path.read_text())
    content[key_of(8)][1] = 2
    path.write_text(json.dumps(content))
    edited = read_document(path, check_generation=True)
    assert isinstance(edited, Document) and edited.edited


def test_a_note_about_another_tactic_is_dropped(path):
    store_at(path).commit([record(8, 3, pinned=True, tuned_ms=1.0)])
    content = json.loads(path.read_text())
    content[key_of(8)][1] = 5
    path.write_text(json.dumps(content))
    found = store_at(path).load().records[key_of(8)]
    assert (found.tactic, found.pinned, found.tuned_ms) == (5, False, None)


def test_flashinfer_loads_our_file_and_we_load_its(path, tmp_path):
    autotuner = pytest.importorskip("flashinfer.autotuner")
    tuner = autotuner.AutoTuner.get()
    tuner.clear_cache()
    theirs = tmp_path / "theirs.json"
    try:
        built = autotuner.ProfilingCacheKey("op", "R", 0, ((8, 64),), ("x",))
        tuner.profiling_cache[built] = ((2, (128, 64), False), None)
        tuner.publish_namespaced_records("engine", {"a": 1})
        tuner.save_configs(str(theirs))
        saved = read_document(theirs, check_generation=True)
        assert isinstance(saved, Document) and not saved.edited
        assert saved.records[built.file_key].tactic == (2, (128, 64), False)

        stamp = {name: saved.metadata[name] for name in ENVIRONMENT_FIELDS}
        RecordStore(path, stamp).commit(
            [record(8, (1, 2), pinned=True)],
            namespaces={"ours": {"k": [1]}},
            steps=[StepEntry("decode:8", (key_of(8),))],
        )
        tuner.clear_cache()
        assert tuner.load_configs(str(path))
        assert tuner.get_namespaced_records("ours") == {"k": [1]}
        assert list(tuner._file_configs) == [key_of(8)], "our notes must not become winners"

        # And FlashInfer's own merge into our file keeps what we noted.
        tuner.profiling_cache[built] = (4, None)
        tuner.save_configs(str(path))
        merged = RecordStore(path, stamp).load()
        assert merged.records[key_of(8)].pinned and merged.records[built.file_key].tactic == 4
        assert "decode:8" in merged.steps
    finally:
        tuner.clear_cache()


# --- merging ------------------------------------------------------------------------------------------------


def test_two_engines_on_one_file_lose_nothing(path):
    one, two = store_at(path), store_at(path)
    one.commit([record(1)], namespaces={"n": {"a": 1}})
    two.commit([record(2)], namespaces={"n": {"b": 2}, "m": {}})
    one.commit([record(4)])
    loaded = store_at(path).load()
    assert choices(loaded) == {key_of(1): 1, key_of(2): 1, key_of(4): 1}
    assert loaded.namespaces == {"n": {"a": 1, "b": 2}}


def test_what_another_writer_lost_is_put_back(path):
    one = store_at(path)
    one.commit([record(1)], steps=[StepEntry("decode:1", (key_of(1),))])
    # Another engine, one that does not merge.
    path.write_bytes(to_bytes(RecordSet({key_of(2): record(2)}), ENVIRONMENT))
    assert one.verify()
    loaded = store_at(path).load()
    assert set(loaded.records) == {key_of(1), key_of(2)} and "decode:1" in loaded.steps
    assert not one.verify()


def test_a_newer_winner_replaces_an_older_one_but_not_a_pinned_one(path):
    store_at(path).commit([record(1, 5), record(2, 5, pinned=True)])
    store_at(path).commit([record(1, 6), record(2, 6)])
    assert choices(store_at(path).load()) == {key_of(1): 6, key_of(2): 5}
    store_at(path).commit([record(2, 7, pinned=True)])
    assert choices(store_at(path).load())[key_of(2)] == 7


def test_what_could_not_be_read_back_is_not_stored(path, caplog):
    store = store_at(path)
    assert store.commit([Record("no key", "R", 1), record(1)], namespaces={"empty": {}})
    assert "is not stored" in caplog.text and store.writable
    assert set(store_at(path).load().records) == {key_of(1)}
    for namespaces in ({"_private": {"a": 1}}, {"n": {"a": {1, 2}}}, {"n": {"a": float("nan")}}):
        with pytest.raises(ValueError):
            store.commit(namespaces=namespaces)


def test_pinning_and_removing(path):
    store = store_at(path)
    store.commit([record(1), record(2)])
    assert store.pin([key_of(1)])
    assert [found.pinned for found in store_at(path).load().records.values()] == [True, False]
    assert not store.pin([key_of(1)])
    assert store.pin([key_of(1)], pinned=False)
    assert store.remove([key_of(1)])
    assert set(store_at(path).load().records) == {key_of(2)}


def test_seeded_and_given_records_never_enter_the_users_file(path):
    store = store_at(path)
    assert not store.commit([record(1, source="seed"), record(2, source="given")])
    assert not path.exists()
    store.commit([record(4), record(1, source="seed")])
    assert set(store_at(path).load().records) == {key_of(4)}


def test_a_start_that_learns_nothing_writes_nothing(path):
    store_at(path).commit([record(1, tuned_at="2026-01-01T00:00:00+00:00")])
    before = path.stat().st_ino, path.stat().st_mtime_ns, sorted(os.listdir(path.parent))
    again = store_at(path)
    again.commit(list(again.load().records.values()))
    again.commit()
    again.verify()
    assert (path.stat().st_ino, path.stat().st_mtime_ns, sorted(os.listdir(path.parent))) == before


def test_target_and_draft_keep_to_their_own_files(path):
    draft = path.with_name("rank_tp0_pp0_dp0_draft.json")
    store_at(path).commit([record(1)])
    store_at(draft).commit([record(2)])
    assert set(store_at(path).load().records) == {key_of(1)}
    assert set(store_at(draft).load().records) == {key_of(2)}


def test_a_pod_that_moved_to_another_gpu_starts_warm_and_keeps_what_it_inherits(path):
    sibling = path.with_name("sibling.json")
    store_at(sibling).commit([record(1)])
    moved = store_at(path, fallback=sibling)
    assert set(moved.load().records) == {key_of(1)}
    assert not moved.commit(list(moved.load().records.values()))
    assert not path.exists()
    moved.commit([record(2)])
    assert set(store_at(path).load().records) == {key_of(1), key_of(2)}
    assert set(store_at(sibling).load().records) == {key_of(1)}


# --- other environments ---------------------------------------------------------------------------------------


def test_a_file_of_another_environment_is_refused_in_words(path):
    store_at(path).commit([record(1)])
    loaded = RecordStore(path, {**ENVIRONMENT, "cublas_version": "13.2.0", "gpu": "NVIDIA H100"}).load()
    assert loaded.records == {} and loaded.environment.hard
    assert "gpu: saved NVIDIA H200, current NVIDIA H100" in loaded.problems[0]
    assert "cublas_version: saved unknown, current 13.2.0" in loaded.problems[0]


def test_a_file_of_another_environment_is_set_aside_not_overwritten(path, caplog):
    store_at(path).commit([record(1)])
    other = {**ENVIRONMENT, "gpu": "NVIDIA H100"}
    RecordStore(path, other).commit([record(2)])
    assert set(RecordStore(path, other).load().records) == {key_of(2)}
    assert set(store_at(path.with_name(path.name + ".bad-environment-1")).load().records) == {key_of(1)}
    assert "set aside" in caplog.text


@pytest.mark.parametrize(
    ("saved", "current", "verdict"),
    [("1", "1", "match"), ("*", "1", "match"), ("unknown", "unknown", "match"), (None, "1", "soft"),
     ("unknown", "1", "soft"), ("None", "1", "soft"), ("1", "2", "hard"), ("1", "unknown", "hard"), (5, "5", "hard"),
     ({}, "5", "hard"), ([], "5", "hard")],
)  # fmt: skip
def test_one_field_compares_as_in_flashinfer(saved, current, verdict):
    comparison = compare_environment({"gpu": saved}, {"gpu": current})
    assert ("match" if comparison.matches else "hard" if comparison.hard else "soft") == verdict
    core = pytest.importorskip("flashinfer.autotuner.autotuner")
    hard, soft = core._classify_metadata_mismatches({"gpu": saved}, {"gpu": current})
    assert ("hard" if hard else "soft" if soft else "match") == verdict


def test_of_long_lists_of_packages_only_what_differs_is_told():
    digest = "73711f781c33b3409da8952f75169697208b0d9fc9c5c975d7c613c2b7a005e9"
    saved, current = (
        f"cpython-311;dsl==4.8.1:{digest};torch==2.12",
        f"cpython-311;dsl==4.8.1:{digest};torch==2.13",
    )
    words = compare_environment({"cutlass_dsl_version": saved}, {"cutlass_dsl_version": current}).words()
    assert words == "cutlass_dsl_version: saved torch==2.12, current torch==2.13"
    words = compare_environment({"gpu": f"a:{digest};b;c;d;e"}, {"gpu": "x"}).words()
    assert words == "gpu: saved a:73711f78..., b, c and 2 more, current x"


def test_a_file_without_a_stamp_is_not_trusted(path):
    path.parent.mkdir()
    path.write_bytes(to_bytes(RecordSet({key_of(1): Record(key_of(1), "R", 1)}), None))
    loaded = store_at(path).load()
    assert not loaded.records and not loaded.environment.hard and "not recorded" in loaded.problems[0]


# --- bad files ------------------------------------------------------------------------------------------------

BAD_FILES = {
    "empty": b"",
    "zeros": b"\0" * 100,
    "truncated": b'{"_metadata": {"gpu": "x"}, "(',
    "not-json": b"\x7fELF\x02",
    "not-utf8": b'{"\xff": 1}',
    "a-list": b"[]",
    "a-number": b"12",
    "deep": b"[" * 100_000,
    "deep-object": b'{"a":' * 100_000,
    "long-integer": b'{"a": ' + b"9" * 10_000 + b"}",
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_file_is_reported_set_aside_and_replaced(path, kind, caplog):
    path.parent.mkdir()
    path.write_bytes(BAD_FILES[kind])
    store = store_at(path)
    loaded = store.load()
    assert (
        loaded.records == {} and isinstance(loaded.rejected_file, RejectedFile) and len(loaded.problems) == 1
    )
    assert store.commit([record(1)]) and store.writable
    assert set(store_at(path).load().records) == {key_of(1)}
    aside = [name for name in os.listdir(path.parent) if ".bad-" in name]
    assert len(aside) == 1 and (path.parent / aside[0]).read_bytes() == BAD_FILES[kind]


def test_a_fifo_or_directory_in_the_files_place_does_not_hang_or_fail(path):
    path.parent.mkdir()
    os.mkfifo(path)
    assert store_at(path).load().rejected_file.slug == "not-a-file"
    assert store_at(path).commit([record(1)])
    os.unlink(path)
    path.mkdir()
    assert store_at(path).load().rejected_file.slug == "not-a-file"
    assert store_at(path).commit([record(2)])
    assert set(store_at(path).load().records) == {key_of(2)}


def test_a_huge_file_is_not_read(path):
    path.parent.mkdir()
    with open(path, "wb") as stream:
        stream.truncate(10 * 2**30)  # sparse
    assert store_at(path).load().rejected_file.slug == "too-large"


BAD_ENTRIES = {
    "text": ("_comment", "hello"),
    "short": (key_of(1), ["R"]),
    "object": (key_of(1), {"runner": "R"}),
    "null": (key_of(1), None),
    "runner": (key_of(1), [5, 1]),
    "other-runner": (key_of(1), ["Q", 1]),
    "tactic": (key_of(1), ["R", {"a": 1}]),
    "nan": (key_of(1), ["R", [float("nan")]]),
    "huge": (key_of(1), ["R", 2**80]),
    "policy": (key_of(1), ["R", 1, "hot"]),
    "cudnn": ("('op', 'CudnnR', ((8, 64),), ())", ["CudnnR", 3]),
    "escape": ("\x1b[2J('op', 'R', ((8,),), ())", ["R", 1]),
}


@pytest.mark.parametrize("kind", BAD_ENTRIES)
def test_one_bad_entry_costs_one_entry(path, kind):
    name, value = BAD_ENTRIES[kind]
    path.parent.mkdir()
    good = json.loads(to_bytes(RecordSet({key_of(64): record(64)}), ENVIRONMENT))
    path.write_text(json.dumps({**good, name: value}))
    loaded = store_at(path).load()
    assert set(loaded.records) == {key_of(64)}
    assert len(loaded.rejected) == 1 and len(loaded.problems) == 1 and loaded.problems[0].isprintable()
    original = path.read_bytes()
    store_at(path).commit([record(2)])
    assert set(store_at(path).load().records) == {key_of(64), key_of(2)}
    assert path.with_name(path.name + ".bad-entries-1").read_bytes() == original


@pytest.mark.parametrize(
    ("part", "value"),
    [("_records", 5), ("_records", {"n": 5}), ("_records", {"_n": {}}), ("_records", {"n": {"k": float("inf")}}),
     ("_records", {"n": {"k": json.loads("[" * 200 + "]" * 200)}}),
     ("_metadata", {"sglang": {"schema": 1, "records": 5, "steps": 7}}),
     ("_metadata", {"sglang": {"schema": 1, "steps": {"s": {"keys": [5]}, "t": 5}}}), ("_metadata", {"sglang": []}),
     ("_metadata", {"sglang": {"schema": 1, "records": {
         key_of(64): {"tactic": 1, "source": "evil", "tuned_ms": "x", "pinned": 1}}}})],
)  # fmt: skip
def test_bad_side_content_costs_no_record(path, part, value):
    content = json.loads(to_bytes(RecordSet({key_of(64): record(64)}), ENVIRONMENT))
    content[part] = {**ENVIRONMENT, **value} if part == "_metadata" else value
    path.parent.mkdir()
    path.write_text(json.dumps(content))
    loaded = store_at(path).load()
    assert choices(loaded) == {key_of(64): 1} and loaded.steps == {}
    assert loaded.records[key_of(64)].pinned is False


def test_parsing_never_raises_whatever_byte_is_broken():
    good = to_bytes(RecordSet({key_of(n): record(n) for n in (1, 2)}, {"n": {"k": 1}}), ENVIRONMENT)
    for position in range(0, len(good), 7):
        for byte in (b"", b"\0", b"{", b'"', b"9"):
            assert parse_document(good[:position] + byte + good[position + 1 :], "f") is not None


# --- places that cannot be written ----------------------------------------------------------------------------


def test_an_impossible_place_degrades_to_memory_with_one_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    store = store_at(tmp_path / "file" / "sub" / "r.json")
    assert store.load().problems == []
    with caplog.at_level(logging.WARNING):
        assert not store.commit([record(1)])
        assert not store.commit([record(2)])
    assert not store.writable and "SGLANG_CACHE_DIR" in caplog.text
    assert len(caplog.records) == 1
    assert set(store.load().records) == {key_of(1), key_of(2)}


def test_a_place_that_becomes_writable_gets_everything(tmp_path):
    blocker = tmp_path / "dir"
    blocker.write_text("")
    store = store_at(blocker / "r.json")
    store.commit([record(1)])
    blocker.unlink()
    assert store.commit([record(2)]) and store.writable and store.reason is None
    assert set(store_at(blocker / "r.json").load().records) == {key_of(1), key_of(2)}


def test_a_given_file_is_read_without_touching_it(path):
    store_at(path).commit([record(1)])
    listing = sorted(os.listdir(path.parent))
    given = load_file(path, source="given", environment=ENVIRONMENT)
    assert [found.source for found in given.records.values()] == ["given"]
    assert sorted(os.listdir(path.parent)) == listing
    assert not load_file(path.with_name("absent"), source="given", environment=ENVIRONMENT).exists
