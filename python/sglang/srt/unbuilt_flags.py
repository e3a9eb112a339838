"""Flags of SGLang that this tree does not have.

A launch command written for SGLang should either run or say what stands in its way. A flag that cannot change what
is computed is dropped with one warning; a flag that asks for something which is not built here is an error.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

logger = logging.getLogger(__name__)

# How many arguments follow the flag: none, exactly one, at most one, or all up to the next flag.
NONE, ONE, OPTIONAL, MANY = "0", "1", "?", "*"

_NUMBER = re.compile(r"^-\d+(\.\d*)?$")

# Scheduling order, logging, metrics detail and process placement: results stay the same without them.
WARNED: dict[str, str] = {
    "--bucket-e2e-request-latency": MANY,
    "--bucket-inter-token-latency": MANY,
    "--bucket-time-to-first-token": MANY,
    "--collect-tokens-histogram": NONE,
    "--crash-dump-folder": ONE,
    "--cuda-graph-backend-prefill": ONE,
    "--cuda-graph-padding": NONE,
    "--decode-log-interval": ONE,
    "--delete-ckpt-after-loading": NONE,
    "--detokenizer-worker-num": ONE,
    "--disable-chunked-prefix-cache": NONE,
    "--disable-cuda-graph-padding": NONE,
    "--disable-custom-all-reduce": NONE,
    "--disable-fast-image-processor": NONE,
    "--disable-flashinfer-cutlass-moe-fp4-allgather": NONE,
    "--disable-outlines-disk-cache": NONE,
    "--disable-piecewise-cuda-graph": NONE,
    "--download-dir": ONE,
    "--enable-cache-report": NONE,
    "--enable-cudagraph-gc": NONE,
    "--enable-dp-lm-head": NONE,
    "--enable-flashinfer-allreduce-fusion": NONE,
    "--enable-metrics-for-all-schedulers": NONE,
    "--enable-mixed-chunk": NONE,
    "--enable-mscclpp": NONE,
    "--enable-nccl-nvls": NONE,
    "--enable-priority-scheduling": NONE,
    "--enable-profile-cuda-graph": NONE,
    "--enable-request-time-stats-logging": NONE,
    "--enable-symm-mem": NONE,
    "--enable-torch-compile": NONE,
    "--enable-trace": NONE,
    "--export-metrics-to-file": NONE,
    "--export-metrics-to-file-dir": ONE,
    "--file-storage-path": ONE,
    "--gc-warning-threshold-secs": ONE,
    "--generation-tokens-buckets": MANY,
    "--keep-mm-feature-on-device": NONE,
    "--load-balance-method": ONE,
    "--log-level-http": ONE,
    "--log-requests": NONE,
    "--log-requests-format": ONE,
    "--log-requests-level": ONE,
    "--max-queued-requests": ONE,
    "--moe-dense-tp-size": ONE,
    "--num-continuous-decode-steps": ONE,
    "--numa-node": MANY,
    "--otlp-traces-endpoint": ONE,
    "--page-size": ONE,
    "--pp-async-batch-depth": ONE,
    "--prefill-max-requests": ONE,
    "--prompt-tokens-buckets": MANY,
    "--radix-eviction-policy": ONE,
    "--schedule-conservativeness": ONE,
    "--schedule-policy": ONE,
    "--scheduler-recv-interval": ONE,
    "--show-time-cost": NONE,
    "--skip-server-warmup": NONE,
    "--sleep-on-idle": NONE,
    "--soft-watchdog-timeout": ONE,
    "--tokenizer-mode": ONE,
    "--tokenizer-worker-num": ONE,
    "--torch-compile-max-bs": ONE,
    "--triton-attention-num-kv-splits": ONE,
    "--triton-attention-reduce-in-fp32": NONE,
    "--uvicorn-access-log-exclude-prefixes": MANY,
    "--warmups": ONE,
    "--weight-loader-disable-mmap": NONE,
}

# Other models, other outputs, other processes or other topologies: going on without them would be another server.
REFUSED: dict[str, str] = {
    "--admin-api-key": ONE,
    "--allow-auto-truncate": NONE,
    "--base-gpu-id": ONE,
    "--chat-template": ONE,
    "--completion-template": ONE,
    "--config": ONE,
    "--constrained-json-disable-any-whitespace": NONE,
    "--constrained-json-whitespace-pattern": ONE,
    "--context-parallel-size": ONE,
    "--cpu-offload-gb": ONE,
    "--custom-weight-loader": MANY,
    "--decode-attention-backend": ONE,
    "--deepep-config": ONE,
    "--deepep-mode": ONE,
    "--default-chat-template-kwargs": ONE,
    "--disaggregation-bootstrap-port": ONE,
    "--disaggregation-ib-device": ONE,
    "--disaggregation-mode": ONE,
    "--disaggregation-transfer-backend": ONE,
    "--elastic-ep-backend": ONE,
    "--enable-custom-logit-processor": NONE,
    "--enable-double-sparsity": NONE,
    "--enable-eplb": NONE,
    "--enable-hierarchical-cache": NONE,
    "--enable-lmcache": NONE,
    "--enable-lora": NONE,
    "--enable-memory-saver": NONE,
    "--enable-multimodal": NONE,
    "--enable-pdmux": NONE,
    "--enable-return-hidden-states": NONE,
    "--enable-single-batch-overlap": NONE,
    "--enable-two-batch-overlap": NONE,
    "--ep-dispatch-algorithm": ONE,
    "--ep-num-redundant-experts": ONE,
    "--forward-hooks": ONE,
    "--fp4-gemm-backend": ONE,
    "--fp8-gemm-backend": ONE,
    "--gpu-id-step": ONE,
    "--grammar-backend": ONE,
    "--grpc-mode": NONE,
    "--hf-chat-template-name": ONE,
    "--hicache-ratio": ONE,
    "--hicache-size": ONE,
    "--hicache-storage-backend": ONE,
    "--init-expert-location": ONE,
    "--is-embedding": NONE,
    "--language-only": NONE,
    "--lora-backend": ONE,
    "--lora-paths": MANY,
    "--lora-target-modules": MANY,
    "--mamba-ssm-dtype": ONE,
    "--max-lora-rank": ONE,
    "--max-loras-per-batch": ONE,
    "--mm-attention-backend": ONE,
    "--model-impl": ONE,
    "--modelopt-quant": ONE,
    "--offload-group-size": ONE,
    "--preferred-sampling-params": ONE,
    "--prefill-attention-backend": ONE,
    "--quantization-param-path": ONE,
    "--reasoning-parser": ONE,
    "--revision": ONE,
    "--rl-on-policy-target": ONE,
    "--sampling-backend": ONE,
    "--skip-tokenizer-init": NONE,
    "--speculative-accept-threshold-acc": ONE,
    "--speculative-accept-threshold-single": ONE,
    "--speculative-algorithm": ONE,
    "--speculative-attention-mode": ONE,
    "--speculative-draft-model-path": ONE,
    "--speculative-draft-model-quantization": ONE,
    "--speculative-eagle-topk": ONE,
    "--speculative-moe-runner-backend": ONE,
    "--speculative-num-draft-tokens": ONE,
    "--speculative-num-steps": ONE,
    "--speculative-token-map": ONE,
    "--ssl-ca-certs": ONE,
    "--ssl-certfile": ONE,
    "--ssl-keyfile": ONE,
    "--ssl-keyfile-password": ONE,
    "--swa-full-tokens-ratio": ONE,
    "--tbo-token-distribution-threshold": ONE,
    "--tool-call-parser": ONE,
    "--tool-server": ONE,
    "--torchao-config": ONE,
    "--weight-version": ONE,
}


def drop_unbuilt_flags(argv: Sequence[str]) -> list[str]:
    """`argv` without the flags that may be ignored, each warned about once.

    Raises `ValueError` for the first flag that asks for something which is not built here.
    """
    kept: list[str] = []
    warned: set[str] = set()
    index = 0
    while index < len(argv):
        token = argv[index]
        index += 1
        name, _, attached = token.partition("=")
        if name in REFUSED:
            raise ValueError(f"{name} is a flag of SGLang that is not built here: leave it out")
        if name not in WARNED:
            kept.append(token)
            continue
        if name not in warned:
            warned.add(name)
            logger.warning("%s is a flag of SGLang that is not built here; it is ignored", name)
        if not attached:
            index += _num_arguments(argv[index:], WARNED[name])
    return kept


def _num_arguments(rest: Sequence[str], arity: str) -> int:
    """How many tokens at the head of `rest` are arguments of a flag with this arity."""
    limit = {NONE: 0, ONE: 1, OPTIONAL: 1, MANY: len(rest)}[arity]
    count = 0
    while count < limit and count < len(rest) and _is_argument(rest[count]):
        count += 1
    return count


def _is_argument(token: str) -> bool:
    return not token.startswith("-") or bool(_NUMBER.match(token))
