"""`sglang autotune show, diff, merge, pin, export-seed` on files of this engine and of others."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang.cli.autotune import COMMANDS, main
from sglang.cli.autotune.common import age
from sglang.srt.autotune.records.cache_key import CacheIdentity, CachePath, RankPlace
from sglang.srt.autotune.records.environment import ENVIRONMENT_FIELDS
from sglang.srt.autotune.records.record import Record, StepEntry
from sglang.srt.autotune.records.seeds import BUILTIN_SEEDS, SeedCatalogue
from sglang.srt.autotune.records.store import RecordStore

ENVIRONMENT = {name: "1" for name in ENVIRONMENT_FIELDS} | {
    "flashinfer_version": "0.7.2",
    "gpu": "NVIDIA H200",
}
HOT = ("cuda_graph_profile_replays", None, "l2_cache_policy", "hot")
IDENTITY = CacheIdentity(
    model={"model_type": "qwen3_moe", "hidden_size": 2048, "num_experts": 128},
    dtype="bfloat16",
    environment=ENVIRONMENT,
    backends={"moe": "flashinfer_cutlass"},
    parallel={"tp": 1, "pp": 1, "ep": 1, "attn_dp": 1},
)


def key_of(op: str, bucket: int) -> str:
    return f"('{op}', 'MoERunner', (({bucket}, 2048), (0,)), (torch.bfloat16, 8))"


def record(op: str, bucket: int, tactic: Any, **fields: Any) -> Record:
    return Record(key_of(op, bucket), "MoERunner", tactic, HOT, **{"source": "tuned", **fields})


def commit(path: Path, *records: Record, environment: dict[str, str] = ENVIRONMENT, **more: Any) -> Path:
    assert RecordStore(path, environment).commit(records, **more)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file as a start leaves it, with its identity beside it."""
    where = CachePath(tmp_path / "root", IDENTITY, "sm90")
    where.describe()
    return commit(
        where.records(RankPlace()),
        record("gemm1", 8, (128, 4), tuned_ms=0.5, default_ms=1.0),
        record("gemm1", 16, 7, pinned=True),
        record("gemm2", 8, -1),
        namespaces={"megamoe": {"8": {"m": 1}}},
        steps=[StepEntry("decode:8", (key_of("gemm1", 8), key_of("gemm2", 8)), default_ms=2.0, tuned_ms=1.0)],
    )


def output(capsys: pytest.CaptureFixture[str], *argv: object, code: int = 0) -> str:
    assert main([str(item) for item in argv]) == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.out if code != 2 else captured.err


def output_json(capsys: pytest.CaptureFixture[str], *argv: object, code: int = 0) -> Any:
    return json.loads(output(capsys, *argv, "--json", code=code))


# --- show -------------------------------------------------------------------------------------------------------


def test_show_explains_each_record(path, capsys):
    text = output(capsys, "show", path, "--no-check")
    rows = {tuple(line.split()[:2]): line for line in text.splitlines() if "MoERunner" in line}
    first = rows["gemm1", "8"]
    assert all(part in first for part in ("[128, 4]", "tuned", "eager, hot L2", "1.000", "0.500"))
    assert "(pinned)" in rows["gemm1", "16"] and "default" in rows["gemm2", "8"]
    assert "decode:8" in text and "namespace megamoe: 1 entries" in text


def test_show_selects_by_op_and_bucket(path, capsys):
    (file,) = output_json(capsys, "show", path, "--no-check", "--op", "gemm1", "--bucket", 16, 32)["files"]
    assert [(item["op"], item["bucket"], item["tactic"]) for item in file["records"]] == [("gemm1", 16, 7)]


