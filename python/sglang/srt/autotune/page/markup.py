"""HTML as a type of its own: text becomes HTML only by being escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def escaped(value: Any) -> Html:
    """``value`` as HTML: unchanged when it is HTML, escaped otherwise; None is nothing."""
    if isinstance(value, Html):
        return value
    return Html("" if value is None else html.escape(str(value), quote=True))


def join(*parts: Any) -> Html:
    return Html("".join(escaped(part) for part in parts))


def tag(name: str, *children: Any, **attributes: Any) -> Html:
    """An element; ``class_`` stands for ``class`` and ``_`` for ``-``. Attributes that are None are left out."""
    text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{text}>{join(*children)}</{name}>")


def section(title: str, *children: Any) -> Html:
    return tag("section", tag("h2", title), *children)


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], numeric: Sequence[int] = ()) -> Html:
    """A table that scrolls sideways on a narrow screen; ``numeric`` columns are set to the right."""

    def cells(name: str, values: Sequence[Any]) -> list[Html]:
        return [
            tag(name, value, class_="number" if index in numeric else None)
            for index, value in enumerate(values)
        ]

    body = [tag("tr", *cells("td", row)) for row in rows]
    whole = tag("table", tag("thead", tag("tr", *cells("th", head))), tag("tbody", *body))
    return tag("div", whole, class_="scroll")


def pairs(values: Mapping[str, Any]) -> Html:
    """Names and values below each other."""
    items = [join(tag("dt", name), tag("dd", plain(value))) for name, value in values.items()]
    return tag("dl", *items)


def plain(value: Any) -> Html:
    """A JSON value in a cell: lists with spaces, objects as ``name value``, None as a dash."""
    if isinstance(value, Html):
        return value
    if value is None or value == "" or value == [] or value == {}:
        return Html("–")
    if isinstance(value, bool):
        return Html("yes" if value else "no")
    if isinstance(value, float):
        return escaped(f"{value:.4g}")
    if isinstance(value, Mapping):
        return escaped(", ".join(f"{name} {_text(item)}" for name, item in value.items()))
    if isinstance(value, (list, tuple)):
        return escaped(" ".join(_text(item) for item in value))
    return escaped(value)


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{name} {_text(item)}" for name, item in value.items()) + ")"
    if isinstance(value, (list, tuple)):
        return "(" + " ".join(_text(item) for item in value) + ")"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
