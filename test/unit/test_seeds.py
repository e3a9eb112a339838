"""Seeds and precedence: a seed is used exactly where it was measured, and anything the user said stands over it."""

from __future__ import annotations

import json
import types
from dataclasses import replace
from pathlib import Path

import pytest

from sglang.srt.autotune.plan import make_plan
from sglang.srt.autotune.records.document import Document, read_document
from sglang.srt.autotune.records.environment import ENVIRONMENT_FIELDS
from sglang.srt.autotune.records.merging import materialise, merge_sources
from sglang.srt.autotune.records.record import Record, RecordSet, StepEntry, parse_key
from sglang.srt.autotune.records.seeds import BUILTIN_SEEDS, Seed, SeedCatalogue, read_seed, write_seed
from sglang.srt.autotune_config import identity_of
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.moe.triton_grouped import tactics
from sglang.srt.limits import derive_limits
from sglang.srt.server_args import prepare_server_args

FIXTURES = Path(__file__).parents[1] / "fixtures" / "models"
K3_NAME = "kimi_k3-pp8-chunk16384-sm103"
K3_APPLIES = {
    "model_type": "kimi_k3",
    "hidden_size": 3584,
    "num_experts": 896,
    "dtype": "bfloat16",
    "quantization": "mxfp4",
    "tp": 1,
    "pp": 8,
    "ep": 1,
    "attn_dp": 1,
    "chunked_prefill_size": 16384,
    "sm": "sm103",
    "flashinfer_version": "0.7.2",
}
K3_ENVIRONMENT = {
    "flashinfer_version": "0.7.2",
    "cuda_version": "13.0",
    "cublas_version": "13.1.0",
    "cudnn_version": "92400",
    "cudnn_frontend_version": "1.31.0",
    "cutlass_dsl_version": "4.8.0",
    "gpu": "NVIDIA B30Z",
}
K3_POLICY = ("cuda_graph_profile_replays", 1, "l2_cache_policy", "cold")


def select(applies=None, environment=None):
    return SeedCatalogue().select(
        {**K3_APPLIES, **(applies or {})}, {**K3_ENVIRONMENT, **(environment or {})}
    )


def k3_seed() -> Seed:
    return read_seed(BUILTIN_SEEDS / f"{K3_NAME}.json")


# --- choosing -------------------------------------------------------------------------------------------------


def test_the_kimi_k3_seed_is_chosen_where_it_was_measured():
    selection = select()
    assert [seed.name for seed in selection.chosen] == [K3_NAME]
    assert selection.refused == ()
    (record,) = selection.chosen[0].records.values()
    assert (record.runner, record.tactic, record.policy, record.source) == (
        "MoERunner",
        (128, 4),
        K3_POLICY,
        "seed",
    )
    assert parse_key(record.key).num_tokens == 16384


NEAR_MATCHES = {
    "tensor parallel": ({"tp": 8}, {}, "tp: saved 1, current 8"),
    "no pipeline": ({"pp": 1}, {}, "pp: saved 8, current 1"),
    "pipeline of 4": ({"pp": 4}, {}, "pp: saved 8, current 4"),
    "expert parallel": ({"ep": 8}, {}, "ep: saved 1, current 8"),
    "attention dp": ({"attn_dp": 8}, {}, "attn_dp: saved 1, current 8"),
    "chunk 8192": ({"chunked_prefill_size": 8192}, {}, "chunked_prefill_size: saved 16384, current 8192"),
    "chunk 32768": ({"chunked_prefill_size": 32768}, {}, "chunked_prefill_size: saved 16384, current 32768"),
    "no chunking": ({"chunked_prefill_size": -1}, {}, "chunked_prefill_size: saved 16384, current -1"),
    "float16": ({"dtype": "float16"}, {}, "dtype: saved bfloat16, current float16"),
    "float32": ({"dtype": "torch.float32"}, {}, "dtype: saved bfloat16, current torch.float32"),
    "sm100": ({"sm": "sm100"}, {"gpu": "NVIDIA B200"}, "sm: saved sm_103, current sm100"),
    "sm90": (
        {"sm": "sm90"},
        {"gpu": "NVIDIA H200"},
        "gpu: saved NVIDIA B30Z* or NVIDIA B300*, current NVIDIA H200",
    ),
    "cpu": ({"sm": "cpu"}, {"gpu": "unknown"}, "sm: saved sm_103, current cpu"),
    "gb300": ({}, {"gpu": "NVIDIA GB300"}, "gpu: saved NVIDIA B30Z* or NVIDIA B300*, current NVIDIA GB300"),
    "cuda 13.1": ({}, {"cuda_version": "13.1"}, "cuda_version: saved 13.0, current 13.1"),
    "a value that is not known": ({"pp": None}, {}, "pp: saved 8, current not known"),
    **{
        f"flashinfer {version}": (
            {"flashinfer_version": version},
            {"flashinfer_version": version},
            f"flashinfer_version: saved 0.7.2, current {version}",
        )
        for version in ("0.7.1", "0.7.2.post1", "0.7.4", "0.7.20", "unknown")
    },
}


