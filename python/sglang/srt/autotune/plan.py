"""What will be tuned, computed before anything runs.

Pure functions from the workload's limits to a `Plan`, which is a value: it can be printed on a machine
without a GPU and it is exactly what the stage executes. Nothing here imports torch or FlashInfer.

FlashInfer's MoE ops look a forward up by its token count rounded up to a fixed grid. A *step* is one grid
bucket, tuned by one forward that the op sees at that many tokens; so the plan is the set of buckets that
serving can reach, each with a forward that looks like what will reach it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

#: FlashInfer's grid: powers of two to 256, steps of 256 to 2048, steps of 512 to 4096, then powers of two.
#: Source: `flashinfer.fused_moe.utils.get_hybrid_num_tokens_buckets`; a test compares the two.
_PO2_END, _FINE_END, _COARSE_END = 256, 2048, 4096
_FINE_STEP, _COARSE_STEP = 256, 512


class Phase(str, Enum):
    """Which forwards a step stands for: those that add one token to each sequence, or those that read prompts."""

    DECODE = "decode"
    PREFILL = "prefill"


@dataclass(frozen=True)
class Limits:
    """The largest forwards that serving can produce, per rank.

    ``decode_batch_sizes`` are the captured batch sizes in requests, ascending. ``tokens_per_request`` is the
    widest decode (1 without speculation). ``moe_gather`` is the number of ranks whose tokens the MoE op sees
    together: the attention-DP size where tokens are gathered, else 1. ``origins`` says for each value
    which flag or default it came from.
    """

    decode_batch_sizes: tuple[int, ...]
    max_running_requests: int
    prefill_ceiling: int
    tokens_per_request: int = 1
    moe_gather: int = 1
    context_length: int = 0
    origins: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def decode_ceiling(self) -> int:
        """Most tokens of one decode forward of a rank."""
        return self.max_running_requests * self.tokens_per_request

    @property
    def max_op_tokens(self) -> int:
        """The top of the grid: most tokens that the MoE op can see in one call.

        Below 256 it is a power of two: FlashInfer's bucket mapper does not clamp there, so with a top of 7 a
        call of 5 tokens would look up a bucket 8 that the grid does not have and miss for ever.
        """
        most = max(self.decode_ceiling, self.prefill_ceiling) * self.moe_gather
        return 1 << (most - 1).bit_length() if most < _PO2_END else most


@dataclass(frozen=True)
class Shape:
    """One dummy forward.

    ``op_tokens`` is what the MoE op sees: the sum of ``tokens_of_rank`` over the gathered ranks (attention-DP
    ranks; a rank with 0 tokens takes part with an idle batch). Decode forwards have one sequence per token
    group of ``tokens_per_sequence``; prefill forwards have sequences no longer than the context.
    """

    phase: Phase
    op_tokens: int
    tokens_of_rank: tuple[int, ...]
    tokens_per_sequence: int = 1

    def tokens(self, dp_rank: int) -> int:
        return self.tokens_of_rank[dp_rank] if len(self.tokens_of_rank) > 1 else self.tokens_of_rank[0]

    def sequence_lengths(self, dp_rank: int) -> list[int]:
        """New tokens of each sequence of this rank's batch."""
        left, lengths = self.tokens(dp_rank), []
        while left > 0:
            lengths.append(min(left, self.tokens_per_sequence))
            left -= lengths[-1]
        return lengths


def step_name(phase: Phase, bucket: int) -> str:
    """What logs, reports, journals and record files call a step."""
    return f"{phase.value} {bucket}"


@dataclass(frozen=True)
class Step:
    """One bucket of the ops' grid and the forward that tunes it."""

    phase: Phase
    bucket: int
    shape: Shape

    @property
    def name(self) -> str:
        return step_name(self.phase, self.bucket)


@dataclass(frozen=True)
class Plan:
    """Steps in the order in which they run, and the MegaMoE capacities per rank, ascending."""

    steps: tuple[Step, ...]
    capacities: tuple[int, ...]
    limits: Limits

    def to_json(self) -> dict:
        """Plain data for reports: steps, capacities and the limits they came from."""
        limits = self.limits
        return {
            "steps": [
                {
                    "phase": step.phase.value,
                    "num_tokens": step.bucket,
                    "tokens_per_rank": list(step.shape.tokens_of_rank),
                    "tokens_per_sequence": step.shape.tokens_per_sequence,
                }
                for step in self.steps
            ],
            "capacities": list(self.capacities),
            "limits": {
                "max_running_requests": limits.max_running_requests,
                "decode_batch_sizes": list(limits.decode_batch_sizes),
                "decode_ceiling": limits.decode_ceiling,
                "prefill_ceiling": limits.prefill_ceiling,
                "tokens_per_request": limits.tokens_per_request,
                "moe_gather": limits.moe_gather,
                "max_op_tokens": limits.max_op_tokens,
                "origins": dict(limits.origins),
            },
        }


