"""gpt-oss: attention with learned sinks, in a sliding window on every second layer, and experts with biases."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.model_support import check_supported
from sglang.srt.distributed.parallel_state import Group, ParallelState
from sglang.srt.layers.attention.base import AttentionLayer
from sglang.srt.layers.fused_moe import FusedMoE
from sglang.srt.layers.linear import QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.moe.base import MoERunner
from sglang.srt.layers.rotary import RotaryEmbedding
from sglang.srt.model_executor.forward_batch import ForwardBatch
from sglang.srt.model_loader.mxfp4 import BITS_PER_VALUE, BLOCK, Mxfp4Weight
from sglang.srt.model_loader.weights import NamedSlots, WeightSlot, rows
from sglang.srt.models.decoder import DecoderLayer, DecoderLM

logger = logging.getLogger(__name__)


class GptOssAttention(nn.Module):
    """Attention of one layer, `[T, H]` -> `[T, H]`, with a sink for each head and, in some layers, a sliding window."""

    def __init__(
        self, config: ModelConfig, layer_id: int, group: Group, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        bias = config.attention_bias
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, dim, heads, kv_heads, group, bias, dtype, device
        )
        self.o_proj = RowParallelLinear(heads * dim, config.hidden_size, group, bias, dtype, device)
        local_heads = self.qkv_proj.num_heads
        # In float32, as kernels want them; they are few.
        sinks = torch.zeros(local_heads, dtype=torch.float32, device=device)
        self.sinks = nn.Parameter(sinks, requires_grad=False)
        self.layer = AttentionLayer(
            layer_id,
            local_heads,
            self.qkv_proj.num_kv_heads,
            dim,
            scaling=dim**-0.5,
            sliding_window=config.window_of(layer_id),
            sinks=self.sinks.data,
        )
        self._full_heads, self._first_head = heads, group.rank * local_heads

    def forward(
        self, hidden_states: torch.Tensor, rotary: RotaryEmbedding, batch: ForwardBatch
    ) -> torch.Tensor:
        assert batch.attn_backend is not None, "the model runner sets the attention backend"
        q, k, v = self.qkv_proj.split(self.qkv_proj(hidden_states))
        q, k = rotary(batch.positions, q, k)
        return self.o_proj(batch.attn_backend.forward(q, k, v, self.layer, batch))

    def weight_slots(self, prefix: str) -> NamedSlots:
        yield from self.qkv_proj.weight_slots(prefix)
        yield from self.o_proj.weight_slots(f"{prefix}.o_proj")
        yield rows(f"{prefix}.sinks", self.sinks, self._full_heads, self._first_head)


class GptOssMoE(FusedMoE):
    """Experts as gpt-oss stores them: gate and up take turns, matrices are `[in, out]` or, in MXFP4, `[out, in]`."""

    def __init__(
        self,
        config: ModelConfig,
        parallel: ParallelState,
        runner: MoERunner,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(config, parallel, runner, dtype, device, router_bias=True)
        self._is_mxfp4 = config.quantization == "mxfp4"

    def weight_slots(self, prefix: str) -> NamedSlots:
        yield from self.gate.weight_slots(f"{prefix}.router")
        for local in range(self.shape.num_local_experts):
            if self._is_mxfp4:
                yield from self._mxfp4_slots(f"{prefix}.experts", local)
            else:
                yield from self._plain_slots(f"{prefix}.experts", local)
            yield from self._bias_slots(f"{prefix}.experts", local)

    def _plain_slots(self, prefix: str, local: int) -> NamedSlots:
        of_expert, shard, gate_up_shard, every = *self._slices(local), slice(None)
        experts, hidden, full = self.shape.num_experts, self.shape.hidden_size, self.full_intermediate_size

        def store_gate_up(values: torch.Tensor) -> None:
            self._store_gate_up(local, values[0].t())

        def store_down(values: torch.Tensor) -> None:
            self.w2.data[local].copy_(values[0].t())

        index: tuple[slice, ...] = (of_expert, every, gate_up_shard)
        yield (
            f"{prefix}.gate_up_proj",
            WeightSlot((experts, hidden, 2 * full), None, index, store=store_gate_up),
        )
        yield (
            f"{prefix}.down_proj",
            WeightSlot((experts, full, hidden), None, (of_expert, shard), store=store_down),
        )

    def _mxfp4_slots(self, prefix: str, local: int) -> NamedSlots:
        of_expert, shard, gate_up_shard = self._slices(local)
        experts, hidden, full = self.shape.num_experts, self.shape.hidden_size, self.full_intermediate_size
        # A rank's share of the columns may begin and end inside a block.
        blocks = slice(shard.start // BLOCK, -(-shard.stop // BLOCK))
        skipped = shard.start - blocks.start * BLOCK

        def store_down(values: torch.Tensor) -> None:
            self.w2.data[local].copy_(values[0, :, skipped : skipped + self.shape.intermediate_size])

        gate_up = self._mxfp4(lambda values: self._store_gate_up(local, values[0]))
        down = self._mxfp4(store_down)
        index: tuple[slice, ...] = (of_expert, gate_up_shard)
        shape: tuple[int, ...] = (experts, 2 * full, hidden // BLOCK)
        name = f"{prefix}.gate_up_proj"
        yield (
            f"{name}_blocks",
            WeightSlot((*shape, BLOCK // 2), None, index, store=gate_up.take_blocks),
        )
        yield f"{name}_scales", WeightSlot(shape, None, index, store=gate_up.take_scales)
        index, shape, name = (
            (of_expert, slice(None), blocks),
            (experts, hidden, full // BLOCK),
            f"{prefix}.down_proj",
        )
        yield f"{name}_blocks", WeightSlot((*shape, BLOCK // 2), None, index, store=down.take_blocks)
        yield f"{name}_scales", WeightSlot(shape, None, index, store=down.take_scales)

    def _bias_slots(self, prefix: str, local: int) -> NamedSlots:
        assert self.b13 is not None and self.b2 is not None, "the experts of gpt-oss have biases"
        of_expert, _, gate_up_shard = self._slices(local)
        experts, hidden, full = self.shape.num_experts, self.shape.hidden_size, self.full_intermediate_size
        biases = self.b13.data[local]

        def store(values: torch.Tensor) -> None:
            _split_gate_up(values[0], biases)

        yield (
            f"{prefix}.gate_up_proj_bias",
            WeightSlot((experts, 2 * full), None, (of_expert, gate_up_shard), store=store),
        )
        yield (
            f"{prefix}.down_proj_bias",
            WeightSlot((experts, hidden), self.b2[local : local + 1], (of_expert,)),
        )

    def _slices(self, local: int) -> tuple[slice, slice, slice]:
        """Where the checkpoint has local expert `local`, this rank's share of its width, and that of gate and up."""
        expert, inner = self.shape.first_local_expert + local, self.shape.intermediate_size
        start = self.shape.tp_rank * inner
        return slice(expert, expert + 1), slice(start, start + inner), slice(2 * start, 2 * (start + inner))

    def _mxfp4(self, store: Callable[[torch.Tensor], None]) -> Mxfp4Weight:
        return Mxfp4Weight(store, self.w13.dtype, self.w13.device)

    def _store_gate_up(self, local: int, values: torch.Tensor) -> None:
        _split_gate_up(values, self.w13.data[local])