def test_show_has_only_the_steps_of_what_was_selected_in_the_order_of_a_start(capsys, tmp_path):
    sizes = ("decode:16", "prefill:128", "decode:2", "prefill:2048")
    steps = [StepEntry(name, (key_of("gemm1", int(name.split(":")[1])),)) for name in sizes]
    records = [record("gemm1", int(name.split(":")[1]), 1) for name in sizes]
    path = commit(tmp_path / "r.json", *records, steps=steps)
    (file,) = output_json(capsys, "show", path, "--no-check")["files"]
    assert [step["step"] for step in file["steps"]] == [
        "decode:2",
        "decode:16",
        "prefill:2048",
        "prefill:128",
    ]
    (file,) = output_json(capsys, "show", path, "--no-check", "--bucket", 2)["files"]
    assert [step["step"] for step in file["steps"]] == ["decode:2"]
    assert "none of its 4 records matches" in output(capsys, "show", path, "--no-check", "--op", "none")


def megamoe(capacity: int) -> dict[str, Any]:
    """An entry in the form in which a start keeps a MegaMoE winner."""
    entry = {"max_tokens": capacity, "knobs": {"tile": [64, 128]}, "p50_us": 20.04, "source": "sweep"}
    return {"kernel": "sm90_fp8", "version": 1, "entry": entry, "default_us": 30.0}


def test_show_has_the_winners_of_megamoe(capsys, tmp_path):
    entries = {f"k|max_tokens={n}": megamoe(n) for n in (16, 2)}
    path = commit(tmp_path / "r.json", namespaces={"flashinfer_megamoe": entries})
    text = output(capsys, "show", path, "--no-check")
    rows = [line.split() for line in text.splitlines() if "sm90_fp8" in line]
    assert [row[1:4] for row in rows] == [["2", "30.0", "20.0"], ["16", "30.0", "20.0"]]
    assert '{"tile": [64, 128]}' in text and "no records" not in text
    assert "2 records" in output(capsys, "show", tmp_path, "--no-check")
    assert "16" not in output(capsys, "show", path, "--no-check", "--bucket", 2).split()


def test_show_says_why_a_file_would_not_load_here(path, capsys):
    pytest.importorskip("flashinfer")
    (file,) = output_json(capsys, "show", path)["files"]
    assert file["loads_here"] is False
    assert any(words.startswith("gpu: saved NVIDIA H200, current ") for words in file["problems"])
    text = output(capsys, "show", path)
    assert "would NOT load here" in text and "gpu: saved NVIDIA H200" in text


def test_show_lists_a_directory(path, capsys, tmp_path):
    (tmp_path / "root" / "bad.json").write_text("{")
    (path.parent / "report.json").write_text("{}")  # a start leaves it there; it is no record file
    files = output_json(capsys, "show", tmp_path / "root", "--no-check")["files"]
    assert {Path(file["path"]).name: len(file["records"]) for file in files} == {"bad.json": 0, path.name: 3}
    text = output(capsys, "show", tmp_path / "root", "--no-check")
    assert "not valid JSON" in text and "qwen3_moe bfloat16 tp1 pp1 ep1" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "qwen3_moe bfloat16 tp1 pp1 ep1 portfolio"),
        ({"backends": {"moe": "reference_megamoe"}}, "qwen3_moe bfloat16 tp1 pp1 ep1 reference_megamoe"),
        ({"quantization": "fp8"}, "qwen3_moe bfloat16 fp8 tp1 pp1 ep1 portfolio"),
        ({"parallel": {"tp": 4, "attn_dp": 4}}, "qwen3_moe bfloat16 tp4 attn_dp4 portfolio"),
        ({"skip_ops": ["a::b"]}, "qwen3_moe bfloat16 tp1 pp1 ep1 portfolio without a::b"),
        ({"model": 1, "parallel": [], "backends": None, "skip_ops": "x"}, "? bfloat16"),
    ],
)
def test_the_engines_of_one_root_can_be_told_apart(capsys, tmp_path, changes, words):
    commit(tmp_path / "here" / "r.json", record("gemm1", 8, 1))
    identity = {
        "model": {"model_type": "qwen3_moe"},
        "dtype": "bfloat16",
        "quantization": None,
        "parallel": {"tp": 1, "pp": 1, "ep": 1, "attn_dp": 1},
        "backends": {"moe": "portfolio"},
        "skip_ops": [],
    }
    (tmp_path / "here" / "identity.json").write_text(json.dumps({**identity, **changes}))
    assert f"\nhere  {words}\n" in output(capsys, "show", tmp_path, "--no-check")


