"""Loading weights: every file layout, every shard, every complaint, and dummy weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import Group, ParallelState
from sglang.srt.layers.fused_moe import moe_shape
from sglang.srt.layers.moe.registry import create_moe_runner
from sglang.srt.model_loader.loader import load_model
from sglang.srt.models.decoder import stage_layers
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 30,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [1],
    "attention_bias": True,
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
}
HIDDEN, INNER, EXPERTS = 16, 8, 4


def checkpoint_tensors(config: dict[str, Any] = CONFIG) -> dict[str, torch.Tensor]:
    """Random tensors under the names of a published Qwen3-MoE checkpoint."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (30, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (30, HIDDEN),
    }
    for layer in range(3):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q", 32), ("k", 16), ("v", 16)):
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (rows, HIDDEN)
            shapes[f"{prefix}.self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (HIDDEN, 32)
        shapes[f"{prefix}.self_attn.o_proj.bias"] = (HIDDEN,)
        shapes[f"{prefix}.self_attn.q_norm.weight"] = shapes[f"{prefix}.self_attn.k_norm.weight"] = (8,)
        shapes[f"{prefix}.input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (HIDDEN,)
        if layer in config["mlp_only_layers"]:
            shapes |= mlp_shapes(f"{prefix}.mlp", 24)
            continue
        shapes[f"{prefix}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            shapes |= mlp_shapes(f"{prefix}.mlp.experts.{expert}", INNER)
    if config.get("tie_word_embeddings"):
        del shapes["lm_head.weight"]
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def mlp_shapes(prefix: str, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (inner, HIDDEN),
        f"{prefix}.up_proj.weight": (inner, HIDDEN),
        f"{prefix}.down_proj.weight": (HIDDEN, inner),
    }


def with_stacked_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights as one tensor for all experts, gate before up."""
    stacked = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in (0, 2):
        prefix = f"model.layers.{layer}.mlp.experts"

        def stack(projection: str, prefix: str = prefix) -> torch.Tensor:
            return torch.stack([tensors[f"{prefix}.{e}.{projection}.weight"] for e in range(EXPERTS)])

        stacked[f"{prefix}.gate_up_proj"] = torch.cat([stack("gate_proj"), stack("up_proj")], dim=1)
        stacked[f"{prefix}.down_proj"] = stack("down_proj")
    return stacked


def write(
    path: Path, tensors: dict[str, torch.Tensor], files: int = 1, config: dict[str, Any] = CONFIG
) -> Path:
    """A checkpoint directory; with several files there is an index, and names go round robin."""
    (path / "config.json").write_text(json.dumps(config))
    if files == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    names = [f"model-{i:05}-of-{files:05}.safetensors" for i in range(1, files + 1)]
    weight_map = {name: names[i % files] for i, name in enumerate(tensors)}
    for file in names:
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def load(
    path: Path, parallel: ParallelState | None = None, *, load_format: str = "auto", seed: int = 0
) -> Qwen3MoeForCausalLM:
    parallel = parallel or ParallelState.single()
    config = ModelConfig.from_path(str(path))
    runner = create_moe_runner("reference", moe_shape(config, parallel, torch.float32, 16))
    cpu = torch.device("cpu")
    model = load_model(config, parallel, runner, torch.float32, cpu, load_format=load_format, seed=seed)
    assert isinstance(model, Qwen3MoeForCausalLM)
    return model


def state(model: Qwen3MoeForCausalLM) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_one_file_an_index_and_stacked_experts_give_the_same_model(tmp_path: Path) -> None:
    tensors = checkpoint_tensors()
    models = []
    for name, content, files in (
        ("one", tensors, 1),
        ("indexed", tensors, 3),
        ("stacked", with_stacked_experts(tensors), 2),
    ):
        (tmp_path / name).mkdir()
        models.append(state(load(write(tmp_path / name, content, files))))
    assert_same(models[0], models[1])
    assert_same(models[0], models[2])


def test_expert_rows_are_up_before_gate(tmp_path: Path) -> None:
    tensors = checkpoint_tensors()
    w13 = state(load(write(tmp_path, tensors)))["layers.2.mlp.w13"]
    name = "model.layers.2.mlp.experts.3"
    assert torch.equal(w13[3, :INNER], tensors[f"{name}.up_proj.weight"])
    assert torch.equal(w13[3, INNER:], tensors[f"{name}.gate_proj.weight"])


def test_files_that_the_index_does_not_name_are_not_read(tmp_path: Path) -> None:
    write(tmp_path, checkpoint_tensors(), files=2)
    save_file({"unknown": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    load(tmp_path)


def test_a_tied_head_is_the_embedding_whether_stored_or_not(tmp_path: Path) -> None:
    config = {**CONFIG, "tie_word_embeddings": True}
    tensors = checkpoint_tensors(config)
    model = load(write(tmp_path, tensors, config=config))
    assert model.lm_head is not None and model.embed_tokens is not None
    assert model.lm_head.weight is model.embed_tokens.weight
    tensors["lm_head.weight"] = torch.zeros(30, HIDDEN)
    again = load(write(tmp_path, tensors, config=config))
    assert_same(state(model), state(again))


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    tensors = checkpoint_tensors()
    del tensors["model.layers.0.mlp.experts.2.up_proj.weight"], tensors["model.norm.weight"]
    with pytest.raises(ValueError, match=r"misses .*experts\.2\.up_proj\.weight, model\.norm\.weight"):
        load(write(tmp_path, tensors))


def test_a_missing_stacked_tensor_is_named(tmp_path: Path) -> None:
    tensors = with_stacked_experts(checkpoint_tensors())
    del tensors["model.layers.2.mlp.experts.down_proj"]
    with pytest.raises(ValueError, match=r"misses .*layers\.2\.mlp\.experts\.0\.down_proj"):
        load(write(tmp_path, tensors))


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.scales", "model.layers.7.mlp.gate.weight", "visual.weight"]
)
def test_unexpected_tensors_are_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"has unknown {name}"):
        load(write(tmp_path, {**checkpoint_tensors(), name: torch.zeros(1)}))


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.down_proj.weight", "model.layers.0.mlp.experts.1.gate_proj.weight"]
)
def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path, name: str) -> None:
    tensors = checkpoint_tensors()
    shape = list(tensors[name].shape)
    tensors[name] = torch.zeros(shape[0], shape[1] + 1)
    with pytest.raises(ValueError, match=rf"{name} .*has shape \[{shape[0]}, {shape[1] + 1}\]"):
        load(write(tmp_path, tensors))


def test_a_directory_without_weights_names_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ValueError, match=r"no \.safetensors files.*--load-format dummy"):
        load(tmp_path)


def test_damaged_files_are_one_clear_error_each(tmp_path: Path) -> None:
    write(tmp_path, checkpoint_tensors(), files=2)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(ValueError, match="model-00002-of-00002.safetensors cannot be read"):
        load(tmp_path)
    shard.unlink()
    with pytest.raises(ValueError, match="names model-00002-of-00002.safetensors, which is not there"):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match="is not a safetensors index"):
        load(tmp_path)


def test_an_index_that_names_a_tensor_its_file_lacks_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, checkpoint_tensors(), files=2)
    first = tmp_path / "model-00001-of-00002.safetensors"
    tensors = load_file(first)
    tensors.pop("model.embed_tokens.weight")
    save_file(tensors, first)
    with pytest.raises(ValueError, match="model.embed_tokens.weight"):
        load(tmp_path)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_scaling of type longrope"),
        ({"architectures": ["Qwen3NextForCausalLM"]}, "architecture Qwen3NextForCausalLM"),
        ({"quantization_config": {"quant_method": "fp8"}}, "--quantization fp8"),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **change}))
    with pytest.raises(ValueError, match=message):
        load(tmp_path, load_format="dummy")


def rank_of(tp: int = 1, tp_rank: int = 0, ep: int = 1, pp: int = 1, pp_rank: int = 0) -> ParallelState:
    """The groups of one rank, without a process group behind them: loading communicates with nobody."""

    def group(name: str, rank: int, size: int) -> Group:
        return Group(name, rank, tuple(range(size)))

    moe_tp = tp // ep
    return replace(
        ParallelState.single(),
        tp=group("tp", tp_rank, tp),
        attn_tp=group("attn_tp", tp_rank, tp),
        ep=group("ep", tp_rank // moe_tp, ep),
        moe_tp=group("moe_tp", tp_rank % moe_tp, moe_tp),
        pp=group("pp", pp_rank, pp),
    )


@pytest.mark.parametrize("stacked", [False, True])
def test_tensor_parallel_shards_put_together_are_the_whole_model(tmp_path: Path, stacked: bool) -> None:
    tensors = checkpoint_tensors()
    write(tmp_path, with_stacked_experts(tensors) if stacked else tensors)
    whole = state(load(tmp_path))
    shards = [state(load(tmp_path, rank_of(tp=2, tp_rank=rank))) for rank in range(2)]

    def join(name: str, dim: int) -> torch.Tensor:
        return torch.cat([shard[name] for shard in shards], dim)

    assert torch.equal(join("embed_tokens.weight", 0)[:30], whole["embed_tokens.weight"])
    assert torch.equal(join("lm_head.weight", 0)[:30], whole["lm_head.weight"])
    assert torch.equal(join("layers.0.self_attn.o_proj.weight", 1), whole["layers.0.self_attn.o_proj.weight"])
    assert torch.equal(join("layers.0.mlp.w2", 2), whole["layers.0.mlp.w2"])
    for name, sizes, dim in (
        ("layers.0.self_attn.qkv_proj.weight", (16, 8, 8), 0),
        ("layers.0.self_attn.qkv_proj.bias", (16, 8, 8), 0),
        ("layers.1.mlp.gate_up_proj.weight", (12, 12), 0),
        ("layers.0.mlp.w13", (4, 4), 1),
    ):
        parts = zip(*[shard[name].split(sizes, dim) for shard in shards], strict=True)
        assert torch.equal(torch.cat([t for pair in parts for t in pair], dim), whole[name]), name
    for shard in shards:
        for name in ("layers.0.mlp.gate.weight", "norm.weight", "layers.0.self_attn.o_proj.bias"):
            assert torch.equal(shard[name], whole[name])


def test_more_ranks_than_kv_heads_share_copies_of_a_head(tmp_path: Path) -> None:
    tensors = checkpoint_tensors()
    write(tmp_path, tensors)
    for rank in range(4):
        qkv = state(load(tmp_path, rank_of(tp=4, tp_rank=rank)))["layers.0.self_attn.qkv_proj.weight"]
        head = slice(8 * (rank // 2), 8 * (rank // 2) + 8)
        assert torch.equal(qkv[8:16], tensors["model.layers.0.self_attn.k_proj.weight"][head])
        assert torch.equal(qkv[16:], tensors["model.layers.0.self_attn.v_proj.weight"][head])


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("ep", [2, 4])
def test_expert_parallel_ranks_hold_their_own_experts(tmp_path: Path, ep: int, stacked: bool) -> None:
    tensors = checkpoint_tensors()
    write(tmp_path, with_stacked_experts(tensors) if stacked else tensors)
    whole = state(load(tmp_path))
    shards = [state(load(tmp_path, rank_of(tp=ep, tp_rank=rank, ep=ep))) for rank in range(ep)]
    for name in ("layers.0.mlp.w13", "layers.2.mlp.w2"):
        assert torch.equal(torch.cat([shard[name] for shard in shards]), whole[name])


@pytest.mark.parametrize("tied", [False, True])
def test_pipeline_stages_together_hold_the_whole_model(tmp_path: Path, tied: bool) -> None:
    config = {**CONFIG, "tie_word_embeddings": tied}
    tensors = checkpoint_tensors(config)
    write(tmp_path, tensors, config=config)
    whole = state(load(tmp_path))
    stages = [state(load(tmp_path, rank_of(pp=2, pp_rank=rank))) for rank in range(2)]
    assert "embed_tokens.weight" in stages[0] and "lm_head.weight" not in stages[0]
    assert torch.equal(stages[1].pop("lm_head.weight"), tensors[tied_or_head(tied)])
    whole.pop("lm_head.weight", None)
    assert_same({**stages[0], **stages[1]}, whole)


def tied_or_head(tied: bool) -> str:
    return "model.embed_tokens.weight" if tied else "lm_head.weight"


def test_layers_are_spread_over_stages_without_gaps() -> None:
    bounds = [stage_layers(10, stage, 4) for stage in range(4)]
    assert bounds == [(0, 2), (2, 5), (5, 7), (7, 10)]
    with pytest.raises(ValueError, match="--pp-size 4 exceeds the model's 3 layers"):
        stage_layers(3, 0, 4)


@pytest.mark.parametrize(
    "rank, message",
    [
        (rank_of(tp=3), "attention heads"),
        (rank_of(tp=3, ep=3), "experts"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(tmp_path: Path, rank: ParallelState, message: str) -> None:
    write(tmp_path, checkpoint_tensors())
    with pytest.raises(ValueError, match=rf"{message} .*3 ranks|width of an expert .*3 ranks"):
        load(tmp_path, rank)


def test_dummy_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    first = state(load(tmp_path, load_format="dummy", seed=1))
    torch.manual_seed(99)
    assert_same(first, state(load(tmp_path, load_format="dummy", seed=1)))
    other = state(load(tmp_path, load_format="dummy", seed=2))
    assert not torch.equal(first["layers.0.mlp.w13"], other["layers.0.mlp.w13"])


def test_dummy_weights_look_like_a_fresh_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for name, tensor in state(load(tmp_path, load_format="dummy")).items():
        if tensor.dim() >= 2:
            assert 0.005 < tensor.std() < 0.05, name
        else:
            assert torch.equal(tensor, torch.full_like(tensor, "norm" in name)), name


def test_ranks_agree_on_dummy_weights_that_they_hold_in_full(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    ranks = [state(load(tmp_path, rank_of(tp=2, tp_rank=r, ep=2), load_format="dummy")) for r in range(2)]
    assert torch.equal(ranks[0]["layers.0.mlp.gate.weight"], ranks[1]["layers.0.mlp.gate.weight"])


def test_a_long_load_says_how_far_it_is_on_the_first_rank_only(tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO")
    write(tmp_path, checkpoint_tensors(), files=3)
    load(tmp_path)
    assert "Loading weights" not in caplog.text
    monkeypatch.setattr("sglang.srt.model_loader.loader.LINE_INTERVAL_S", 0.0)
    load(tmp_path)
    assert "Loading weights: 2 of 3 files" in caplog.text
    caplog.clear()
    second = Group("world", rank=1, ranks=(0, 1))
    load(tmp_path, replace(ParallelState.single(), world=second))
    assert "Loading weights" not in caplog.text