@pytest.mark.parametrize("what", NEAR_MATCHES)
def test_a_near_match_is_refused_in_words(what):
    applies, environment, words = NEAR_MATCHES[what]
    selection = select(applies, environment)
    assert selection.chosen == ()
    ((name, reasons),) = selection.refused
    assert name == K3_NAME and words in reasons


@pytest.mark.parametrize("model_type", ["kimi_k2", "deepseek_v3", "qwen3_moe", "Kimi_K3", "kimi", "", None])
def test_another_model_is_passed_over_without_a_word(model_type):
    selection = select({"model_type": model_type})
    assert K3_NAME not in [seed.name for seed in selection.chosen]
    assert K3_NAME not in [name for name, _ in selection.refused]


def test_another_size_of_the_same_model_is_passed_over_without_a_word():
    for path in BUILTIN_SEEDS.glob("qwen3_moe*.json"):
        seed = read_seed(path)
        same = {**seed.applies, "num_experts": 64}
        assert [name for name, _ in SeedCatalogue().select(same, seed.environment).refused] == [seed.name]
        assert SeedCatalogue().select({**same, "hidden_size": 128}, seed.environment).refused == ()


@pytest.mark.parametrize("gpu", ["NVIDIA B30Z", "NVIDIA B300 SXM6 AC"])
@pytest.mark.parametrize(
    "library", ["cublas_version", "cudnn_version", "cudnn_frontend_version", "cutlass_dsl_version"]
)
def test_libraries_that_choose_no_kernel_here_do_not_matter(gpu, library):
    assert select({}, {"gpu": gpu, library: "anything"}).chosen


def test_everything_that_differs_is_named_at_once():
    ((_, reasons),) = select({"tp": 2, "pp": 4}, {"gpu": "NVIDIA H100"}).refused
    assert len(reasons) == 3


@pytest.mark.parametrize("backend", ["auto", "flashinfer_cutlass"])
def test_the_qwen3_seed_answers_every_bucket_on_an_h200(backend):
    flags = ["--model-path", str(FIXTURES / "qwen3_30b_a3b"), "--device", "cuda"]
    args = prepare_server_args([*flags, "--moe-runner-backend", backend])
    config = ModelConfig.from_path(args.model_path, dtype=args.dtype_on("cuda"))
    environment = {**K3_ENVIRONMENT, "flashinfer_version": "0.7.2.post1", "gpu": "NVIDIA H200"}
    identity = identity_of(args, config, "cuda", (9, 0))
    assert identity.backends["moe"] == ("portfolio" if backend == "auto" else backend)
    applies = {**identity.applies, "sm": "sm90", "flashinfer_version": "0.7.2.post1"}
    (seed,) = SeedCatalogue().select(applies, environment).chosen
    keys = [parse_key(key) for key in seed.records]
    plan = make_plan(derive_limits(args, config, "cuda"))
    for op in ("sglang::moe", "trtllm::fused_moe::gemm1", "trtllm::fused_moe::gemm2"):
        assert {key.num_tokens for key in keys if key.custom_op == op} == {step.bucket for step in plan.steps}
    for change in ({"tp": 2}, {"num_experts": 64}, {"flashinfer_version": "0.7.4"}, {"sm": "sm100"}):
        assert not SeedCatalogue().select({**applies, **change}, environment).chosen
    assert not SeedCatalogue().select(applies, {**environment, "gpu": "NVIDIA H100 80GB HBM3"}).chosen


