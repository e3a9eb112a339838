"""`sglang autotune plan`: what a start would do, without a GPU, weights or the start."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace

from sglang.cli.autotune.arguments import own_parser, split_arguments
from sglang.cli.autotune.preview import Preview, RankRecords, make_preview
from sglang.srt.autotune.estimate import estimate
from sglang.srt.autotune.gpus import GpuModel, gpu_here, gpu_named, gpu_names
from sglang.srt.autotune.plan import Limits
from sglang.srt.configs.parallel_sizes import check_parallel_sizes
from sglang.srt.configs.served_model import read_model_config
from sglang.srt.flags import FlagParser
from sglang.srt.launch_checks import warn_of_unknown_ops
from sglang.srt.server_args import ServerArgs
from sglang.srt.server_args_rules import check_backends
from sglang.srt.utils.logs import setup_logging

PROG = "sglang autotune plan"


def parser(prog: str = PROG) -> FlagParser:
    """The flags of this sub-command alone."""
    own = own_parser(
        prog, "Print what a start with these flags would tune, without a GPU and without weights."
    )
    own.add_argument(
        "--gpu",
        metavar="MODEL",
        help=f"GPU to plan for. Default: the one of this machine, else its CPU. Known: {', '.join(gpu_names())}.",
    )
    own.add_argument("--json", action="store_true", help="Print one JSON document.")
    return own


def main(argv: Sequence[str]) -> int:
    """Print the plan; raises `ValueError` for a wrong flag or model."""
    setup_logging("warning")
    own, args = split_arguments(parser(), argv)
    gpu = choose_gpu(own.gpu, args)
    device = "cpu" if gpu is None else "cuda"
    check_kernels(args, device)
    config = read_model_config(args, device)
    check_parallel_sizes(args, config)
    preview = with_estimate(make_preview(args, config, gpu))
    warn_of_unknown_ops(args, [preview.device["moe_runner_backend"]])
    if own.json:
        json.dump(preview.to_json(), sys.stdout, indent=2)
        print()
    else:
        print("\n".join(lines(preview)))
    return 0


def choose_gpu(name: str | None, args: ServerArgs) -> GpuModel | None:
    """The GPU to plan for; None for the CPU. `ValueError` when the flags contradict or no GPU can be told."""
    if name is not None:
        if args.device == "cpu":
            raise ValueError("--gpu and --device cpu contradict each other: leave one of them out")
        return gpu_named(name)
    if args.device == "cpu":
        return None
    here = gpu_here()
    if here is None and args.device == "cuda":
        raise ValueError(
            "--device cuda: no known GPU is visible here; name the one to plan for with --gpu MODEL"
        )
    return here


def check_kernels(args: ServerArgs, device: str) -> None:
    """`ValueError` where the named kernels do not run on the device that is planned for: no start would."""
    try:
        check_backends(args, device)
    except ValueError as error:
        raise ValueError(f"{error}, or name the GPU to plan for with --gpu MODEL") from error


def with_estimate(preview: Preview) -> Preview:
    """The same with the time that tuning will take."""
    value = estimate(
        num_steps=len(preview.todo),
        seconds_per_step=preview.records.seconds_per_step,
        num_capacities=0 if preview.capacities_todo is None else len(preview.plan.capacities),
        num_untuned_capacities=len(preview.capacities_todo or ()),
        device=preview.device["type"],
        gpu=preview.device["gpu"],
        will_run=preview.decision.run,
    )
    return replace(preview, estimate=value)


def lines(preview: Preview) -> Iterator[str]:
    """The plan as text, for people."""
    model, device = preview.model, preview.device
    gpu = device["gpu"] or "this machine's CPU"
    verdict = "runs" if preview.decision.run else "is skipped"
    quantization = f", {model['quantization']} weights" if model["quantization"] else ""
    yield f"FlashInfer autotune {verdict}: {preview.decision.reason}"
    yield ""
    yield (
        f"model     {model['architecture']}: {model['num_hidden_layers']} layers, "
        f"{model['num_experts']} experts of {model['hidden_size']} x {model['moe_intermediate_size']}, "
        f"top {model['num_experts_per_tok']}, {model['dtype']}{quantization}"
    )
    yield f"device    {gpu} ({device['sm']}), MoE kernels {device['moe_runner_backend']}"
    yield f"ops       {', '.join(preview.ops) or 'none that can be tuned'}"
    for note in preview.notes:
        yield from _wrapped("note      ", note)
    yield ""
    yield from _limit_lines(preview.plan.limits)
    yield ""
    yield from _step_lines(preview)
    yield ""
    yield from _record_lines(preview)
    yield ""
    yield from _seed_lines(preview)
    yield ""
    seconds = preview.estimate["seconds"]
    yield from _wrapped("time      ", f"about {seconds:.0f} s: {preview.estimate['basis']}")


def _limit_lines(limits: Limits) -> Iterator[str]:
    yield "limits of one rank"
    sizes = " ".join(map(str, limits.decode_batch_sizes))
    gathered = f"{limits.moe_gather} attention-DP ranks together" if limits.moe_gather > 1 else "one rank's"
    rows = [
        ("requests at once", limits.max_running_requests, limits.origins["max_running_requests"]),
        ("captured batches", sizes, limits.origins["decode_batch_sizes"]),
        (
            "decode ceiling",
            limits.decode_ceiling,
            f"requests x {limits.tokens_per_request} token(s) per request",
        ),
        ("prefill ceiling", limits.prefill_ceiling, limits.origins["prefill_ceiling"]),
        ("tokens at the op", limits.max_op_tokens, f"largest forward, {gathered}"),
    ]
    for name, value, origin in rows:
        yield from _wrapped(f"  {name:<20}", f"{value}  ({origin})")


def _step_lines(preview: Preview) -> Iterator[str]:
    plan = preview.plan
    conditional = "" if preview.decision.run else "; what would be tuned"
    if plan.steps:
        yield f"{len(plan.steps)} steps, in this order (tokens at the op{conditional})"
        for phase in ("decode", "prefill"):
            sizes = [str(step.bucket) for step in plan.steps if step.phase.value == phase]
            none = "none: SGLANG_FLASHINFER_AUTOTUNE_EXTEND=0"
            yield from _wrapped(f"  {phase:<20}", " ".join(sizes) or none)
    else:
        yield f"no steps: MegaMoE is tuned by capacity{conditional}"
    capacities = " ".join(map(str, plan.capacities))
    unused = (
        ""
        if preview.capacities_todo is not None
        else "  (opened with --moe-a2a-backend flashinfer_megamoe only)"
    )
    yield from _wrapped(f"  {'MegaMoE capacities':<20}", f"{capacities}{unused}")


def _record_lines(preview: Preview) -> Iterator[str]:
    records = preview.records
    yield "records"
    if not records.reuse:
        yield "  none are loaded (SGLANG_FLASHINFER_AUTOTUNE_CACHE=0); what is tuned goes to a file under runs/"
        return
    if records.directory is None:
        yield f"  none found under {records.parent}/"
        reason = "the GPU's exact variant: unknown here"
        if records.unknown_here:
            fields = ", ".join(records.unknown_here)
            reason = f"{fields}: unknown here; a start reads that from the libraries that it loads"
        yield from _wrapped("  ", f"the directory's name also depends on {reason}")
    else:
        yield f"  {records.directory}/"
        for rank in records.ranks:
            yield from _rank_lines(rank, preview)
    for given in records.given:
        yield f"  --flashinfer-autotune-records {given.path}: {given.num_records} records"
        yield from (f"    not used: {problem}" for problem in given.problems)


def _rank_lines(rank: RankRecords, preview: Preview) -> Iterator[str]:
    parts = [f"{rank.num_records} records"] if rank.exists else ["not there yet"]
    if preview.plan.steps:
        parts.append(f"{len(rank.covered)} of {len(preview.plan.steps)} steps covered")
    if preview.capacities_todo is not None:
        parts.append(f"{len(rank.capacities)} of {len(preview.plan.capacities)} MegaMoE capacities")
    yield f"  {rank.place}.json  {', '.join(parts)}"
    yield from (f"    not used: {problem}" for problem in rank.problems)


def _seed_lines(preview: Preview) -> Iterator[str]:
    yield "seeds"
    if not preview.records.reuse:
        yield "  none are loaded (SGLANG_FLASHINFER_AUTOTUNE_CACHE=0)"
        return
    if not preview.seeds:
        yield f"  none is for {preview.model['model_type']} of this size"
    for seed in preview.seeds:
        verdict = {True: "applies", False: "does not apply", None: "cannot be told here"}[seed["used"]]
        buckets = " ".join(map(str, seed["buckets"]))
        yield f"  {seed['name']}: {verdict}"
        held = f"{seed['num_records']} record{'s'[: seed['num_records'] != 1]}"
        yield from _wrapped("    ", f"holds {held} of {', '.join(seed['ops'])} at {buckets} tokens")
        if not seed["asked_for"]:
            yield f"    {preview.device['moe_runner_backend']} asks for no op of it"
        for reason in seed["reasons"]:
            yield from _wrapped("    ", reason)


def _wrapped(head: str, text: str, width: int = 100) -> Iterator[str]:
    """``text`` after ``head``, continued below it."""
    yield from textwrap.wrap(
        text.strip(), width, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
    )
