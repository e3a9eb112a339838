"""Reading a request's body: JSON into a struct, and a clear refusal of everything else.

A parameter that this server does not have is refused by name when it asks for something, since leaving it out would
change the answer without a word. Fields that nobody knows are ignored, as other servers do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from sglang.srt.entrypoints.openai.errors import ApiError

T = TypeVar("T")

Unbuilt = Mapping[str, tuple[Any, ...]]
"""Names of parameters that are not built, with the values that ask for nothing."""


def parse_body(body: bytes, kind: type[T], unbuilt: Unbuilt) -> T:
    """`body` as a `kind`; raises `ApiError` 400 that names the field at fault."""
    if not body.strip():
        raise ApiError(400, "the request has no body: send a JSON object")
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the request body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the request body is nested too deeply", code="invalid_json") from None
    return parse_fields(fields, kind, unbuilt)


def parse_fields(fields: Any, kind: type[T], unbuilt: Unbuilt) -> T:
    """`parse_body` for what is decoded already; anything but an object with string keys is refused."""
    if not isinstance(fields, dict):
        raise ApiError(400, "the request body must be a JSON object")
    for name in fields.keys() & unbuilt.keys():
        if fields[name] not in unbuilt[name]:
            raise ApiError(400, f"{name} is not supported by this server", param=name)
    fields = {name: value for name, value in fields.items() if name not in unbuilt}
    try:
        return msgspec.convert(fields, kind, str_keys=True)
    except msgspec.ValidationError as error:
        named = re.search(r"`\$\.(\w+)", str(error)) or re.search(r"field `(\w+)`", str(error))
        raise ApiError(400, str(error), param=named.group(1) if named else None) from None
    except RecursionError:
        raise ApiError(400, "the request body is nested too deeply", code="invalid_json") from None


def or_default(value: T | None, default: T) -> T:
    """`default` where a client sent null or nothing."""
    return default if value is None else value