def test_show_without_a_path_lists_the_cache(path, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "empty"))
    assert "No record files" in output(capsys, "show", "--no-check")
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "root"))
    assert path.name in output(capsys, "show", "--no-check")


def test_show_reads_files_that_flashinfer_wrote_for_other_engines(capsys, tmp_path):
    policy = ["cuda_graph_profile_replays", 1, "l2_cache_policy", "cold"]
    content = {
        "_metadata": {**ENVIRONMENT, "flashinfer_version": "0.7.1"},
        "_records": {"trtllm_moe_da": {"k": {"v": [1]}}},
        "('trtllm::fused_moe::gemm1', 'MoERunner', ((8, 2048), (0,)), (torch.float32, True))": [
            "MoERunner",
            3,
        ],
        "('fp8_gemm', 'CutlassRunner', ((16, 64), (64, 8)), ())": [
            "CutlassRunner",
            [2, [128, 64], False],
            policy,
        ],
        "('fp8_gemm', 'CudnnRunner', ((16, 64), (64, 8)), ())": ["CudnnRunner", 3],
        "_generation": "0" * 64,
    }
    (tmp_path / "theirs.json").write_text(json.dumps(content))
    (file,) = output_json(capsys, "show", tmp_path / "theirs.json", "--no-check")["files"]
    assert [(item["op"], item["bucket"], item["tactic"], item["policy"]) for item in file["records"]] == [
        ("fp8_gemm", 16, [2, [128, 64], False], "graph x1, cold L2"),
        ("trtllm::fused_moe::gemm1", 8, 3, "unknown"),
    ]
    assert "cuDNN" in file["rejected"][0]["reason"] and file["edited_by_hand"]


def test_show_reads_seeds(capsys):
    (seed,) = BUILTIN_SEEDS.glob("kimi_k3*.json")
    (file,) = output_json(capsys, "show", seed, "--no-check")["files"]
    (item,) = file["records"]
    assert (item["bucket"], item["tactic"], item["source"]) == (16384, [128, 4], "seed")


def test_show_never_reads_a_file_as_markup_or_escapes(capsys, tmp_path):
    hostile = "('[bold red]x[/]', 'R', ((8, 1),), ('\\x1b[31m',))"
    commit(tmp_path / "r.json", Record(hostile, "R", "[link=file:///]y", source="tuned"))
    text = output(capsys, "show", tmp_path / "r.json", "--no-check")
    assert "[bold red]x[/]" in text and "[link=file:///]y" in text and "\x1b" not in text


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (119, "119 s"), (300, "5 min"), (7200, "2 h"), (86400 * 12, "12 d"), (-50, "0 s")],
)
def test_ages_read_in_words(seconds, words):
    now = datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc)
    assert age((now - datetime.timedelta(seconds=seconds)).isoformat(), now) == words
    assert age(None) == age("soon") == "-"


# --- diff -------------------------------------------------------------------------------------------------------


def test_diff_tells_what_was_added_removed_and_changed(path, capsys, tmp_path):
    other = commit(
        tmp_path / "other.json",
        record("gemm1", 8, (64, 1), tuned_ms=0.45),
        record("gemm2", 8, -1),
        record("gemm2", 32, 5),
        environment={**ENVIRONMENT, "cudnn_version": "2"},
    )
    result = output_json(capsys, "diff", path, other, code=1)
    assert [(item["change"], item["op"], item["bucket"]) for item in result["records"]] == [
        ("changed", "gemm1", "8"), ("removed", "gemm1", "16"), ("added", "gemm2", "32"),
    ]  # fmt: skip
    assert result["environment"] == [{"field": "cudnn_version", "old": "1", "new": "2"}]
    assert result["namespaces"] == [{"change": "removed", "namespace": "megamoe", "key": "8"}]
    text = output(capsys, "diff", path, other, code=1)
    assert "-10.0%" in text and "1 the same, 1 changed, 1 added, 2 removed" in text


