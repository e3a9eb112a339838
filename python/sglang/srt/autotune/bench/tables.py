"""The results as Markdown: what a reader should see first is the distance to the bound, last the one to the default."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Result = dict[str, Any]


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; None shows as a dash."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if value < 100 else f"{value:.0f}"
    return str(value)


def ratio(a: float | None, b: float | None) -> str:
    """`a / b` to two decimals."""
    return "-" if a is None or not b else f"{a / b:.2f}"


def _bounds_line(result: Result) -> str:
    bounds = result["bounds"]
    return (
        f"Bounds of this run: {bounds['bytes_per_s'] / 1e12:.2f} TB/s (copy, read and written), "
        f"{bounds['flops_per_s'] / 1e12:.0f} TFLOP/s (BF16 product of 8192)."
    )


def bounds_tables(result: Result) -> str:
    return _bounds_line(result)


#: What the columns of the MoE piece call an arm.
_MOE_ARMS = {
    "flashinfer_cutlass": "FlashInfer tuned",
    "triton_grouped": "Triton tuned",
    "torch_grouped": "torch grouped",
    "default": "FlashInfer default",
}


def moe_tables(result: Result) -> str:
    """Times beside the bound, then what the portfolio chose, then errors."""
    geometry, portfolio, singles = result["geometry"], result["portfolio"], result["singles"]
    others = [name for name in (*singles, "default") if f"{name}_us" in result["rows"][0]]
    head = ["tokens", "bound us", "portfolio us", *(f"{_MOE_ARMS.get(name, name)} us" for name in others)]
    head += ["portfolio / bound", "portfolio / best single"]
    rows, choices, errors = [], [], []
    for row in result["rows"]:
        mine, size = row[f"{portfolio}_us"], row["tokens"]
        best = min(row[f"{name}_us"] for name in singles)
        values = [size, row["bound_us"], mine, *(row[f"{name}_us"] for name in others)]
        rows.append([*values, ratio(mine, row["bound_us"]), ratio(mine, best)])
        choices.append([size, "; ".join(row["winners"].values())])
        errors.append([size, *(_error(row[f"{name}_error"]) for name in (portfolio, *singles))])
    stages = ", ".join(
        f"{name} {stage['seconds']:.1f} s ({stage['profiles_tuned']} profiles, {stage['fallbacks']} fallbacks)"
        for name, stage in result["stages"].items()
    )
    title = (
        f"MoE op, hidden {geometry['hidden_size']}, intermediate {geometry['moe_intermediate_size']}, "
        f"{geometry['num_experts']} experts, top-{geometry['num_experts_per_tok']}, {result['dtype']}; graph replay, "
        f"cold L2, median of {result['repeats']}, the arms in turns. {_bounds_line(result)}\n"
        f"Cold stages: {stages}."
    )
    error_head = ["tokens", "portfolio error", *(f"{_MOE_ARMS.get(name, name)} error" for name in singles)]
    return (
        f"{title}\n\n{table(head, rows)}\n\nThe portfolio's choices:\n\n{table(['tokens', 'choice'], choices)}\n\n"
        f"Relative norm of the difference to float32, sampled rows:\n\n{table(error_head, errors)}"
    )


def engine_tables(result: Result) -> str:
    names = ["start", "stage s", "profiles", "seeded", "user", "tuned", "fallbacks", "whole start s", "share"]
    starts = [
        [
            name,
            f"{start['stage_s']:.2f}",
            start["profiles"],
            *(start["records"][kind] for kind in ("seeded", "user", "tuned")),
            start["fallbacks"],
            f"{start['start_s']:.1f}",
            f"{100 * start['share_of_start']:.1f}%",
        ]
        for name, start in result["starts"].items()
    ]
    head = [
        "forward",
        "tokens",
        "portfolio / bound",
        "bound ms",
        "portfolio ms",
        "tuned ms",
        "torch_grouped ms",
    ]
    head += ["default ms", "tuned / portfolio", "torch_grouped / tuned", "default / tuned", "experts a layer"]
    rows = [
        [
            row["phase"],
            row["tokens"],
            ratio(row["portfolio_ms"], row["bound_ms"]),
            row["bound_ms"],
            row["portfolio_ms"],
            row["tuned_ms"],
            row["torch_grouped_ms"],
            row["default_ms"],
            ratio(row["tuned_ms"], row["portfolio_ms"]),
            ratio(row["torch_grouped_ms"], row["tuned_ms"]),
            ratio(row["default_ms"], row["tuned_ms"]),
            row["experts_per_layer"],
        ]
        for row in result["rows"]
    ]
    note = (
        f"Decode at {result['seq_len']} tokens of context through graphs, prefill of one prompt eagerly; host work "
        f"included, sampling not. {_bounds_line(result)}\nDefault and tuned are {result['backend']} alone. "
        "The start is that of one process after its imports, with "
        f"{len(result['decode_batch_sizes'])} captured sizes (a capture took {result['capture_s']:.1f} s)."
    )
    return f"{table(names, starts)}\n\n{note}\n\n{table(head, rows)}"


def serving_tables(result: Result) -> str:
    arms = result["arms"]
    rows_of = {name: {row["concurrency"]: row for row in arm["rows"]} for name, arm in arms.items()}
    metrics = {"output_tokens_per_s": "tokens/s", "ttft_ms": "TTFT ms", "itl_ms": "ITL ms"}
    head = ["concurrency", "requests"]
    head += [f"{words} {arm}" for words in metrics.values() for arm in arms]
    head += ["throughput tuned / default", *["throughput portfolio / tuned"] * ("portfolio" in arms)]
    rows = []
    for concurrency, row in rows_of["tuned"].items():
        of_arms = [rows[concurrency] for rows in rows_of.values()]
        values = [concurrency, row["requests"]]
        values += [other[name] for name in metrics for other in of_arms]
        served = {arm: rows[concurrency]["output_tokens_per_s"] for arm, rows in rows_of.items()}
        values.append(ratio(served["tuned"], served["default"]))
        if "portfolio" in served:
            values.append(ratio(served["portfolio"], served["tuned"]))
        rows.append(values)
    starts = ", ".join(
        f"{name} ({arm.get('backend', 'auto')}) {arm['start_s']:.1f} s, its stage {_stage_s(arm):.1f} s"
        for name, arm in arms.items()
    )
    note = (
        f"Random prompts of {result['input_len']} tokens, {result['output_len']} out. Cut to "
        f"{result['requests_per_client']} requests for each concurrent client (at least 4). "
        "TTFT and the time between tokens (ITL) are medians over requests. "
        f"Process start to ready, by MoE runner: {starts}."
    )
    return f"{note}\n\n{table(head, rows)}"


def _stage_s(arm: Result) -> float:
    return float((arm["autotune"] or {}).get("seconds", 0.0))


def overlap_tables(result: Result) -> str:
    arms = result["arms"]
    in_turn = {row["concurrency"]: row for row in arms["in turn"]["rows"]}
    head = [
        "concurrency",
        "requests",
        "tokens/s overlap",
        "tokens/s in turn",
        "ITL ms overlap",
        "ITL ms in turn",
    ]
    rows = []
    for row in arms["overlap"]["rows"]:
        other = in_turn[row["concurrency"]]
        values = [row["concurrency"], row["requests"]]
        for name in ("output_tokens_per_s", "itl_ms"):
            values += [row[name], other[name]]
        rows.append([*values, ratio(row["output_tokens_per_s"], other["output_tokens_per_s"])])
    step_head = [
        "batch",
        "schedule",
        "bound / step",
        "bound ms",
        "forward ms",
        "step ms",
        "gap ms",
        "gap / step",
    ]
    steps = [
        [
            row["batch_size"],
            row["arm"],
            ratio(row["bound_ms"], row["step_ms"]),
            row["bound_ms"],
            row["forward_ms"],
            row["step_ms"],
            row["gap_ms"],
            f"{100 * row['gap_share']:.1f}%",
        ]
        for row in sorted(result["steps"], key=lambda row: row["batch_size"])
    ]
    note = (
        f"Two tuned servers. Random prompts of {result['input_len']} tokens, {result['output_len']} out, cut to "
        f"{result['requests_per_client']} requests for each concurrent client (at least 4). The time between tokens "
        "(ITL) is the median over requests."
    )
    step_note = (
        f"One decode step of the server's own scheduler without HTTP, at about {result['seq_len']} tokens of context, "
        "medians. The forward is the graph's replay; the gap is all the time between two of them, sampling and inputs "
        f"included. {_bounds_line(result)}"
    )
    served = table([*head, "throughput overlap / in turn"], rows)
    return f"{note}\n\n{served}\n\n{step_note}\n\n{table(step_head, steps)}"


def outputs_tables(result: Result) -> str:
    head = ["tokens", "tuned error", "default error", "torch_grouped error", "tuned to default", "fallbacks"]

    def rows(name: str) -> list[list[Any]]:
        columns = ("tuned_error", "default_error", "torch_grouped_error", "tuned_to_default")
        return [
            [row["tokens"], *(_error(row.get(column)) for column in columns), row["fallbacks"]]
            for row in result[name]
        ]

    greedy = result["greedy"]
    words = "identical" if greedy["identical"] else "NOT identical"
    return (
        f"One MoE layer against float32, {result['sampled_rows']} sampled rows, relative norm:\n\n"
        f"{table(head, rows('layer'))}\n\n"
        f"Logits of {result['num_layers']} layers after one prompt, against the same weights in float32:\n\n"
        f"{table(head, rows('logits'))}\n\n"
        f"Greedy tokens of two starts under deterministic inference: {words} ({greedy['tokens']} tokens, "
        f"{greedy['distinct']} different ones)."
    )


def _error(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.2f}%"


def dense_tables(result: Result) -> str:
    backends = sorted(
        {name.removesuffix("_tuned_us") for row in result["rows"] for name in row if "_tuned_us" in name}
    )
    head = ["projection", "tokens", "torch / bound", "bound us", "torch us"]
    head += [f"{backend} {kind} us" for backend in backends for kind in ("default", "tuned")]
    rows = []
    for row in result["rows"]:
        values = [row["projection"], row["tokens"], ratio(row["torch_us"], row["bound_us"])]
        values += [row["bound_us"], row["torch_us"]]
        for backend in backends:
            values += [row.get(f"{backend}_us"), row.get(f"{backend}_tuned_us")]
        rows.append(values)
    notes = {
        f"{name.removesuffix('_note')}: {text}"
        for row in result["rows"]
        for name, text in row.items()
        if name.endswith("_note")
    }
    missing = "".join(f"\n- {note}" for note in sorted(notes))
    return f"{_bounds_line(result)}\n\n{table(head, rows)}" + (f"\n\nNot measured:{missing}" if notes else "")


TABLES: dict[str, Callable[[Result], str]] = {
    "bounds": bounds_tables,
    "moe": moe_tables,
    "moe-wide": moe_tables,
    "engine": engine_tables,
    "serving": serving_tables,
    "overlap": overlap_tables,
    "outputs": outputs_tables,
    "dense": dense_tables,
}


def document_tables(document: dict[str, Any]) -> str:
    """A piece's file as Markdown, with where it comes from."""
    source = document["provenance"]
    versions = ", ".join(f"{name} {version}" for name, version in source["packages"].items())
    origin = (
        f"{source['gpu']}, driver {source['driver']}, CUDA {source['cuda']}, Python {source['python']}, {versions}; "
        f"{source['date']}, {document['seconds']:.0f} s: `{source['command']}`"
    )
    return f"## {document['piece']}\n\n{origin}\n\n{TABLES[document['piece']](document['result'])}\n"
