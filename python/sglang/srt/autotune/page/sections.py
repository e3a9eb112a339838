"""The parts of the page, in the order of an operator's questions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sglang.srt.autotune.page.markup import Html, join, pairs, plain, section, table, tag
from sglang.srt.autotune.page.plot import Series, plot

Report = Mapping[str, Any]
_NOTHING = Html("")


def progress(report: Report) -> Html:
    """While the engine starts: how far the stage is."""
    status = report.get("status", "pending")
    heading = tag("h1", "FlashInfer autotune", tag("span", status, class_=f"badge {status}"))
    if status == "pending" or not report.get("total"):
        return tag(
            "header", heading, tag("p", "The engine is starting; the stage has not begun.", class_="soft")
        )
    done, total = int(report["done"]), int(report["total"])
    share = min(100, round(100 * done / total))
    left = report.get("remaining_s")
    words = f"{done} of {total} steps, {report.get('elapsed_s', 0):.0f} s elapsed"
    words += f", about {left:.0f} s left" if left else ""
    bar = tag("div", tag("i", style=f"width:{share}%"), class_="bar", role="progressbar", aria_valuenow=share)
    return tag(
        "header",
        heading,
        bar,
        tag("p", words),
        tag("p", f"Now: {report.get('current') or '–'}", class_="soft"),
    )


def headline(report: Report) -> Html:
    """Decision, outcome and the numbers that say whether all is well."""
    status = report.get("status", "unknown")
    counts = report.get("records") or {}
    heading = tag("h1", "FlashInfer autotune", tag("span", status, class_=f"badge {status}"))
    if not _ran(report):
        return tag("header", heading, tag("p", report.get("reason")))
    loaded = sum(counts.get(source, 0) for source in ("seeded", "user", "given"))
    tiles = [
        (f"{report.get('seconds', 0):.1f} s", "spent at start"),
        _work(report),
        (report.get("profiles_tuned", 0), "profiles tuned"),
        (loaded, "records loaded"),
        (report.get("fallbacks", 0), "fallbacks"),
        (len(counts.get("rejected", [])), "records rejected"),
    ]
    return tag(
        "header",
        heading,
        tag("p", report.get("reason"), class_="soft"),
        tag("p", _what_was_tuned(report)),
        tag(
            "div", *[tag("div", tag("b", n), tag("span", w), class_="tile") for n, w in tiles], class_="tiles"
        ),
    )


def _ran(report: Report) -> bool:
    """Whether there is anything to show beyond the reason."""
    return bool(report.get("steps") or report.get("megamoe"))


def _work(report: Report) -> tuple[int, str]:
    steps, megamoe = report.get("steps", []), report.get("megamoe") or {}
    return (len(steps), "steps") if steps else (len(megamoe.get("capacities", [])), "MegaMoE capacities")


def _what_was_tuned(report: Report) -> str:
    engine = report.get("engine") or {}
    model, gpu = engine.get("model") or {}, (report.get("environment") or {}).get("gpu")
    if not model:
        return ""
    device = gpu if gpu and gpu != "unknown" else engine.get("device", "")
    experts = ""
    if "num_experts" in model:
        experts = (
            f", {model['num_experts']} experts of {model.get('hidden_size')} x {model.get('moe_intermediate_size')}"
            f", top {model.get('num_experts_per_tok')}"
        )
    name = model.get("model_type", "model")
    return f"{name}{experts}, {engine.get('dtype')}; MoE kernels {engine.get('backends', {}).get('moe')} on {device}"


def attention(report: Report) -> Html:
    """What an operator should look at; absent when there is nothing."""
    items = [f"{item['step']} was left out: {item['reason']}" for item in report.get("left_out", [])]
    items += [
        f"{item['op']} falls back to its default at {item['step']}: {item['shapes']}"
        for item in report.get("fallback_details", [])
    ]
    items += [
        f"rank {item['rank']} had chosen {plain(item['had'])} for {item['key']} and took {plain(item['now'])}"
        for item in report.get("disagreements", [])
    ]
    never = (report.get("skipped_ops") or {}).get("never_asked", [])
    items += [f"no forward asked for the skipped op {op}: is it spelled right?" for op in never]
    whole = report.get("megamoe") or {}
    items += [f"MegaMoE: {problem}" for problem in whole.get("problems", [])]
    items += [
        f"MegaMoE record {item['key']} is not used: {item['reason']}" for item in whole.get("rejected", [])
    ]
    items += report.get("warnings", [])
    if not items:
        return _NOTHING
    return tag(
        "section", tag("h2", "To look at"), tag("ul", *[tag("li", item) for item in items]), class_="warn"
    )


def times(report: Report) -> Html:
    """The plot and the table of steps."""
    steps = report.get("steps", [])
    if not steps:
        return _NOTHING
    rows = [
        (
            f"{step['phase']} {step['num_tokens']}",
            _ms(step.get("default_ms")),
            _ms(step.get("tuned_ms")),
            "" if (gain := _speedup(step)) is None else f"{gain:.2f}x",
            join(step.get("source"), tag("div", step["note"], class_="soft") if step.get("note") else None),
            f"{step.get('seconds', 0):.2f}",
        )
        for step in steps
    ]
    head = ("step", "default ms", "tuned ms", "speedup", "source", "seconds")
    return section(
        "Default against tuned",
        _times_plot(steps),
        tag(
            "p",
            "Times are of the tunable op of one layer, measured by this start or an earlier one.",
            class_="soft",
        ),
        table(head, rows, numeric=(1, 2, 3, 5)),
    )


def _times_plot(steps: list[dict[str, Any]]) -> Html:
    by_tokens = sorted(steps, key=lambda step: step["num_tokens"])
    series = []
    for name in ("default", "tuned"):
        points = [(s["num_tokens"], s[f"{name}_ms"]) for s in by_tokens if (s.get(f"{name}_ms") or 0) > 0]
        if points:
            series.append(Series(name, name, points))
    if not series:
        return tag("p", "No times are known: nothing was measured by this start or an earlier one.")
    return plot(series, "tokens at the op")


def winners(report: Report) -> Html:
    """What serves each bucket, op by op."""
    chosen: dict[int, dict[str, str]] = {}
    for step in report.get("steps", []):
        if step.get("winners"):
            chosen.setdefault(step["num_tokens"], {}).update(step["winners"])
    ops = sorted({op for choices in chosen.values() for op in choices})
    if not ops:
        return _NOTHING
    rows = [[tokens, *(plain(chosen[tokens].get(op)) for op in ops)] for tokens in sorted(chosen)]
    note = tag(
        "p", "A forward is served by the first row that is not below its tokens at the op.", class_="soft"
    )
    return section("Winners per op and bucket", note, table(["tokens", *ops], rows))


def megamoe(report: Report) -> Html:
    """MegaMoE's workspaces, one per capacity."""
    value = report.get("megamoe")
    if not value:
        return _NOTHING
    rows: list[tuple[Any, ...]] = []
    points: dict[str, list[tuple[float, float]]] = {"default": [], "tuned": []}
    for capacity, winner in (value.get("winners") or {}).items():
        default_us, time_us = winner.get("default_us"), winner.get("time_us")
        rows.append(
            (
                capacity,
                _ms(default_us and default_us / 1000),
                _ms(time_us and time_us / 1000),
                winner.get("source"),
                plain(winner.get("knobs")),
            )
        )
        for name, time in (("default", default_us), ("tuned", time_us)):
            if time:
                points[name].append((float(capacity), time / 1000))
    series = [Series(name, name, line) for name, line in points.items() if line]
    lists = ("capacities", "winners", "rejected", "problems", "timings")
    facts = {name: item for name, item in value.items() if name not in lists}
    return section(
        "MegaMoE",
        pairs({"capacities": value.get("capacities", []), **facts, **(value.get("timings") or {})}),
        plot(series, "tokens per rank") if series else None,
        table(("capacity", "default ms", "tuned ms", "source", "knobs"), rows, numeric=(0, 1, 2))
        if rows
        else None,
    )


