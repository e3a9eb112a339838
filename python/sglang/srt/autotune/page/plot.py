"""Default against tuned over token counts, drawn as SVG on logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sglang.srt.autotune.page.markup import Html, tag

WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 92, 30, 52
_MANTISSAS = (1, 2, 5)


@dataclass(frozen=True)
class Series:
    """``points`` are ``(num_tokens, ms)``, all positive, by token count; ``slug`` is its class in the style sheet."""

    name: str
    slug: str
    points: Sequence[tuple[float, float]]


class _Axis:
    """A logarithmic scale from values to pixels."""

    def __init__(self, low: float, high: float, begin_px: float, end_px: float) -> None:
        self._low, self._span = math.log(low), math.log(high / low)
        self._begin_px, self._length_px = begin_px, end_px - begin_px

    def __call__(self, value: float) -> float:
        return self._begin_px + self._length_px * (math.log(value) - self._low) / self._span


def plot(series: Sequence[Series], x_label: str) -> Html:
    """The chart; every point has its values as a tooltip."""
    tokens = [x for one in series for x, _ in one.points]
    times = [y for one in series for _, y in one.points]
    assert tokens and min(tokens) > 0 and min(times) > 0, "a logarithmic axis has no place for zero"
    x_axis = _Axis(*_widened(min(tokens), max(tokens), 1.15), LEFT, WIDTH - RIGHT)
    y_axis = _Axis(*_widened(min(times), max(times), 1.35), HEIGHT - BOTTOM, TOP)
    parts = [*_grid(x_axis, y_axis, tokens, times, x_label)]
    labels = _spread([y_axis(one.points[-1][1]) for one in series])
    for one, label_y in zip(series, labels, strict=True):
        parts += _line(one, x_axis, y_axis, label_y)
    return tag(
        "svg",
        *parts,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=f"Milliseconds of one layer's MoE over {x_label}, default and tuned",
    )


def _widened(low: float, high: float, factor: float) -> tuple[float, float]:
    return low / factor, high * factor


def _spread(positions: list[float], gap_px: float = 15.0) -> list[float]:
    """Label positions near the wanted ones that do not overlap."""
    order = sorted(range(len(positions)), key=positions.__getitem__)
    placed = list(positions)
    for before, after in zip(order, order[1:], strict=False):
        placed[after] = max(placed[after], placed[before] + gap_px)
    return placed


def _grid(x_axis: _Axis, y_axis: _Axis, tokens: list[float], times: list[float], x_label: str) -> list[Html]:
    parts = []
    for value in token_ticks(min(tokens), max(tokens)):
        at = _px(x_axis(value))
        parts.append(tag("line", x1=at, x2=at, y1=TOP, y2=HEIGHT - BOTTOM, class_="grid"))
        parts.append(tag("text", f"{value:g}", x=at, y=HEIGHT - BOTTOM + 20, class_="tick middle"))
    for time in time_ticks(*_widened(min(times), max(times), 1.35)):
        at = _px(y_axis(time))
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, class_="grid"))
        parts.append(tag("text", f"{time:g}", x=LEFT - 8, y=_px(y_axis(time) + 4), class_="tick end"))
    parts.append(tag("text", x_label, x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 6, class_="axis middle"))
    parts.append(tag("text", "ms", x=LEFT - 8, y=16, class_="axis end"))
    return parts


def _line(one: Series, x_axis: _Axis, y_axis: _Axis, label_y: float) -> list[Html]:
    places = [(x_axis(x), y_axis(y)) for x, y in one.points]
    path = " ".join(f"{_px(x)},{_px(y)}" for x, y in places)
    parts = [tag("polyline", points=path, class_=f"line {one.slug}")]
    for (x, y), (tokens, time) in zip(places, one.points, strict=True):
        tip = tag("title", f"{one.name}, {tokens:g} tokens: {time:.4g} ms")
        parts.append(tag("circle", tip, cx=_px(x), cy=_px(y), r=3.5, class_=f"dot {one.slug}"))
    end_x, _ = places[-1]
    parts.append(
        tag("text", one.name, x=_px(end_x + 9), y=_px(label_y + 4), class_=f"label {one.slug}"),
    )
    return parts


def token_ticks(low: float, high: float) -> list[int]:
    """Powers of two within the range, thinned to ten at most."""
    powers = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
    stride = max(1, -(-len(powers) // 10))
    return [2**power for power in powers][::stride]


def time_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of every decade within the range; decades alone where that would be many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [mantissa * 10.0**decade for decade in decades for mantissa in _MANTISSAS]
    inside = [tick for tick in ticks if low <= tick <= high]
    if len(inside) > 8:
        inside = [tick for tick in inside if math.log10(tick) == round(math.log10(tick))]
    return [float(f"{tick:.6g}") for tick in inside]


def _px(value: float) -> str:
    return f"{value:.1f}"