def test_diff_of_the_same_choices_is_quiet(path, capsys):
    assert output(capsys, "diff", path, path) == "4 the same, 0 changed, 0 added, 0 removed\n"


def test_diff_says_when_two_files_have_nothing_in_common(path, capsys, tmp_path):
    other = commit(tmp_path / "other.json", record("gemm3", 8, 1))
    assert "No key is in both files" in output(capsys, "diff", path, other, code=1)


# --- merge ------------------------------------------------------------------------------------------------------


def merged(path: Path) -> dict[str, Any]:
    return {key: found.tactic for key, found in RecordStore(path, ENVIRONMENT).load().records.items()}


def test_merge_keeps_the_later_or_the_faster_and_what_is_pinned(path, capsys, tmp_path):
    other = commit(
        tmp_path / "b.json", record("gemm1", 8, 9, tuned_ms=0.9), record("gemm1", 16, 8), record("gemm2", 32, 5),
        namespaces={"megamoe": {"16": {"m": 2}}},
    )  # fmt: skip
    out = tmp_path / "out" / "merged.json"
    result = output_json(capsys, "merge", path, other, "-o", out)
    assert result == {"output": str(out), "records": 4, "conflicts": 2, "left_out": 0}
    expected = {key_of("gemm1", 8): 9, key_of("gemm1", 16): 7, key_of("gemm2", 8): -1, key_of("gemm2", 32): 5}
    assert merged(out) == expected
    assert RecordStore(out, ENVIRONMENT).load().namespaces == {"megamoe": {"8": {"m": 1}, "16": {"m": 2}}}
    assert "exists" in output(capsys, "merge", path, other, "-o", out, code=2)
    assert "4 records" in output(capsys, "merge", path, other, "-o", out, "--force", "--prefer", "faster")
    assert merged(out) == {**expected, key_of("gemm1", 8): (128, 4)}


def test_merge_refuses_mixed_environments(path, capsys, tmp_path):
    other = commit(tmp_path / "b.json", record("g", 8, 1), environment={**ENVIRONMENT, "gpu": "NVIDIA H100"})
    error = output(capsys, "merge", path, other, "-o", tmp_path / "out.json", code=2)
    assert "different environments (gpu: NVIDIA H200 and NVIDIA H100)" in error
    assert not (tmp_path / "out.json").exists()


def test_merge_refuses_what_does_not_say_where_it_was_measured(path, capsys, tmp_path):
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps({key_of("g", 1): ["MoERunner", 1]}))
    assert "_metadata lacks" in output(capsys, "merge", path, bare, "-o", tmp_path / "out.json", code=2)


# --- pin --------------------------------------------------------------------------------------------------------


def test_pin_and_unpin(path, capsys):
    told = output(capsys, "pin", path, "--op", "gemm1")
    assert told.splitlines() == [
        "gemm1 at 8 tokens, tactic [128, 4] of MoERunner: pinned",
        "gemm1 at 16 tokens, tactic 7 of MoERunner: already pinned",
    ]
    assert RecordStore(path, ENVIRONMENT).load().records[key_of("gemm1", 8)].pinned
    RecordStore(path, ENVIRONMENT).commit([record("gemm1", 8, 55)])
    assert merged(path)[key_of("gemm1", 8)] == (128, 4)
    assert output_json(capsys, "pin", path, "--all", "--off")["changed"]
    assert not any(found.pinned for found in RecordStore(path, ENVIRONMENT).load().records.values())