def plan(report: Report) -> Html:
    """The limits of a rank, where each came from, and what follows from them."""
    value = report.get("plan") or {}
    limits = value.get("limits")
    if not limits:
        return _NOTHING
    origins = limits.get("origins", {})
    rows = [
        (name.replace("_", " "), plain(item), origins.get(name, ""))
        for name, item in limits.items()
        if name != "origins"
    ]
    order = " ".join(f"{step['phase']} {step['num_tokens']}," for step in value.get("steps", [])).rstrip(",")
    return section(
        "Plan",
        table(("limit of one rank", "value", "from"), rows),
        join(tag("h3", "Steps in their order"), tag("p", order)) if order else None,
        tag("h3", "MegaMoE capacities per rank"),
        tag("p", plain(value.get("capacities", []))),
    )


def records(report: Report) -> Html:
    """Where records came from, which were refused, and where they are kept."""
    counts = report.get("records")
    if not counts or not _ran(report):
        return _NOTHING
    words = {name: counts.get(name, 0) for name in ("seeded", "user", "given", "tuned")}
    unused = counts.get("unused", [])
    rejected = [
        (item.get("source"), item.get("kind", ""), item.get("reason")) for item in counts.get("rejected", [])
    ]
    seeds = [
        (
            seed["name"],
            "used" if seed.get("used") else "not used",
            tag("div", "; ".join(seed.get("reasons", []))),
        )
        for seed in report.get("seeds", [])
    ]
    return section(
        "Records",
        pairs({**words, "kept at": report.get("cache_path") or "memory only"}),
        join(tag("h3", "Unused"), *[tag("p", item) for item in unused]) if unused else None,
        join(tag("h3", "Rejected"), table(("source", "kind", "reason"), rejected)) if rejected else None,
        join(tag("h3", "Seeds for this model"), table(("seed", "", "why not"), seeds)) if seeds else None,
    )


def ranks(report: Report) -> Html:
    rows = report.get("ranks", [])
    if not rows:
        return _NOTHING
    names = (
        "rank",
        "tp_rank",
        "pp_rank",
        "dp_rank",
        "status",
        "seconds",
        "profiles_tuned",
        "fallbacks",
        "disagreements",
    )
    head = [name.replace("_", " ") for name in names]
    return section(
        "Ranks",
        table(
            head, [[plain(row.get(name)) for name in names] for row in rows], numeric=(0, 1, 2, 3, 5, 6, 7, 8)
        ),
    )


def environment(report: Report) -> Html:
    stamp, engine = report.get("environment") or {}, report.get("engine") or {}
    timings = {f"seconds for {name}": value for name, value in (report.get("timings") or {}).items()}
    skipped = (report.get("skipped_ops") or {}).get("names", [])
    rows = {**stamp, **{k: v for k, v in engine.items() if k != "model"}, "skipped ops": skipped, **timings}
    return section("Environment", pairs(rows)) if stamp or engine else _NOTHING


def document(report: Report) -> Html:
    text = json.dumps(report, indent=2, default=str)
    return tag("section", tag("details", tag("summary", "The whole report as JSON"), tag("pre", text)))


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _speedup(step: Mapping[str, Any]) -> float | None:
    default, tuned = step.get("default_ms"), step.get("tuned_ms")
    return default / tuned if default and tuned else None