def test_shipped_seeds_name_kernels_that_this_build_has():
    by_runner = {"FlashInferCutlassMoE": [0], "TorchGroupedMoE": [-1]}
    for path in BUILTIN_SEEDS.glob("*.json"):
        for record in read_seed(path).records.values():
            key = parse_key(record.key)
            if key.custom_op != "sglang::moe":
                continue
            if record.runner != "TritonGroupedMoE":
                assert record.tactic in by_runner[record.runner]
                continue
            assert (tactic := tactics.normalised(record.tactic)) is not None, record
            assert tactics.suits(tactic, key.num_tokens)


def test_every_shipped_seed_is_well_formed():
    paths = sorted(BUILTIN_SEEDS.glob("*.json"))
    assert paths and len(SeedCatalogue().seeds) == len(paths)
    for path in paths:
        seed = read_seed(path)
        assert seed.name == path.stem and seed.records and seed.provenance
        assert "flashinfer_version" in seed.applies and "sm" in seed.applies
        for record in seed.records.values():
            key = parse_key(record.key)
            assert key.num_tokens
            # Ops of this tree are measured by it, not by FlashInfer, which therefore notes no policy.
            assert record.policy is not None or key.custom_op.startswith("sglang::")


# --- the Kimi-K3 seed and FlashInfer ----------------------------------------------------------------------------


@pytest.fixture
def tuner():
    autotuner = pytest.importorskip("flashinfer.autotuner")
    instance = autotuner.AutoTuner.get()
    instance.clear_cache()
    yield instance
    instance.clear_cache()


class Module:
    """Stands for the compiled module, which needs a GPU; its class name is part of FlashInfer's key."""