def _split_gate_up(stored: torch.Tensor, dest: torch.Tensor) -> None:
    """Rows gate, up, gate, up, ... of `stored` `[2 * I, ...]` into `dest`, all up before all gate."""
    inner = dest.shape[0] // 2
    dest[:inner].copy_(stored[1::2])
    dest[inner:].copy_(stored[0::2])


class GptOssForCausalLM(DecoderLM):
    """See `DecoderLM`. Checkpoints in BF16, and in MXFP4 as published, whose experts are dequantised."""

    def __init__(
        self,
        config: ModelConfig,
        parallel: ParallelState,
        moe_runner: MoERunner,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        check_supported(config, moe_runner.load_quantizations)

        def make_layer(layer: int) -> DecoderLayer:
            attention = GptOssAttention(config, layer, parallel.attn_tp, dtype, device)
            return DecoderLayer(
                attention, GptOssMoE(config, parallel, moe_runner, dtype, device), config, dtype, device
            )

        super().__init__(config, parallel, make_layer, dtype, device)
        if config.quantization == "mxfp4" and parallel.world.is_first:
            self._say_what_dequantising_costs()

    def _say_what_dequantising_costs(self) -> None:
        weights = [w for m in self.modules() if isinstance(m, GptOssMoE) for w in (m.w13, m.w2)]
        values = sum(weight.numel() for weight in weights)
        dtype = str(weights[0].dtype).removeprefix("torch.")
        logger.warning(
            "MXFP4 experts are dequantised to %s while loading (no MXFP4 kernel is built in): they take %.2f GiB on "
            "each rank instead of %.2f",
            dtype,
            values * weights[0].dtype.itemsize / 2**30,
            values * BITS_PER_VALUE / 8 / 2**30,
        )
