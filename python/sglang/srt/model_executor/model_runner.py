"""The model of one rank with everything it needs to run a batch."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from sglang.srt.autotune.stage import run_stage
from sglang.srt.autotune_config import settings_of
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import ParallelState
from sglang.srt.layers.attention.flashinfer_kernels import windows_of
from sglang.srt.layers.attention.registry import create_attention_backend
from sglang.srt.layers.fused_moe import moe_layers, moe_shape
from sglang.srt.layers.linear import divide, local_kv_heads
from sglang.srt.layers.logits_processor import LogitsProcessor, last_token_rows
from sglang.srt.layers.moe.megamoe import MegaMoERunner
from sglang.srt.layers.moe.registry import create_moe_runner
from sglang.srt.layers.sampler import Sampler
from sglang.srt.limits import derive_limits
from sglang.srt.mem_cache.memory_pool import KVPool, ReqToTokenPool, TokenAllocator
from sglang.srt.model_executor.autotune_host import ModelRunnerHost, agreement_of
from sglang.srt.model_executor.decode_graphs import DecodeGraphs, capture_decode_graphs, check_capturable
from sglang.srt.model_executor.forward_batch import ForwardBatch
from sglang.srt.model_executor.kv_sizing import free_bytes_for_kv, max_total_num_tokens
from sglang.srt.model_executor.memory_reserve import forward_reserve_bytes
from sglang.srt.model_loader.loader import load_model
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.device import resolved_device
from sglang.srt.utils.transfer import PlanFence

logger = logging.getLogger(__name__)

_KV_DTYPES = {"bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}


class ModelRunner:
    """Loads the model, sizes its memory, and turns a `ForwardBatch` into logits.

    The constructor is the start of a rank, in its order; it raises `ValueError` for what the user can put
    right. With more than one rank, all ranks construct it together. `progress(stage, detail)` hears how the
    start goes.
    """

    def __init__(
        self,
        server_args: ServerArgs,
        model_config: ModelConfig,
        parallel: ParallelState,
        gpu_id: int = 0,
        *,
        progress: Callable[[str, dict], None] | None = None,
    ) -> None:
        args, config = server_args, model_config
        device_type = resolved_device(args.device)
        self.server_args, self.model_config, self.parallel = args, config, parallel
        self.device = torch.device("cuda", gpu_id) if device_type == "cuda" else torch.device("cpu")
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.limits = derive_limits(args, config, device_type)
        self.decode_graphs: DecodeGraphs | None = None  # until they are captured, every forward is eager

        # ---- weights
        self.moe_runner = create_moe_runner(
            self._moe_runner_backend(),
            moe_shape(config, parallel, self.dtype, self.limits.max_op_tokens),
            device=self.device,
            deterministic=args.enable_deterministic_inference,
            tunes=not args.disable_flashinfer_autotune,
            may_fall_back=args.moe_runner_backend == "auto",
            ep_group=parallel.ep,
            quantization=config.quantization,
        )
        check_capturable(self)
        self.model = load_model(
            config,
            parallel,
            self.moe_runner,
            self.dtype,
            self.device,
            load_format=args.load_format,
            seed=args.random_seed,
        )
        if isinstance(self.moe_runner, MegaMoERunner):
            self.moe_runner.take_over(moe_layers(self.model), will_tune=not args.disable_flashinfer_autotune)
        self.logits_processor = (
            LogitsProcessor(self.model.lm_head) if self.model.lm_head is not None else None
        )
        self.sampler = Sampler()

        # ---- reserve, then KV pool
        autotune_host = ModelRunnerHost(self)
        self.reserved_bytes = self.moe_runner.reserved_bytes() + self._forward_reserve_bytes(autotune_host)
        if isinstance(self.moe_runner, MegaMoERunner) and not args.disable_flashinfer_autotune:
            self.reserved_bytes += self.moe_runner.sweep_bytes_beyond(args.mem_fraction_static)
        self.kv_pool = self._create_kv_pool()
        self.max_total_num_tokens = self.kv_pool.num_tokens
        self.allocator = TokenAllocator(self.max_total_num_tokens)
        self.max_running_requests = self.limits.max_running_requests
        self.req_to_token_pool = ReqToTokenPool(self.max_running_requests, config.context_length, self.device)

        # ---- attention backend
        self.plan_fence = PlanFence(self.device)
        self.attn_backend = create_attention_backend(
            args.attention_backend_on(device_type),
            self.req_to_token_pool,
            self.kv_pool,
            divide(config.num_attention_heads, parallel.attn_tp.size, "attention heads"),
            self.dtype,
            layers=self.model.attention_layers(),
            deterministic=args.enable_deterministic_inference,
        )

        # ---- autotune stage
        settings = settings_of(args)
        self.autotune_report = run_stage(
            autotune_host,
            settings,
            agreement_of(self, settings.timeout_s),
            None if progress is None else lambda detail: progress("autotune", detail),
        )
        if isinstance(self.moe_runner, MegaMoERunner):
            self.moe_runner.open_ordinary()  # unless the stage has opened tuned profiles

        # ---- decode graphs
        self.decode_graphs = capture_decode_graphs(
            self, None if progress is None else lambda detail: progress("capturing decode graphs", detail)
        )

    def _moe_runner_backend(self) -> str:
        capability = torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else None
        return self.server_args.moe_runner_backend_on(self.device.type, capability, self.model_config.dtype)

    def _forward_reserve_bytes(self, host: ModelRunnerHost) -> int:
        """What forwards, tuning and sampling take of the device later; the CPU's pool leaves enough anyway."""
        if self.device.type == "cpu":
            return 0
        sizes = () if self.server_args.disable_cuda_graph else self.limits.decode_batch_sizes
        return forward_reserve_bytes(
            self.limits,
            self.model_config.vocab_size,
            host.step_memory_bytes,
            num_captured=len(sizes),
            num_windows=len(windows_of(self.model.attention_layers())),
        )

    def _create_kv_pool(self) -> KVPool:
        args, config = self.server_args, self.model_config
        num_layers = self.model.end_layer - self.model.first_layer
        num_kv_heads = local_kv_heads(config.num_key_value_heads, self.parallel.attn_tp.size)
        dtype = _KV_DTYPES.get(args.kv_cache_dtype, self.dtype)
        # Stages may differ by a layer; the pool is the same on all, so the largest stage decides.
        cell = max(
            self.parallel.world.all_gather_object(
                KVPool.bytes_per_token(num_layers, num_kv_heads, config.head_dim, dtype)
            )
        )
        num_tokens = max_total_num_tokens(
            args.max_total_tokens,
            config.context_length,
            cell,
            free_bytes_for_kv(self.device, args.mem_fraction_static, self.reserved_bytes),
            self.parallel.world,
            self.device,
        )
        logger.info("KV pool: %d tokens, %.2f GiB", num_tokens, num_tokens * cell / 2**30)
        return KVPool(
            num_tokens,
            1,
            num_layers,
            num_kv_heads,
            config.head_dim,
            dtype,
            self.device,
            first_layer=self.model.first_layer,
        )

    @torch.inference_mode()
    def forward_hidden(self, batch: ForwardBatch, hidden_states: torch.Tensor | None = None) -> torch.Tensor:
        """The model without its head: `[T, H]` hidden states, or what the next pipeline stage takes.

        A stage after the first starts from the `hidden_states` that the one before returned.
        """
        batch.attn_backend = self.attn_backend
        with self.plan_fence.planning():
            self.attn_backend.init_forward_metadata(batch)
        return self.model(batch, hidden_states)

    @torch.inference_mode()
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[B, H]` rows of the last stage's hidden states -> `[B, vocab_size]` float32."""
        assert self.logits_processor is not None, "only the last pipeline stage has the head"
        return self.logits_processor(hidden_states)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, hidden_states: torch.Tensor | None = None) -> torch.Tensor:
        """`[B, vocab_size]` float32: the logits that follow the last token of each sequence. Last stage only."""
        if hidden_states is None and self.decode_graphs is not None and self.decode_graphs.covers(batch):
            return self.decode_graphs.replay(batch)
        return self.compute_logits(last_token_rows(self.forward_hidden(batch, hidden_states), batch))

    @torch.inference_mode()
    def take_part(self, batch: ForwardBatch, hidden_states: torch.Tensor | None = None) -> None:
        """The forward of an idle batch: this rank's part in what its attention-DP neighbours run."""
        if self.decode_graphs is not None and self.decode_graphs.covers(batch):
            self.decode_graphs.replay(batch)
        else:
            self.forward_hidden(batch, hidden_states)

    @torch.inference_mode()
    def forward_into(self, batch: ForwardBatch, logits: torch.Tensor) -> None:
        """A decode batch whose attention is set and planned already; its logits go to `logits` `[B, vocab_size]`."""
        assert self.logits_processor is not None, "only the last pipeline stage has the head"
        self.logits_processor(self.model(batch), out=logits)
