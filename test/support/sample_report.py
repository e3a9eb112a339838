"""A report that has something in every part, for the page, the metrics and the command that print it.

The plan is the real one of its limits; times follow a simple curve and were measured nowhere.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.autotune.plan import Limits, make_plan
from sglang.srt.autotune.report import FallbackReport, RecordCounts, StageReport, StepReport

OPS = ("trtllm::fused_moe::gemm1", "trtllm::fused_moe::gemm2")
HOSTILE = "<script>alert('x')</script> & \"quotes\""


def sample_report(hostile: str = "cublas_version: saved 13.1.0, current 13.2.0") -> dict[str, Any]:
    """The JSON document; ``hostile`` is put into every free text."""
    limits = Limits(
        (1, 2, 4, 8, 12, 16),
        16,
        1024,
        moe_gather=4,
        context_length=40960,
        origins={
            "max_running_requests": "--max-running-requests 64 over 4 attention-DP ranks",
            "prefill_ceiling": "--chunked-prefill-size 4096 over 4 attention-DP ranks",
            "decode_batch_sizes": hostile,
        },
    )
    plan = make_plan(limits)
    steps = []
    for step in plan.steps:
        tuned_ms = 0.045 + 0.16 * step.bucket / 1024
        steps.append(
            StepReport(
                step.phase.value,
                step.bucket,
                source="tuned",
                seconds=0.5,
                default_ms=tuned_ms * (3 + 2.5 * (8 <= step.bucket <= 1024)),
                tuned_ms=tuned_ms,
                relative_error=0.004,
                profiles_tuned=2,
                winners={op: f"MoERunner {7 + step.bucket % 5}" for op in OPS},
            )
        )
    steps[0].source, steps[0].default_ms, steps[0].tuned_ms = "seeded", None, None
    steps[-1].source, steps[-1].note, steps[-1].tuned_ms = "left out", hostile, None
    ranks = [
        {
            "rank": rank,
            "tp_rank": rank,
            "pp_rank": 0,
            "dp_rank": rank,
            "status": "completed",
            "seconds": 11.2,
            "profiles_tuned": 36,
            "fallbacks": 0,
            "disagreements": 0,
            "cache_path": f"/cache/rank_tp{rank}_pp0_dp{rank}.json",
        }
        for rank in range(4)
    ]
    return StageReport(
        status="completed",
        reason="36 profiles tuned in 18 steps",
        seconds=11.23,
        engine={
            "device": "cuda",
            "capability": [9, 0],
            "model": {
                "model_type": "qwen3_moe",
                "hidden_size": 2048,
                "moe_intermediate_size": 768,
                "num_experts": 128,
                "num_experts_per_tok": 8,
            },
            "dtype": "bfloat16",
            "quantization": None,
            "backends": {"moe": "flashinfer_cutlass", "attention": "flashinfer"},
            "parallel": {"tp": 4, "pp": 1, "ep": 4, "attn_dp": 4},
            "ops": list(OPS),
        },
        plan=plan.to_json(),
        steps=steps,
        records=RecordCounts(
            seeded=2,
            tuned=36,
            unused=[f"2 user records of an::op, {hostile}"],
            rejected=[
                {"source": "user", "path": "/cache/r.json", "kind": "environment", "reason": hostile},
                {"source": "given", "path": "/given.json", "kind": "entry", "reason": hostile},
            ],
        ),
        seeds=[
            {"name": "fits", "used": True, "reasons": []},
            {"name": "other", "used": False, "reasons": ["sm: saved sm_103, current sm90", hostile]},
        ],
        profiles_tuned=36,
        fallbacks=1,
        fallback_details=[FallbackReport(OPS[0], "prefill 512", hostile)],
        left_out=[{"step": "prefill 1", "reason": hostile}],
        disagreements=[{"key": hostile, "rank": 2, "had": ["MoERunner", 7], "now": ["MoERunner", 9]}],
        megamoe={
            "kernel": "sample_kernel",
            "policy": "sweep",
            "capacities": [1, 16, 1024],
            "tuned": 2,
            "cached": 1,
            "kept": 0,
            "winners": {
                str(capacity): {
                    "source": source,
                    "knobs": {"cluster_m": 2, "note": hostile},
                    "time_us": 60.0 + capacity / 4,
                    "default_us": 66.0 + capacity / 3,
                    "open_s": 2.1,
                }
                for capacity, source in ((1, "cached"), (16, "tuned"), (1024, "tuned"))
            },
            "rejected": [{"key": "sample_kernel|max_tokens=8", "reason": hostile}],
            "problems": [f"capacity 16: {hostile}"],
            "timings": {"tuning": 30.5},
            "seconds": 36.9,
        },
        ranks=ranks,
        cache_path="/root/.cache/sglang/flashinfer/autotune/0.7.2/sm90/155c07f56f83fb96/rank_tp0_pp0_dp0.json",
        environment={
            "flashinfer_version": "0.7.2",
            "cuda_version": "13.0",
            "cublas_version": "13.1.0",
            "cudnn_version": "92400",
            "cudnn_frontend_version": "1.32.0",
            "cutlass_dsl_version": "nvidia-cutlass-dsl-libs-base==4.8.1;nvidia-cutlass-dsl==4.8.1",
            "gpu": "NVIDIA H200",
        },
        skipped_ops={"names": ["fp8_gemm"], "never_asked": ["fp8_gemm"]},
        timings={"records": 0.02, "coverage": 0.4, "steps": 10.1, "verification": 0.7},
        warnings=[hostile],
    ).to_json()