def test_pin_wants_to_know_which(path, capsys):
    assert "--op TEXT, --bucket N, or --all" in output(capsys, "pin", path, code=2)
    refused = output(capsys, "pin", path, "--op", "nothing", code=2)
    assert "holds no such record" in refused and "MegaMoE, cannot be pinned" in refused


# --- export-seed ------------------------------------------------------------------------------------------------


def test_an_exported_seed_is_chosen_where_it_was_measured(path, capsys, tmp_path):
    seeds = tmp_path / "seeds"
    argv = [
        "export-seed",
        path,
        "-o",
        seeds / "qwen.json",
        "--op",
        "gemm1",
        "--command",
        "make it",
        "--note",
        "n",
    ]
    assert "2 records for qwen3_moe" in output(capsys, *argv, "--applies", "chunked_prefill_size=8192")
    engine = {
        **IDENTITY.model, "dtype": "bfloat16", "quantization": None, "moe_runner_backend": "flashinfer_cutlass",
        **IDENTITY.parallel, "sm": "sm90", "flashinfer_version": "0.7.2", "chunked_prefill_size": 8192,
    }  # fmt: skip
    (seed,) = SeedCatalogue(seeds).select(engine, ENVIRONMENT).chosen
    assert set(seed.records) == {key_of("gemm1", 8), key_of("gemm1", 16)}
    assert seed.provenance["command"] == "make it" and seed.provenance["gpu"] == "NVIDIA H200"
    assert seed.provenance["measured_from"] != "not recorded"
    ((_, reasons),) = SeedCatalogue(seeds).select({**engine, "num_experts": 64}, ENVIRONMENT).refused
    assert reasons == ("num_experts: saved 128, current 64",)


def test_a_wildcard_in_a_seed_needs_a_reason(path, capsys, tmp_path):
    argv = ["export-seed", path, "-o", tmp_path / "s.json", "--any", "cudnn_version"]
    assert "--because" in output(capsys, *argv, code=2)
    output(capsys, *argv, "--because", "no cuDNN kernel here")
    seed = json.loads((tmp_path / "s.json").read_text())
    assert seed["environment"]["cudnn_version"] == "*"
    assert seed["provenance"]["any"] == {"fields": ["cudnn_version"], "because": "no cuDNN kernel here"}


def test_a_seed_of_an_unknown_engine_is_not_made(path, capsys, tmp_path):
    lonely = commit(tmp_path / "lonely" / "r.json", record("g", 8, 1))
    error = output(capsys, "export-seed", lonely, "-o", tmp_path / "s.json", code=2)
    assert "model_type" in error and "--applies" in error
    fields = [
        f"--applies={name}" for name in ("model_type=m", "dtype=bfloat16", "sm=sm90", "tp=1", "pp=1", "ep=1")
    ]
    output(capsys, "export-seed", lonely, "-o", tmp_path / "s.json", *fields)


# --- the command itself -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["show", "diff", "merge", "pin", "export-seed"])
def test_every_command_has_help_and_one_line_errors(command, capsys, tmp_path):
    assert command in COMMANDS
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0 and f"sglang autotune {command}" in capsys.readouterr().out
    files = ["absent.json"] * (2 if command in ("diff", "merge") else 1)
    wanted = {
        "merge": ["-o", tmp_path / "o.json"],
        "export-seed": ["-o", tmp_path / "o.json"],
        "pin": ["--all"],
    }
    argv = [command, *files, *wanted.get(command, [])]
    assert output(capsys, *argv, code=2) == f"sglang autotune {command}: error: absent.json does not exist\n"
    assert "unknown flag --jsn: did you mean --json?" in output(capsys, *argv, "--jsn", code=2)


def test_records_are_shown_without_torch(path):
    code = "import sys; from sglang.cli.main import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code, "autotune", "show", str(path), "--no-check"],
        capture_output=True,
        text=True,
        timeout=150,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "python")},
    )
    assert result.stdout.splitlines()[-1] == "False"