def k3_call(num_tokens: int) -> types.SimpleNamespace:
    """What the op passes to the tuner for `num_tokens` tokens: FlashInfer's own runner, inputs and config."""
    torch = pytest.importorskip("torch")
    sm100 = pytest.importorskip("flashinfer.fused_moe.backends.trtllm.sm100_runner")
    enums = pytest.importorskip("flashinfer.tllm_enums")
    from flashinfer.fused_moe.shared.inputs import MoeRunnerInputs

    runner = sm100.MoERunner(
        Module(),
        top_k=16,
        num_local_experts=896,
        num_experts=896,
        dtype_act=enums.DtypeTrtllmGen.MxE4m3,
        dtype_weights=enums.DtypeTrtllmGen.MxE2m1,
        fp8_quantization_type=enums.Fp8QuantizationType.NoneFp8,
        hidden_size=3584,
        intermediate_size=3072,
        activation_type=enums.ActivationType.Situ.value,
        use_shuffled_weight=True,
        weight_layout=enums.WeightLayout.MajorK,
    )

    def tensor(width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((num_tokens, width), dtype=dtype, device="meta")

    inputs = MoeRunnerInputs(
        output=tensor(3584, torch.bfloat16),
        routing_logits=None,
        topk_ids=tensor(16, torch.int32),
        expert_weights=tensor(16, torch.float32),
        hidden_states=tensor(3584, torch.float8_e4m3fn),
        hidden_states_scale=tensor(3584 // 32, torch.float8_e4m3fn),
        gemm1_lora_delta=None,
        per_token_scale=None,
    )
    config = runner._make_tuning_config(
        inputs,
        tune_max_num_tokens=16384,
        routing_input_mode=enums.RoutingInputMode.UnpackedPrecomputed,
        hidden_states_scale_layout=sm100.SfLayout.layout_linear,
        use_cold_l2_cache=True,
        use_cuda_graph=True,
    )
    return types.SimpleNamespace(runner=runner, inputs=inputs.to_list(), config=config)


def choose(tuner, num_tokens: int):
    call = k3_call(num_tokens)
    _, tactic = tuner.choose_one(
        "flashinfer::trtllm_fp4_block_scale_moe", [call.runner], call.config, call.inputs
    )
    return tactic


def stamp_here(tuner, tmp_path) -> dict[str, str]:
    tuner.save_configs(str(tmp_path / "stamp.json"))
    return json.loads((tmp_path / "stamp.json").read_text())["_metadata"]


def test_flashinfers_own_classes_build_the_key_of_the_seed(tuner):
    call = k3_call(12000)
    shapes = tuner._get_input_sizes(call.inputs)
    extras = call.runner.get_cache_key_extras(call.inputs)
    key = tuner._get_cache_key(
        "flashinfer::trtllm_fp4_block_scale_moe", call.runner, shapes, call.config, extras
    )
    (seeded,) = k3_seed().records.values()
    assert key.file_key == seeded.key
    assert tuner._profiling_policy(call.config) == seeded.policy


def test_the_real_tuner_serves_the_seed_in_its_bucket_only(tuner, tmp_path):
    scratch = materialise(merge_sources([k3_seed()]), stamp_here(tuner, tmp_path), tmp_path / "s.json")
    assert choose(tuner, 16384) == -1
    assert tuner.load_configs(str(scratch))
    assert [choose(tuner, n) for n in (8193, 12000, 16383, 16384)] == [(128, 4)] * 4
    assert choose(tuner, 8192) == -1


def test_tuning_does_not_profile_what_the_seed_answers(tuner, tmp_path):
    from flashinfer.autotuner import autotune

    scratch = materialise(merge_sources([k3_seed()]), stamp_here(tuner, tmp_path), tmp_path / "s.json")
    tuner.load_configs(str(scratch))
    with autotune(True, tuning_buckets=(16384,), round_up=True):
        assert choose(tuner, 16384) == (128, 4)  # profiling would need a GPU and raise
    assert not tuner.profiling_cache


@pytest.mark.parametrize("source", ["user", "given"])
def test_an_explicit_record_for_the_same_key_stands_over_the_seed(tuner, tmp_path, source):
    (seeded,) = k3_seed().records.values()
    explicit = RecordSet({seeded.key: Record(seeded.key, "MoERunner", (192, 7))})
    layers = {"user": explicit} if source == "user" else {"given": [explicit]}
    merged = merge_sources([k3_seed()], **layers)
    assert merged.count_by_source() == {"seed": 0, "user": 0, "given": 0} | {source: 1}
    assert "stands over seed record (128, 4)" in merged.overridden[0].words()
    scratch = materialise(
        merged, stamp_here(tuner, tmp_path), tmp_path / "s.json", lambda op, runner: K3_POLICY
    )
    tuner.load_configs(str(scratch))
    assert choose(tuner, 16384) == (192, 7)


# --- precedence -------------------------------------------------------------------------------------------------


def record(bucket: int, tactic: int, **fields) -> Record:
    return Record(f"('op', 'R', (({bucket}, 8),), ())", "R", tactic, **fields)


def records(*found: Record) -> RecordSet:
    return RecordSet({item.key: item for item in found})


def test_later_sources_win_and_each_loss_is_told():
    merged = merge_sources(
        [records(record(1, 10), record(2, 10), record(4, 10))],
        records(record(2, 20), record(4, 20)),
        [records(record(4, 30)), records(record(4, 40))],
    )
    assert [item.tactic for item in merged.records.values()] == [10, 20, 40]
    assert merged.count_by_source() == {"seed": 1, "user": 1, "given": 1}
    assert [(item.dropped.tactic, item.kept.tactic) for item in merged.overridden] == [
        (10, 20),
        (10, 20),
        (20, 30),
        (30, 40),
    ]


def test_namespaces_of_all_sources_survive_entry_by_entry():
    seed = RecordSet(namespaces={"megamoe": {"8": 1, "16": 1}, "seeded": {"a": 1}})
    user = RecordSet(
        namespaces={"megamoe": {"16": 2}, "mine": {"b": 2}}, steps={"decode:8": StepEntry("decode:8", ())}
    )
    merged = merge_sources([seed], user)
    assert merged.namespaces == {"megamoe": {"8": 1, "16": 2}, "seeded": {"a": 1}, "mine": {"b": 2}}
    assert "decode:8" in merged.steps and seed.namespaces["megamoe"] == {"8": 1, "16": 1}


def test_the_ops_policy_is_attached_to_what_must_stand(tmp_path):
    hot, cold = ("l2_cache_policy", "hot"), ("l2_cache_policy", "cold")
    merged = merge_sources(
        [records(record(1, 1, policy=hot))],
        records(record(2, 1), record(4, 1, policy=hot), record(8, 1, policy=hot, pinned=True)),
        [records(record(16, 1, policy=hot))],
    )
    asked = []
    path = materialise(
        merged,
        {"gpu": "x"},
        tmp_path / "deep" / "s.json",
        lambda op, runner: asked.append((op, runner)) or cold,
    )
    found = read_document(path)
    assert isinstance(found, Document)
    policies = {parse_key(key).num_tokens: item.policy for key, item in found.records.items()}
    assert policies == {1: cold, 2: cold, 4: hot, 8: cold, 16: cold}
    assert set(asked) == {("op", "R")}


def test_only_what_tuning_added_is_committed():
    merged = merge_sources([records(record(1, 1))], records(record(2, 2)))
    held = {
        record(1, 1).key: ["R", 1],
        record(2, 2).key: ["R", 3, ["p", 1]],
        record(4, 4).key: ["R", 4],
        "_x": 1,
    }
    fresh = merged.new_in(held)
    assert {item.key: (item.tactic, item.source) for item in fresh} == {
        record(2, 2).key: (3, "tuned"),
        record(4, 4).key: (4, "tuned"),
    }


def test_buckets_that_ranks_tune_together_are_left_out():
    merged = merge_sources([], records(record(1, 1), record(2, 2), record(4, 4)))
    kept = merged.without_buckets({1, 2}, keep={record(2, 2).key})
    assert [parse_key(key).num_tokens for key in kept.records] == [2, 4]


# --- seed files -------------------------------------------------------------------------------------------------


def a_seed() -> Seed:
    return replace(
        k3_seed(), name="mine", namespaces={"n": {"k": 1}}, steps={"decode:8": StepEntry("decode:8", ("k",))}
    )


def test_a_written_seed_is_read_back(tmp_path):
    write_seed(a_seed(), tmp_path / "mine.json")
    assert read_seed(tmp_path / "mine.json") == a_seed()


@pytest.mark.parametrize(
    "damage",
    [{"schema": 2}, {"applies": None}, {"applies": {}}, {"environment": {}}, {"provenance": []}, {"records": []},
     {"records": {"k": ["R", 1]}}, {"namespaces": []}, {"namespaces": {"_x": {"a": 1}}}],
)  # fmt: skip
def test_a_damaged_seed_is_left_out_with_a_warning(tmp_path, damage, caplog):
    write_seed(a_seed(), tmp_path / "good.json")
    content = json.loads((tmp_path / "good.json").read_text())
    (tmp_path / "bad.json").write_text(json.dumps({**content, **damage}))
    (tmp_path / "worse.json").write_text("{")
    assert [seed.name for seed in SeedCatalogue(tmp_path).seeds] == ["mine"]
    assert "bad.json" in caplog.text and "worse.json" in caplog.text


def test_a_missing_directory_holds_no_seeds(tmp_path):
    assert SeedCatalogue(tmp_path / "absent").seeds == ()


def test_seeds_state_all_environment_fields():
    assert all(set(seed.environment) == set(ENVIRONMENT_FIELDS) for seed in SeedCatalogue().seeds)
