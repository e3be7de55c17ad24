"""Patterns of ids and texts, and the reason given for a value that does not fit.

A reason is written for a person and never repeats the value: it can be large, or a patient's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, StringConstraints, ValidationError

from service.errors import RequestInvalid, SettingsInvalid

HOSPITAL_ID = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"
MODEL_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$"
_NAME, _DIGEST = MODEL_NAME[1:-1], "sha256:[0-9a-f]{64}"
VERSION = rf"^({_DIGEST}|{_NAME}@({_DIGEST}|[1-9][0-9]{{0,8}}))$"

DIGEST = rf"^{_DIGEST}$"

COHORT_ID = r"^[0-9a-f]{32}$"
JOB_ID = r"^[0-9a-f]{32}$"
# PS3.5 9.1; leading zeros are accepted, because scanners write them.
DICOM_UID = r"^[0-9]+(\.[0-9]+)*$"
# The number of a series, its UID, or the end of its UID from a dot on.
DICOM_SERIES = r"^\.?[0-9]+(\.[0-9]+)*$"

# A path prefix, of LOCUM_ROOT_PATH and X-Forwarded-Prefix: two slashes at its beginning would name a host.
PREFIX_PATTERN = r"^(/[A-Za-z0-9._~-]+)*$"

# PostgreSQL keeps no NUL, and a log no other control character; a reason may have lines and tabs.
# Nothing that turns a text's direction, so that it reads as what it is.
PRINTABLE = r"^[^\x00-\x1f\x7f\u202a-\u202e\u2066-\u2069]+$"
PRINTABLE_LINES = r"^[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u202a-\u202e\u2066-\u2069]+$"

# The actor `key:<name>@<hospital>` has at most 200 characters in tables.
KeyName = Annotated[
    str, StringConstraints(strip_whitespace=True, min_length=1, max_length=130, pattern=PRINTABLE)
]

# The expectation in words, in place of the pattern.
IN_WORDS = {
    HOSPITAL_ID: "letters, digits, `-` and `_`, 64 at most, of which the first is a letter or a digit",
    MODEL_NAME: "a model's name: letters, digits, `-`, `_` and `.`, 128 at most, without a version",
    DIGEST: "sha256: and 64 hexadecimal digits",
    VERSION: "a number, sha256:… or name@3",
    PRINTABLE: "a text without control characters",
    PRINTABLE_LINES: "a text without control characters other than line breaks and tabs",
    COHORT_ID: "the id that POST answered: 32 digits of 0-9 and a-f",
    DICOM_UID: "a DICOM UID: numbers with dots between them",
    DICOM_SERIES: "the number of a DICOM series, its UID, or the end of its UID from a dot on (`.12.3`)",
}

MOST_ENTRIES = 20
"""As many fields of one request are reported."""

_LONGEST = 500
_INSTANT = "expected an instant with its zone, such as 2026-03-01T00:00:00Z"


def place(location: Sequence[Any]) -> str:
    """The path of a field, with dots.

    Parts of a location can be keys that the client made up: they are shortened, and made printable.
    """
    return ".".join(repr(part)[1:-1][:64] if isinstance(part, str) else str(part) for part in location)


def reason(item: Mapping[str, Any], known: Collection[str] = ()) -> str:
    """One of pydantic's errors in words; `known` are the names of the fields that exist."""
    kind, context = item["type"], item.get("ctx", {})
    if kind == "string_pattern_mismatch" and context["pattern"] in IN_WORDS:
        return f"expected {IN_WORDS[context['pattern']]}"
    if kind.startswith(("datetime_", "timezone_")):
        return _INSTANT
    if kind == "extra_forbidden" and known:
        return f"not a parameter; there are: {', '.join(known)}"[:_LONGEST]
    return str(item["msg"])[:_LONGEST]


Body = TypeVar("Body", bound=BaseModel)


def parse(kind: type[Body], found: bytes | dict[str, Any], *where: str) -> Body:
    """Validate JSON bytes, or decoded JSON, as `kind`; `where` is its path in the request's body.

    Raises:
        RequestInvalid: it does not fit.
    """
    try:
        return kind.model_validate_json(found) if isinstance(found, bytes) else kind.model_validate(found)
    except ValidationError as error:
        raise RequestInvalid(
            [
                {"field": place(("body", *where, *item["loc"])), "reason": reason(item, kind.model_fields)}
                for item in error.errors(include_input=False, include_url=False)[:MOST_ENTRIES]
            ]
        ) from None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_yaml(path: Path, kind: type[Body]) -> Body:
    """Read a file of settings. Raises SettingsInvalid, which names every wrong field without its value."""
    try:
        return kind.model_validate(yaml.safe_load(path.read_text()))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsInvalid(f"{path} cannot be read ({type(error).__name__})") from error
    except yaml.YAMLError:
        raise SettingsInvalid(f"{path} is not YAML") from None
    except ValidationError as error:
        wrong = [
            f"{place(item['loc'])}: {reason(item)}" if item["loc"] else reason(item)
            for item in error.errors(include_input=False, include_url=False)
        ]
        raise SettingsInvalid(f"{path}: {'; '.join(wrong)}") from None
