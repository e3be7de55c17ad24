"""Optimistic locking over HTTP: an entity tag is the sequence of the entry in force, `"0"` before the first.

A change must name the entry that it replaces: `If-Match: "3"`, or for the first one `If-Match: "0"` or
`If-None-Match: *`. It is rejected without either (428) and with an outdated tag (412), so that two people
who decide at once do not overwrite each other unseen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from service.http.problems import Problem

# As much of a header as is shown again.
_LONGEST = 80
_TAG = re.compile(r'(W/)?"([^"]*)"')


def entity_tag(sequence: int) -> str:
    """The tag of a state of the log."""
    return f'"{sequence}"'


def expected_sequence(current: int, if_match: str | None, if_none_match: str | None = None) -> int:
    """The sequence that the caller agrees to replace, which is `current`.

    Raises:
        Problem: 428 without a condition, 400 for one that is not an entity tag, 412 when it does not hold.
    """
    if if_match is None and if_none_match is None:
        raise Problem(
            428,
            "precondition-required",
            "Say what you mean to replace",
            f"Expected If-Match with the ETag that GET gave (it is {entity_tag(current)} now), or "
            "If-None-Match: * for a first assignment; found neither.",
            headers={"ETag": entity_tag(current)},
        )
    holds = True
    if if_match is not None:
        holds = current > 0 if if_match.strip() == "*" else entity_tag(current) in _strong_tags(if_match)
    if if_none_match is not None:
        if if_none_match.strip() != "*":
            raise _malformed("If-None-Match", "*, for a first assignment", if_none_match)
        holds = holds and current == 0
    if not holds:
        raise Problem(
            412,
            "assignment-stale",
            "Another change came first",
            f"The state in force is {entity_tag(current)}, which is not what the request was made for "
            f"({_shown(if_match, if_none_match)}): look at it, then decide again.",
            headers={"ETag": entity_tag(current)},
            current=current,
        )
    return current


def matcher(if_match: str) -> Callable[[str], bool]:
    """Whether `If-Match` names a tag, given without its quotes. Raises Problem 400 for a malformed header."""
    if if_match.strip() == "*":
        return bool
    tags = _strong_tags(if_match)
    return lambda tag: f'"{tag}"' in tags


def _strong_tags(header: str) -> set[str]:
    # A weak tag never equals a strong one (RFC 9110, 13.1.1), so it is parsed and ignored.
    parts = [part.strip() for part in header.split(",")]
    if not all(_TAG.fullmatch(part) for part in parts):
        raise _malformed("If-Match", "the ETag that GET gave, quotes included, or *", header)
    return {part for part in parts if not part.startswith("W/")}


def _malformed(name: str, expected: str, found: str) -> Problem:
    return Problem(
        400,
        "malformed-precondition",
        "Not an entity tag",
        f"{name}: expected {expected}; found {found[:_LONGEST]!r}.",
    )


def _shown(if_match: str | None, if_none_match: str | None) -> str:
    found = {"If-Match": if_match, "If-None-Match": if_none_match}
    return ", ".join(
        f"{name}: {ascii(value[:_LONGEST])[1:-1]}" for name, value in found.items() if value is not None
    )


# Preferences are separated by commas, a preference's parameters follow it after semicolons.
_WAIT = re.compile(r'\s*wait\s*=\s*"?(\d{1,9})"?\s*(?:;.*)?', re.IGNORECASE)


def prefers_async(headers: Iterable[str]) -> bool:
    """Whether a client prefers a job to an answer at once: `respond-async` (RFC 7240, section 4.1)."""
    names = (each.partition(";")[0].strip().lower() for header in headers for each in header.split(","))
    return "respond-async" in names


def preferred_wait(headers: Iterable[str], longest: int) -> int | None:
    """Seconds to wait, at most `longest`; None without such a preference.

    The first one counts, and one that cannot be read is as good as none (RFC 7240, section 2).
    """
    for header in headers:
        for preference in header.split(","):
            if found := _WAIT.fullmatch(preference):
                return min(int(found[1]), longest)
    return None