def round_up(num_tokens: int, step: int) -> int:
    return -(-num_tokens // step) * step


def bucket_of(num_tokens: int, max_num_tokens: int) -> int:
    """The grid bucket that serves ``num_tokens``: rounded up, clamped to ``max_num_tokens``.

    ``max_num_tokens`` is a power of two below 256 (see `Limits.max_op_tokens`).
    """
    if num_tokens >= max_num_tokens:
        return max_num_tokens
    if num_tokens <= 1:
        return 1
    if num_tokens <= _PO2_END or num_tokens > _COARSE_END:
        bucket = 1 << (num_tokens - 1).bit_length()
    elif num_tokens <= _FINE_END:
        bucket = round_up(num_tokens, _FINE_STEP)
    else:
        bucket = round_up(num_tokens, _COARSE_STEP)
    return min(bucket, max_num_tokens)


def bucket_grid(max_num_tokens: int) -> tuple[int, ...]:
    """All buckets up to ``max_num_tokens``, which is itself one."""
    grid, bucket = [], 0
    while bucket < max_num_tokens:
        bucket = bucket_of(bucket + 1, max_num_tokens)
        grid.append(bucket)
    return tuple(grid)


def capacity_ladder(limits: Limits) -> tuple[int, ...]:
    """Token counts per rank for which MegaMoE opens a workspace.

    Powers of two up to the decode ceiling, the exact decode ceiling, and the prefill ceiling.
    """
    ladder, capacity = set(), 1
    while capacity <= limits.decode_ceiling:
        ladder.add(capacity)
        capacity *= 2
    ladder |= {limits.decode_ceiling, limits.prefill_ceiling}
    return tuple(sorted(ladder))


def spread(op_tokens: int, num_ranks: int) -> tuple[int, ...]:
    """``op_tokens`` over ranks as evenly as can be; with fewer tokens than ranks the last ones are idle."""
    base, rest = divmod(op_tokens, num_ranks)
    return tuple(base + (rank < rest) for rank in range(num_ranks))


def make_plan(limits: Limits, *, include_prefill: bool = True, include_steps: bool = True) -> Plan:
    """The steps that cover every bucket serving can reach, hottest first.

    Decode steps: the buckets of every captured batch size, ascending, then of the decode ceiling (eager
    batches). Prefill steps: the buckets above the decode ceiling, descending from the prefill ceiling, then
    the buckets below it that no captured size reaches (short prompts and the tails of chunks land there).
    ``include_prefill=False`` (``SGLANG_FLASHINFER_AUTOTUNE_EXTEND=0``) leaves the prefill steps out;
    capacities do not depend on it. Without ``include_steps`` (no op is tuned bucket by bucket) there are capacities
    alone.
    """
    if not include_steps:
        return Plan((), capacity_ladder(limits), limits)
    top = limits.max_op_tokens
    decode_sizes = [batch * limits.tokens_per_request for batch in limits.decode_batch_sizes]
    decode_sizes.append(limits.decode_ceiling)
    decode_buckets = {bucket_of(size * limits.moe_gather, top): None for size in sorted(decode_sizes)}
    steps = [_decode_step(bucket, limits) for bucket in decode_buckets]
    if include_prefill:
        ceiling = max(decode_buckets)
        rest = [b for b in bucket_grid(top) if b not in decode_buckets]
        above = sorted((b for b in rest if b > ceiling), reverse=True)
        below = sorted((b for b in rest if b < ceiling), reverse=True)
        steps += [_prefill_step(bucket, limits) for bucket in [*above, *below]]
    return Plan(tuple(steps), capacity_ladder(limits), limits)


def _decode_step(bucket: int, limits: Limits) -> Step:
    shape = Shape(Phase.DECODE, bucket, spread(bucket, limits.moe_gather), limits.tokens_per_request)
    return Step(Phase.DECODE, bucket, shape)


def _prefill_step(bucket: int, limits: Limits) -> Step:
    per_rank = spread(bucket, limits.moe_gather)
    length = min(max(per_rank), limits.context_length or max(per_rank))
    return Step(Phase.PREFILL, bucket, Shape(Phase.PREFILL, bucket, per_rank, length))
