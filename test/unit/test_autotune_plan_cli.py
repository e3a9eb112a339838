"""`sglang autotune plan`: what a start would do, told without a GPU, without torch and without FlashInfer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang.cli.autotune import main
from sglang.cli.autotune.preview import covered_steps, rank_places
from sglang.srt.autotune import gpus
from sglang.srt.autotune.gpus import gpu_named
from sglang.srt.autotune.identity import EngineIdentity
from sglang.srt.autotune.ops import MEGAMOE_OP, TUNABLE_OPS
from sglang.srt.autotune.plan import Limits, make_plan
from sglang.srt.autotune.records.cache_key import CachePath, RankPlace
from sglang.srt.autotune.records.environment import ENVIRONMENT_FIELDS
from sglang.srt.autotune.records.installed import installed_stamp, unknown_fields
from sglang.srt.autotune.records.placement import cache_path_of
from sglang.srt.autotune.records.record import Record, RecordSet, StepEntry
from sglang.srt.autotune.records.seeds import SeedCatalogue
from sglang.srt.autotune.records.store import RecordStore
from sglang.srt.autotune_config import identity_of, settings_of
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_support import SERVED_ARCHITECTURES
from sglang.srt.server_args import prepare_server_args

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "test" / "fixtures" / "models"
QWEN3, NVFP4 = ["--model-path", str(MODELS / "qwen3_30b_a3b")], MODELS / "qwen3_30b_a3b_nvfp4"
KIMI_PP8 = ["--model-path", str(MODELS / "kimi_k3"), "--pp-size", "8", "--chunked-prefill-size", "16384"]
KEY = "('sglang::moe', 'ReferenceMoE', ((8, 2048), (8, 8), (8, 8)), ())"


def plan_json(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["plan", *flags, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def plan_text(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["plan", *flags]) == 0
    return capsys.readouterr().out


def test_plan_imports_neither_torch_nor_flashinfer_nor_transformers():
    code = (
        "import sys; from sglang.cli.main import main; code = main(sys.argv[1:]);"
        "heavy = {'torch', 'flashinfer', 'transformers', 'numpy'} & {m.split('.')[0] for m in sys.modules};"
        "print(sorted(heavy), code)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, "autotune", "plan", *KIMI_PP8, "--gpu", "B300"],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
    )
    assert result.stdout.splitlines()[-1] == "[] 0", result.stderr
    assert result.stderr == ""


# Limits, steps, decision


def test_limits_are_per_rank_and_say_where_they_come_from(capsys):
    plan = plan_json(
        capsys,
        *("--model-path", str(NVFP4), "--gpu", "H200", "--tp-size", "4", "--attn-dp-size", "4"),
        *("--ep-size", "4", "--max-running-requests", "64", "--chunked-prefill-size", "4096"),
        *("--cuda-graph-max-bs-decode", "64"),
    )["plan"]
    assert plan["limits"]["max_running_requests"] == 16
    assert plan["limits"]["prefill_ceiling"] == 1024
    assert plan["limits"]["decode_batch_sizes"] == [1, 2, 4, 8, 12, 16]
    assert plan["capacities"] == [1, 2, 4, 8, 16, 1024]
    assert "--chunked-prefill-size 4096 over 4" in plan["limits"]["origins"]["prefill_ceiling"]


def test_a_gpu_below_hopper_is_skipped_in_words(capsys):
    text = plan_text(capsys, *QWEN3, "--gpu", "A100")
    assert text.startswith("FlashInfer autotune is skipped: compute capability 8.0 is below 9.0")
    assert "about 0 s: the stage is skipped" in text


def test_prefill_left_out_by_the_variable_is_said(capsys, monkeypatch):
    monkeypatch.setenv("SGLANG_FLASHINFER_AUTOTUNE_EXTEND", "0")
    assert "prefill             none: SGLANG_FLASHINFER_AUTOTUNE_EXTEND=0" in plan_text(capsys, *QWEN3)


def test_models_that_cannot_be_served_are_planned_and_marked(capsys):
    assert "cannot be served" in plan_text(capsys, *KIMI_PP8, "--gpu", "B200")
    assert "stored as nvfp4 cannot be loaded" in plan_text(
        capsys, "--model-path", str(NVFP4), "--gpu", "H200"
    )
    assert "--quantization fp8 is not supported for Qwen3MoeForCausalLM" in plan_text(
        capsys, *QWEN3, "--gpu", "H200", "--quantization", "fp8"
    )
    assert "note" not in plan_text(capsys, "--model-path", str(MODELS / "gpt_oss_120b"), "--gpu", "H200")
    assert "note" not in plan_text(capsys, *QWEN3, "--gpu", "H200")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpu", "B500"], "--gpu B500: no such GPU model is known here; did you mean B300?"),
        (["--gpu", "H100", "--device", "cpu"], "--gpu and --device cpu contradict each other"),
        (["--model-path", "/nowhere"], "--model-path /nowhere: there is no such directory"),
        (["--jsno"], "unknown flag --jsno"),
        (
            ["--moe-runner-backend", "portfolio"],
            "--moe-runner-backend portfolio needs a GPU: leave it out with --device cpu, or name the GPU to plan for "
            "with --gpu MODEL",
        ),
    ],
)
def test_a_wrong_flag_is_one_line(capsys, monkeypatch, flags, words):
    monkeypatch.setattr("sglang.cli.autotune.plan.gpu_here", lambda: None)
    assert main(["plan", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"sglang autotune plan: error: {words}") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "name", "words"),
    [
        (["--gpu", "H200"], "trtllm::fused_moe::gem1", "did you mean trtllm::fused_moe::gemm1?"),
        (["--device", "cpu"], "sglang::reference_moe", "did you mean sglang::moe?"),
        (["--device", "cpu"], "flashinfer_megamoe", "the ops are sglang::moe"),
        (
            ["--device", "cpu", "--moe-runner-backend", "torch_grouped"],
            "sglang::moe",
            "nothing can be tuned",
        ),
    ],
)
def test_a_skipped_op_that_nothing_asks_for_is_a_warning_with_what_was_meant(capsys, flags, name, words):
    assert main(["plan", *QWEN3, *flags, "--flashinfer-autotune-skip-ops", name]) == 0
    error = capsys.readouterr().err
    line = f"--flashinfer-autotune-skip-ops {name}: no kernel here asks for such an op; {words}\n"
    assert error.endswith(f"WARNING: {line}") and error.count("\n") == 1


@pytest.mark.parametrize("names", [["sglang::moe", "trtllm::fused_moe::gemm2"], ["sglang::moe"]])
def test_a_skipped_op_of_the_plan_is_no_warning(capsys, names):
    assert main(["plan", *QWEN3, "--gpu", "H200", "--flashinfer-autotune-skip-ops", *names]) == 0
    assert capsys.readouterr().err == ""


def test_gpu_models_are_known_by_short_and_by_driver_names():
    assert gpu_named("rtx-pro-6000").sm == "sm120"
    assert gpu_named("NVIDIA GB200").capability == (10, 0)
    assert gpu_named("NVIDIA H100 PCIe").device_name == "NVIDIA H100 PCIe"
    assert (gpu_named("NVIDIA H200 NVL").name, gpu_named("NVIDIA H20-3e").name) == ("H200", "H20")
    assert gpu_named("b300").memory_gib > gpu_named("B200").memory_gib


@pytest.mark.parametrize(
    ("model", "expected"), [("NVIDIA GB200", "NVIDIA GB200"), ("NVIDIA H100 PCIe", "NVIDIA H100 PCIe")]
)
def test_without_gpu_flag_the_gpu_that_the_driver_shows_is_planned_for(
    capsys, monkeypatch, tmp_path, model, expected
):
    # Where the driver's files would stand on a machine with a GPU.
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 42\n")
    monkeypatch.setattr(gpus, "_DRIVER_FILES", str(tmp_path))
    assert plan_json(capsys, *QWEN3)["device"]["gpu"] == expected
    (tmp_path / "0000:01:00.0" / "information").write_text("Model: NVIDIA X9000\n")
    assert main(["plan", *QWEN3]) == 2
    assert "NVIDIA X9000, is not known here" in capsys.readouterr().err


# Records


def store_of(flags: list[str], stamp: dict[str, str], gpu: str | None) -> tuple[CachePath, RecordStore]:
    """The store that a start with these flags would write, under a full stamp."""
    device, sm = ("cpu", "cpu") if gpu is None else ("cuda", gpu_named(gpu).sm)
    args = prepare_server_args(flags)
    config = ModelConfig.from_path(args.model_path, dtype=args.dtype_on(device))
    capability = None if gpu is None else gpu_named(gpu).capability
    identity: EngineIdentity = identity_of(args, config, device, capability)
    path = cache_path_of(identity, settings_of(args), stamp, sm)
    path.describe()
    return path, RecordStore(path.records(RankPlace()), stamp)


def test_records_of_this_machine_are_found_and_their_steps_counted(capsys):
    stamp = {field: "unknown" for field in ENVIRONMENT_FIELDS} | installed_stamp(None)
    path, store = store_of(QWEN3, stamp, None)
    record = Record(KEY, "ReferenceMoE", 1, source="tuned")
    store.commit([record], steps=[StepEntry("decode 8", (KEY,)), StepEntry("decode 4", ("missing",))])
    document = plan_json(capsys, *QWEN3, "--device", "cpu")
    assert document["records"]["directory"] == str(path.directory)
    (rank,) = document["records"]["ranks"]
    assert (rank["num_records"], rank["covered"]) == (1, ["decode 8"])
    assert "decode 8" not in document["todo"] and "decode 4" in document["todo"]
    text = plan_text(capsys, *QWEN3, "--device", "cpu")
    assert "rank_tp0_pp0_dp0.json  1 records, 1 of 16 steps covered" in text


def test_a_bucket_that_was_tuned_in_decode_covers_the_prefill_step_of_other_limits(capsys):
    stamp = {field: "unknown" for field in ENVIRONMENT_FIELDS} | installed_stamp(None)
    _, store = store_of(QWEN3, stamp, None)
    record = Record(KEY, "ReferenceMoE", 1, source="tuned")
    store.commit([record], steps=[StepEntry("decode 8", (KEY,))])
    small = ["--max-running-requests", "4", "--chunked-prefill-size", "16"]
    (rank,) = plan_json(capsys, *QWEN3, "--device", "cpu", *small)["records"]["ranks"]
    assert rank["covered"] == ["prefill 8"]


def test_records_of_flashinfers_op_alone_do_not_cover_the_portfolio():
    gemms = [
        KEY.replace("sglang::moe", f"trtllm::fused_moe::{gemm}").replace("ReferenceMoE", "MoERunner")
        for gemm in ("gemm1", "gemm2")
    ]
    records = {key: Record(key, "MoERunner", 1) for key in gemms}
    alone = RecordSet(records, steps={"decode 8": StepEntry("decode 8", tuple(gemms))})
    plan = make_plan(Limits((8,), 8, 8), include_prefill=False)
    assert covered_steps(plan, alone, TUNABLE_OPS["flashinfer_cutlass"]) == ("decode 8",)
    assert covered_steps(plan, alone, TUNABLE_OPS["portfolio"]) == ()
    both = RecordSet(
        {**records, KEY: Record(KEY, "ReferenceMoE", 1)},
        steps={"decode 8": StepEntry("decode 8", (KEY.replace("ReferenceMoE", "Other"), *gemms))},
    )
    assert covered_steps(plan, both, TUNABLE_OPS["portfolio"]) == ("decode 8",), "whoever answers"


def test_with_megamoe_capacities_take_the_place_of_steps(capsys):
    flags = [*QWEN3, "--device", "cpu", "--moe-runner-backend", "reference_megamoe"]
    stamp = {field: "unknown" for field in ENVIRONMENT_FIELDS} | installed_stamp(None)
    _, store = store_of(flags, stamp, None)
    store.commit(namespaces={MEGAMOE_OP: {"reference_megamoe|hidden=2048|max_tokens=16": {"entry": {}}}})
    document = plan_json(capsys, *flags)
    assert document["plan"]["steps"] == [] and document["records"]["ranks"][0]["capacities"] == [16]
    assert document["capacities_todo"] == [1, 2, 4, 8, 32, 64, 2048]
    text = plan_text(capsys, *flags)
    assert "no steps: MegaMoE is tuned by capacity" in text and "1 of 8 MegaMoE capacities" in text
    assert plan_json(capsys, *QWEN3)["capacities_todo"] is None


def test_without_reuse_no_record_is_counted_and_everything_is_to_do(capsys, monkeypatch):
    monkeypatch.setenv("SGLANG_FLASHINFER_AUTOTUNE_CACHE", "0")
    document = plan_json(capsys, *QWEN3, "--device", "cpu")
    assert len(document["todo"]) == len(document["plan"]["steps"])
    assert "none are loaded" in plan_text(capsys, *QWEN3, "--device", "cpu")


def test_a_gpu_directory_is_recognised_by_everything_but_what_only_the_gpu_knows(capsys):
    gpu_stamp = {field: "9.9" for field in ENVIRONMENT_FIELDS} | installed_stamp("NVIDIA H200")
    path, store = store_of(QWEN3, gpu_stamp, "H200")
    store.commit([Record(KEY, "ReferenceMoE", 1, source="tuned")])
    assert unknown_fields(installed_stamp("NVIDIA H200"))
    assert plan_json(capsys, *QWEN3, "--gpu", "H200")["records"]["directory"] == str(path.directory)
    # Another GPU of the same architecture, and other flags, are other directories.
    text = plan_text(capsys, *QWEN3, "--gpu", "H100")
    assert "none found under" in text and "unknown here" in text
    other = plan_json(capsys, *QWEN3, "--gpu", "H200", "--tp-size", "2")
    assert other["records"]["directory"] is None


def test_a_bad_given_file_is_listed_with_its_reason(capsys, tmp_path):
    bad = tmp_path / "given.json"
    bad.write_text("{")
    text = plan_text(capsys, *QWEN3, "--flashinfer-autotune-records", str(bad))
    assert f"{bad}: 0 records" in text and "is not valid JSON" in text


def test_the_stamp_read_from_package_metadata_is_what_flashinfer_writes():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("with CUDA some fields are known to the process alone")
    from sglang.srt.autotune import flashinfer_api

    real, read = flashinfer_api.environment(), installed_stamp(None)
    assert read and read == {field: real[field] for field in read}


def test_every_rank_has_a_file_of_its_own():
    args = prepare_server_args([*QWEN3, "--tp", "4", "--pp", "2", "--attn-dp-size", "2", "--ep", "4"])
    names = [place.file_name() for place in rank_places(args)]
    assert names[:4] == [f"rank_tp{t}_pp0_dp{t // 2}.json" for t in range(4)]
    assert len(set(names)) == 8


# Seeds


def test_the_kimi_seed_is_named_with_every_reason_against_it(capsys):
    (seed,) = plan_json(capsys, *KIMI_PP8[:-1], "8192", "--gpu", "H200")["seeds"]
    assert seed["used"] is False and not seed["asked_for"]
    assert any(
        reason.startswith("chunked_prefill_size: saved 16384, current 8192") for reason in seed["reasons"]
    )
    assert any(reason.startswith("sm: saved sm_103, current sm90") for reason in seed["reasons"])
    assert len(seed["reasons"]) == len(set(seed["reasons"]))


def test_a_seed_whose_open_fields_only_the_gpu_knows_is_neither_promised_nor_refused(capsys, monkeypatch):
    from sglang.cli.autotune import preview

    stamp = {**installed_stamp("NVIDIA B300 SXM6 AC"), "flashinfer_version": "0.7.2"}
    stamp.pop("cuda_version", None)
    monkeypatch.setattr(preview, "installed_stamp", lambda gpu: stamp)
    (seed,) = plan_json(capsys, *KIMI_PP8, "--gpu", "B300")["seeds"]
    assert seed["used"] is None
    stamp["cuda_version"] = "13.0"
    (seed,) = plan_json(capsys, *KIMI_PP8, "--gpu", "B300")["seeds"]
    assert seed["used"] is True and seed["buckets"] == [16384]


def test_models_without_a_seed_are_told_so(capsys):
    assert not [seed for seed in SeedCatalogue().seeds if seed.applies["model_type"] == "gpt_oss"]
    assert "none is for gpt_oss" in plan_text(capsys, "--model-path", str(MODELS / "gpt_oss_120b"))


# What is written down twice because one of the places needs torch


def test_op_names_are_those_of_the_runners():
    from sglang.srt.autotune.megamoe.records import NAMESPACE
    from sglang.srt.layers.moe.flashinfer_cutlass import FlashInferCutlassMoERunner
    from sglang.srt.layers.moe.portfolio import PortfolioMoERunner, TritonGroupedMoERunner
    from sglang.srt.layers.moe.reference import ReferenceMoERunner
    from sglang.srt.layers.moe.torch_grouped import TorchGroupedMoERunner

    assert TUNABLE_OPS["reference"] == ReferenceMoERunner.op_names
    assert TUNABLE_OPS["flashinfer_cutlass"] == FlashInferCutlassMoERunner.op_names
    assert TUNABLE_OPS["torch_grouped"] == TorchGroupedMoERunner.op_names
    assert TUNABLE_OPS["portfolio"] == (*PortfolioMoERunner.op_names, *FlashInferCutlassMoERunner.op_names)
    assert TUNABLE_OPS["triton_grouped"] == TritonGroupedMoERunner.op_names
    assert NAMESPACE == MEGAMOE_OP  # where the plan looks for the winners of capacities


def test_served_architectures_are_those_of_the_registry():
    from sglang.srt.models import registry

    assert set(SERVED_ARCHITECTURES) == set(registry._MODELS)
