"""How a command-line flag is declared once and read everywhere.

A flag is a dataclass field made by `flag(...)`: its default, help, group, other spellings and rules travel in the
field's metadata, so that the parser, the validation and `docs/cli.md` cannot drift apart.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

_META_KEY = "flag"
_NUMBER = re.compile(r"^-\d+(\.\d*)?$")


@dataclass(frozen=True)
class FlagSpec:
    """What a flag is beside its name and default.

    `parse` turns the text of one argument into a value (`None` marks a switch without an argument); `nargs` is
    argparse's. `choices`, `minimum` and `maximum` are checked whether the value came from the command line or not.
    """

    help: str
    group: str
    parse: Callable[[str], Any] | None
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] | None = None
    minimum: float | None = None
    maximum: float | None = None
    nargs: str | None = None
    metavar: str | None = None
    default_text: str | None = None


def flag(
    default: Any,
    help: str,
    *,
    group: str,
    parse: Callable[[str], Any] | None = str,
    **spec: Any,
) -> Any:
    """Declare a dataclass field as a flag; a `list` default is copied for every instance."""
    metadata = {_META_KEY: FlagSpec(help=help, group=group, parse=parse, **spec)}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def flag_fields(cls: type) -> list[tuple[dataclasses.Field[Any], FlagSpec]]:
    """The flags of dataclass `cls`, in declaration order."""
    return [
        (field, field.metadata[_META_KEY]) for field in dataclasses.fields(cls) if _META_KEY in field.metadata
    ]


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def flag_default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def check_flag_values(instance: Any) -> None:
    """Raise `ValueError` for the first flag whose value is outside its choices or bounds."""
    for field, spec in flag_fields(type(instance)):
        value = getattr(instance, field.name)
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if item is not None:
                _check_one(flag_name(field.name), spec, item)


def _check_one(name: str, spec: FlagSpec, value: Any) -> None:
    if spec.choices is not None and value not in spec.choices:
        raise ValueError(f"{name} must be one of {', '.join(spec.choices)} (got {value!r})")
    if spec.minimum is None and spec.maximum is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} must be a number (got {value!r})")
    if spec.minimum is not None and value < spec.minimum:
        raise ValueError(f"{name} must be at least {_text(spec.minimum)} (got {_text(value)})")
    if spec.maximum is not None and value > spec.maximum:
        raise ValueError(f"{name} must be at most {_text(spec.maximum)} (got {_text(value)})")


def _text(value: float) -> str:
    """A number as it was given, without the exponent that ``g`` writes for a large integer."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def add_flags(parser: argparse.ArgumentParser, cls: type) -> None:
    """Add every flag of dataclass `cls`. Flags that are not given are absent from the namespace."""
    groups: dict[str, Any] = {}
    for field, spec in flag_fields(cls):
        group = groups.get(spec.group) or groups.setdefault(spec.group, parser.add_argument_group(spec.group))
        names = [flag_name(field.name), *spec.aliases]
        options: dict[str, Any] = {
            "dest": field.name,
            "default": argparse.SUPPRESS,
            "help": help_text(field, spec),
        }
        if spec.parse is None:
            group.add_argument(*names, action="store_true", **options)
            continue
        if spec.nargs is not None:
            options.update(nargs=spec.nargs, action="extend")
        metavar = spec.metavar or (None if spec.choices else _METAVARS.get(spec.parse, "TEXT"))
        group.add_argument(*names, type=spec.parse, choices=spec.choices, metavar=metavar, **options)


def help_text(field: dataclasses.Field[Any], spec: FlagSpec) -> str:
    """The help line with its default, percent signs escaped for argparse."""
    text = spec.help.replace("%", "%%")
    default = default_text(field, spec)
    return f"{text} Default: {default}." if default else text


def default_text(field: dataclasses.Field[Any], spec: FlagSpec) -> str:
    """The default in words; empty when it says nothing (switches, unset values)."""
    if spec.default_text is not None:
        return spec.default_text
    default = flag_default(field)
    if isinstance(default, float):
        return f"{default:g}"
    return "" if spec.parse is None or default is None or default == [] else str(default)


class FlagParser(argparse.ArgumentParser):
    """An argument parser whose errors are `ValueError`, with the nearest flag suggested for an unknown one."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))

    def parse_strictly(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse `argv`; raise `ValueError` for anything that is not one of this parser's flags."""
        namespace, extra = self.parse_known_args(list(argv))
        for token in extra:
            if token.startswith("-") and not _NUMBER.match(token):
                raise ValueError(self._unknown_flag(token.split("=", 1)[0]))
        if extra:
            raise ValueError(
                f"unexpected argument {extra[0]!r}: every option is given as --flag value (see --help)"
            )
        return namespace

    def _unknown_flag(self, name: str) -> str:
        known = [option for action in self._actions for option in action.option_strings]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
        hint = f": did you mean {near[0]}?" if near else ": see --help for the flags there are"
        return f"unknown flag {name}{hint}"


def integer(text: str) -> int:
    return int(text)


def number(text: str) -> float:
    return float(text)


_METAVARS: dict[Callable[[str], Any], str] = {integer: "N", number: "X"}
