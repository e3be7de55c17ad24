"""Read JSON into frozen dataclasses.

The contract may only grow: members that a class does not name are ignored, and a member with a default may be
absent. What a class requires and the answer lacks, or has in another form, is an AnswerInvalid with its path.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from datetime import datetime
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from locum.errors import AnswerInvalid

T = TypeVar("T")

RAW = "raw"
"""A field of this name receives the whole JSON object, for members that are newer than this client."""


def read(kind: type[T], value: object) -> T:
    """Read a value of a dataclass. Raises AnswerInvalid."""
    found: T = _read(kind, value, kind.__name__)
    return found


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


def _read(kind: Any, value: Any, path: str) -> Any:
    if kind is Any:
        return value
    if is_dataclass(kind):
        return _object(kind, value, path)
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        # Every union of an answer is with None.
        return None if value is None else _read(next(p for p in parts if p is not type(None)), value, path)
    if origin is tuple:
        items = _checked(list, value, path)
        return tuple(_read(parts[0], item, f"{path}[{index}]") for index, item in enumerate(items))
    if origin is dict:
        members = _checked(dict, value, path)
        return {name: _read(parts[1], item, f"{path}.{name}") for name, item in members.items()}
    if kind is datetime:
        try:
            return datetime.fromisoformat(_checked(str, value, path))
        except ValueError:
            raise AnswerInvalid(f"{path}: expected an instant, found {value!r:.80}") from None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise AnswerInvalid(f"{path}: expected a number, found one beyond all floats") from None
    return _checked(kind, value, path)


def _object(kind: Any, value: Any, path: str) -> Any:
    members: Mapping[str, Any] = _checked(dict, value, path)
    given: dict[str, Any] = {}
    for each in fields(kind):
        if not each.init:
            continue
        if each.name == RAW:
            given[RAW] = members
        elif each.name in members:
            given[each.name] = _read(_hints(kind)[each.name], members[each.name], f"{path}.{each.name}")
        elif each.default is MISSING and each.default_factory is MISSING:
            raise AnswerInvalid(
                f"{path}: expected a member '{each.name}', found {', '.join(members) or 'none'}: is this the "
                "address of Locum's service, and is the client as new as the service?"
            )
    return kind(**given)


def _checked(kind: type[T], value: Any, path: str) -> T:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise AnswerInvalid(f"{path}: expected {kind.__name__}, found {value!r:.80}")
    return value
