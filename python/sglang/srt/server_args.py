"""Every flag of the server, with its group, help and range, and what follows from them.

Names, aliases and meanings are SGLang's. This module imports neither torch nor FlashInfer, so that printing a plan
or a help text stays quick. Values are what the user asked for; what depends on the device is worked out by the
`..._on(device)` methods and never written back.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.configs.model_config import BUILTIN_MODEL_NAME, BUILTIN_MODEL_PATH, KNOWN_QUANTIZATIONS
from sglang.srt.configs.model_support import MEGAMOE_LOAD_QUANTIZATIONS
from sglang.srt.environ import envs
from sglang.srt.flags import FlagParser, add_flags, check_flag_values, flag, integer, number
from sglang.srt.server_args_rules import MEGAMOE_BACKENDS, check_rules, num_attention_replicas
from sglang.srt.unbuilt_flags import drop_unbuilt_flags

MODEL = "Model"
HTTP = "HTTP server"
CAPACITY = "Memory and scheduling"
KERNELS = "Kernels"
GRAPHS = "Decode graphs"
PARALLEL = "Parallelism"
AUTOTUNE = "FlashInfer autotune"
RUNTIME = "Runtime"

# Shorter spellings that SGLang's --dtype and --kv-cache-dtype accept too.
_DTYPE_SPELLINGS = {"half": "float16", "float": "float32", "bf16": "bfloat16"}


def _dtype_name(text: str) -> str:
    return _DTYPE_SPELLINGS.get(text, text)


@dataclass
class ServerArgs:
    """The server's configuration; construction raises `ValueError` that names the flag and the rule."""

    model_path: str = flag(
        BUILTIN_MODEL_PATH,
        "Directory with config.json and safetensors, or a Hugging Face model id.",
        group=MODEL,
        metavar="PATH",
        aliases=("--model",),
        default_text="the built-in model",
    )
    served_model_name: str | None = flag(
        None, "Name of the model in the API.", group=MODEL, default_text="the model path"
    )
    tokenizer_path: str | None = flag(
        None, "Directory or Hugging Face id of the tokenizer.", group=MODEL, default_text="the model path"
    )
    load_format: str = flag(
        "auto",
        "Where weights come from: safetensors files, or random values of the right shapes (dummy).",
        group=MODEL,
        choices=("auto", "safetensors", "dummy"),
    )
    dtype: str = flag(
        "auto",
        "Type of weights and activations. auto is the checkpoint's on CUDA and float32 on CPU.",
        group=MODEL,
        parse=_dtype_name,
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    quantization: str | None = flag(
        None,
        "Quantisation of the weights.",
        group=MODEL,
        choices=KNOWN_QUANTIZATIONS,
        default_text="what the checkpoint's config.json says",
    )
    context_length: int | None = flag(
        None,
        "Most tokens of one request, prompt and output together.",
        group=MODEL,
        parse=integer,
        minimum=1,
        default_text="the model's",
    )
    json_model_override_args: str = flag(
        "{}", "JSON object whose entries replace those of the model's config.json.", group=MODEL
    )
    trust_remote_code: bool = flag(
        False, "Allow the tokenizer to run code that comes with it.", group=MODEL, parse=None
    )

    host: str = flag("127.0.0.1", "Address that the HTTP server listens on.", group=HTTP)
    port: int = flag(
        30000, "Port that the HTTP server listens on.", group=HTTP, parse=integer, minimum=1, maximum=65535
    )
    api_key: str | None = flag(None, "Key that every request must bring as a bearer token.", group=HTTP)
    enable_metrics: bool = flag(False, "Serve Prometheus metrics at /metrics.", group=HTTP, parse=None)
    stream_interval: int = flag(
        1, "Tokens between two pieces of a streamed answer.", group=HTTP, parse=integer, minimum=1
    )

    sampling_defaults: str = flag(
        "model",
        "Where sampling parameters that a request leaves out come from: the model's generation_config.json, or "
        "OpenAI's constants.",
        group=HTTP,
        choices=("model", "openai"),
    )

    mem_fraction_static: float = flag(
        0.88,
        "Share of the device's memory for weights, autotune reserve and KV pool together.",
        group=CAPACITY,
        parse=number,
    )
    max_running_requests: int | None = flag(
        None,
        "Most requests that run at once, over all attention-DP ranks.",
        group=CAPACITY,
        parse=integer,
        minimum=1,
        default_text="256 per attention replica on CUDA, 64 on CPU",
    )
    max_total_tokens: int | None = flag(
        None,
        "Tokens in the KV pool.",
        group=CAPACITY,
        parse=integer,
        minimum=2,  # a prompt token and an output token
        default_text="what the memory allows",
    )
    chunked_prefill_size: int | None = flag(
        None,
        "Most prompt tokens of one prefill forward, over all attention-DP ranks; -1 turns chunking off.",
        group=CAPACITY,
        parse=integer,
        minimum=-1,
        default_text="8192 on CUDA, 2048 on CPU",
    )
    max_prefill_tokens: int = flag(
        16384,
        "Most prompt tokens of one prefill batch when chunking is off.",
        group=CAPACITY,
        parse=integer,
        minimum=1,
    )

    disable_radix_cache: bool = flag(
        False,
        "Compute every prompt whole, even where it begins like an earlier one.",
        group=CAPACITY,
        parse=None,
    )

    disable_overlap_schedule: bool = flag(
        False,
        "Take the tokens of each forward before the next one is launched. Overlap is for CUDA, without pipeline stages "
        "and attention DP.",
        group=CAPACITY,
        parse=None,
    )

    device: str = flag(
        "auto",
        "Where the model runs; auto is cuda when a GPU is there, else cpu.",
        group=KERNELS,
        choices=("auto", "cuda", "cpu"),
    )
    attention_backend: str = flag(
        "auto",
        "Attention kernels; auto is flashinfer on CUDA and torch_native on CPU.",
        group=KERNELS,
        choices=("auto", "flashinfer", "torch_native"),
    )
    moe_runner_backend: str = flag(
        "auto",
        "Mixture-of-experts kernels; auto is portfolio, which chooses among them at each size, in bfloat16 on Hopper, "
        "flashinfer_cutlass on other GPUs and reference on CPU.",
        group=KERNELS,
        choices=(
            "auto",
            "reference",
            "portfolio",
            "flashinfer_cutlass",
            "triton_grouped",
            "torch_grouped",
            *MEGAMOE_BACKENDS,
        ),
    )
    moe_a2a_backend: str | None = flag(
        None,
        "Who moves tokens between the ranks that hold experts: collectives around the kernels (none), or MegaMoE.",
        group=KERNELS,
        choices=("none", *MEGAMOE_BACKENDS),
        default_text="what --moe-runner-backend brings",
    )
    kv_cache_dtype: str = flag(
        "auto",
        "Type of the KV cache; auto is that of the activations.",
        group=KERNELS,
        parse=_dtype_name,
        choices=("auto", "bfloat16", "fp8_e4m3"),
    )
    enable_deterministic_inference: bool = flag(
        False,
        "Same output for the same request whatever else runs. Autotune is skipped, since its choices differ by shape.",
        group=KERNELS,
        parse=None,
    )

    disable_cuda_graph: bool = flag(
        False, "Run every decode forward eagerly. Autotune runs all the same.", group=GRAPHS, parse=None
    )
    cuda_graph_max_bs_decode: int | None = flag(
        None,
        "Largest decode batch that is captured, over all attention-DP ranks.",
        group=GRAPHS,
        parse=integer,
        minimum=1,
        aliases=("--cuda-graph-max-bs",),
        default_text="from --max-running-requests",
    )
    cuda_graph_bs_decode: list[int] | None = flag(
        None,
        "Decode batch sizes per rank that are captured.",
        group=GRAPHS,
        parse=integer,
        minimum=1,
        nargs="+",
        metavar="N",
        aliases=("--cuda-graph-bs",),
        default_text="a list up to the largest",
    )

    tp_size: int = flag(
        1,
        "Tensor-parallel ranks.",
        group=PARALLEL,
        parse=integer,
        minimum=1,
        aliases=("--tp", "--tensor-parallel-size"),
    )
    pp_size: int = flag(
        1,
        "Pipeline-parallel stages.",
        group=PARALLEL,
        parse=integer,
        minimum=1,
        aliases=("--pp", "--pipeline-parallel-size"),
    )
    ep_size: int = flag(
        1,
        "Ranks that the experts are spread over; must divide --tp-size.",
        group=PARALLEL,
        parse=integer,
        minimum=1,
        aliases=("--ep", "--expert-parallel-size"),
    )
    attn_dp_size: int = flag(
        1,
        "Attention replicas inside the tensor-parallel group; must divide --tp-size.",
        group=PARALLEL,
        parse=integer,
        minimum=1,
        aliases=("--attention-data-parallel-size",),
    )
    dp_size: int = flag(
        1,
        "With --enable-dp-attention, the older spelling of --attn-dp-size.",
        group=PARALLEL,
        parse=integer,
        minimum=1,
        aliases=("--dp", "--data-parallel-size"),
    )
    enable_dp_attention: bool = flag(
        False, "Take --dp-size as the number of attention replicas.", group=PARALLEL, parse=None
    )
    nnodes: int = flag(
        1, "Machines that the ranks are spread over.", group=PARALLEL, parse=integer, minimum=1
    )
    node_rank: int = flag(0, "Index of this machine.", group=PARALLEL, parse=integer, minimum=0)
    dist_init_addr: str | None = flag(
        None,
        "HOST:PORT where the ranks meet; required with several machines.",
        group=PARALLEL,
        metavar="HOST:PORT",
    )
    dist_timeout: float = flag(
        600.0,
        "Seconds that a rank waits for the others in a collective call before the server stops.",
        group=PARALLEL,
        parse=number,
        metavar="SECONDS",
        minimum=1,
    )

    disable_flashinfer_autotune: bool = flag(
        False,
        "Start without the autotune stage; kernels run with their defaults.",
        group=AUTOTUNE,
        parse=None,
    )
    flashinfer_autotune_skip_ops: list[str] = flag(
        [],
        "Ops that are neither tuned nor served from records; `sglang autotune plan` prints their names.",
        group=AUTOTUNE,
        nargs="+",
        metavar="OP",
    )
    flashinfer_autotune_records: list[str] = flag(
        [],
        "Record files that are loaded last, override all others and are not tuned again.",
        group=AUTOTUNE,
        nargs="+",
        metavar="PATH",
    )
    flashinfer_autotune_report: str | None = flag(
        None, "File that the stage's JSON report is written to.", group=AUTOTUNE, metavar="PATH"
    )

    flashinfer_autotune_verify: str = flag(
        "finite",
        "How tuned choices are checked: off (times only), finite (finite and close to the default's output), or full "
        "(also against a float32 reference and at the edges of buckets).",
        group=AUTOTUNE,
        choices=("off", "finite", "full"),
    )
    flashinfer_autotune_budget: float = flag(
        0.0,
        "Seconds of tuning after which no further step begins; what was tuned is kept and the next start goes on. "
        "0 is no limit.",
        group=AUTOTUNE,
        parse=number,
        metavar="SECONDS",
        minimum=0,
    )

    random_seed: int = flag(
        42, "Seed of sampling and of dummy weights.", group=RUNTIME, parse=integer, minimum=0
    )
    log_level: str = flag(
        "info",
        "Least severe messages that are logged.",
        group=RUNTIME,
        choices=("debug", "info", "warning", "error", "critical"),
    )
    watchdog_timeout: float = flag(
        300.0,
        "Seconds that one forward may take before the server stops with a message.",
        group=RUNTIME,
        parse=number,
        metavar="SECONDS",
        minimum=1,
    )

    def __post_init__(self) -> None:
        if self.model_path == BUILTIN_MODEL_NAME and not os.path.exists(self.model_path):
            self.model_path = BUILTIN_MODEL_PATH
        check_flag_values(self)
        self.attn_dp_size = num_attention_replicas(self)
        check_rules(self)

    @property
    def world_size(self) -> int:
        """Ranks in all: one process each."""
        return self.tp_size * self.pp_size

    @property
    def attn_tp_size(self) -> int:
        """Ranks that share one attention replica."""
        return self.tp_size // self.attn_dp_size

    @property
    def moe_tp_size(self) -> int:
        """Ranks that share one expert."""
        return self.tp_size // self.ep_size

    @property
    def megamoe_backend(self) -> str | None:
        """The MegaMoE backend that either of its two flags names; None without one."""
        named = (self.moe_runner_backend, self.moe_a2a_backend)
        return next((name for name in named if name in MEGAMOE_BACKENDS), None)

    @property
    def uses_megamoe(self) -> bool:
        """Whether experts and exchange are one kernel, so that tokens stay on their ranks."""
        return self.megamoe_backend is not None

    @property
    def uses_radix_cache(self) -> bool:
        """Whether prefixes are reused. Not in deterministic runs: a prompt without its beginning is another forward,
        which rounds differently.
        """
        return not self.disable_radix_cache and not self.enable_deterministic_inference

    def overlaps_schedule_on(self, device: str) -> bool:
        """Whether batches on `device` are scheduled while the one before runs."""
        if self.disable_overlap_schedule or self.pp_size > 1 or self.attn_dp_size > 1:
            return False
        return device == "cuda" or envs.SGLANG_OVERLAP_SCHEDULE_ON_CPU.get()

    @property
    def uses_builtin_model(self) -> bool:
        return self.model_path == BUILTIN_MODEL_PATH

    @property
    def model_name(self) -> str:
        """The model's name in the API."""
        return self.served_model_name or (BUILTIN_MODEL_NAME if self.uses_builtin_model else self.model_path)

    @property
    def tokenizer(self) -> str:
        """Where the tokenizer is read from."""
        return self.tokenizer_path or self.model_path

    @property
    def model_overrides(self) -> dict[str, Any]:
        """`--json-model-override-args` as a dict; raises `ValueError` when it is not a JSON object."""
        try:
            overrides = json.loads(self.json_model_override_args)
        except ValueError as error:
            raise ValueError(f"--json-model-override-args is not valid JSON: {error}") from None
        if not isinstance(overrides, dict):
            raise ValueError(
                f"--json-model-override-args must be a JSON object (got {self.json_model_override_args})"
            )
        return overrides

    def dtype_on(self, device: str) -> str:
        """The dtype to load the model in on `device` ("cuda" or "cpu"); "auto" means the checkpoint's."""
        return "float32" if self.dtype == "auto" and device == "cpu" else self.dtype

    def chunked_prefill_size_on(self, device: str) -> int | None:
        """Most prompt tokens of one prefill forward on `device`, over all attention-DP ranks; None: no chunking."""
        size = self.chunked_prefill_size
        if size is None:
            return 8192 if device == "cuda" else 2048
        return None if size == -1 else size

    def attention_backend_on(self, device: str) -> str:
        """The attention backend that "auto" means on `device`."""
        if self.attention_backend != "auto":
            return self.attention_backend
        return "flashinfer" if device == "cuda" else "torch_native"

    @property
    def load_quantizations(self) -> tuple[str, ...]:
        """Values of `--quantization` that the MoE kernels make of unquantised experts while loading."""
        return () if self.megamoe_backend is None else MEGAMOE_LOAD_QUANTIZATIONS

    @property
    def moe_runner_backends(self) -> tuple[str, ...]:
        """Those that `moe_runner_backend_on` may give where device and dtype are not known yet."""
        if self.megamoe_backend is None and self.moe_runner_backend == "auto":
            return ("reference", "portfolio", "flashinfer_cutlass")
        return (self.moe_runner_backend_on("cpu"),)

    def moe_runner_backend_on(
        self, device: str, capability: tuple[int, int] | None = None, dtype: str | None = None
    ) -> str:
        """The MoE runner backend that "auto" means on `device`, a GPU of `capability`, for experts of `dtype`.

        That is the portfolio where all of its implementations have kernels: in BF16 on Hopper.
        """
        if self.megamoe_backend is not None:
            return self.megamoe_backend
        if self.moe_runner_backend != "auto":
            return self.moe_runner_backend
        if device != "cuda":
            return "reference"
        has_portfolio = capability is not None and capability[0] == 9 and dtype == "bfloat16"
        return "portfolio" if has_portfolio else "flashinfer_cutlass"


def server_args_parser(prog: str = "sglang serve") -> FlagParser:
    """The parser of the server's flags."""
    parser = FlagParser(
        prog=prog,
        usage="%(prog)s [--flag VALUE ...]",
        description="Tune the kernels at start, then serve a model over HTTP.",
    )
    add_flags(parser, ServerArgs)
    return parser


def prepare_server_args(argv: Sequence[str], prog: str = "sglang serve") -> ServerArgs:
    """The arguments in `argv` as a `ServerArgs`; raises `ValueError` that names the flag and the remedy."""
    namespace = server_args_parser(prog).parse_strictly(drop_unbuilt_flags(argv))
    return ServerArgs(**vars(namespace))
