"""What is said of a field that does not fit: for a person, and never with the value that was found."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from service.http.parameters import IN_WORDS

_LONGEST = 500
_INSTANT = "expected an instant with its zone, such as 2026-03-01T00:00:00Z"


def place(location: Sequence[Any]) -> str:
    """Where the field is, with dots.

    Parts of a location can be keys that the client made up: kept short, and printable.
    """
    return ".".join(repr(part)[1:-1][:64] if isinstance(part, str) else str(part) for part in location)


def reason(item: Mapping[str, Any], known: Collection[str] = ()) -> str:
    """One of pydantic's errors in words; `known` are the fields that there are."""
    kind, context = item["type"], item.get("ctx", {})
    if kind == "string_pattern_mismatch" and context["pattern"] in IN_WORDS:
        return f"expected {IN_WORDS[context['pattern']]}"
    if kind.startswith(("datetime_", "timezone_")):
        return _INSTANT
    if kind == "extra_forbidden" and known:
        return f"not a parameter; there are: {', '.join(known)}"
    return str(item["msg"])[:_LONGEST]


def describe_error(item: Mapping[str, Any], content_type: str | None) -> dict[str, str]:
    """A line about one field of a request that FastAPI refused, as `field` and `reason`."""
    location = list(item["loc"])
    if item["type"] == "json_invalid" and isinstance(location[-1], int):
        # FastAPI puts the position where a field's name would be.
        at = location.pop()
        return {
            "field": place(location),
            "reason": f"not JSON at character {at}: {item.get('ctx', {}).get('error', 'unreadable')}",
        }
    if item["type"] in ("model_attributes_type", "dict_type") and location == ["body"]:
        if content_type is not None and content_type.lower().startswith("application/json"):
            return {"field": "body", "reason": "expected a JSON object"}
        found = "none" if content_type is None else ascii(content_type[:64])[1:-1]
        expected = "a JSON object and the header Content-Type: application/json"
        return {"field": "body", "reason": f"expected {expected}, found Content-Type: {found}"}
    return {"field": place(location), "reason": reason(item)}


Body = TypeVar("Body", bound=BaseModel)


def parse(kind: type[Body], found: bytes | dict[str, Any], *where: str) -> Body:
    """JSON bytes, or what was read from them, as `kind`; `where` in the body it was found.

    Raises:
        RequestValidationError: it does not fit.
    """
    try:
        return kind.model_validate_json(found) if isinstance(found, bytes) else kind.model_validate(found)
    except ValidationError as error:
        entries = error.errors(include_input=False, include_url=False)
        # Here it is known what the fields are, which those who hear of one that is none want to know.
        raise RequestValidationError(
            [
                {**entry, "loc": ("body", *where, *entry["loc"]), "msg": reason(entry, kind.model_fields)}
                for entry in entries
            ]
        ) from None
