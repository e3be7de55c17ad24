r"""Find the patient in a file's name, by an expression of a task or of a hospital's policy.

Expressions and names come from different people, and a name is matched in the API, in the worker and at every
hospital of a federation. So expressions are those of RE2, which matches in time linear in the name's length:
it has no lookaround, no backreference and no possessive quantifier. Where alternatives have the patient at
different places, each has a group of its own: `(?P<patient>…)`, `(?P<patient_2>…)`, and so on.

As in Python, \w matches letters and digits of every script, \d digits of every script, and \Z the end.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Annotated, Any

import re2
from pydantic import AfterValidator

GROUP = "patient"
_FURTHER = re.compile(rf"{GROUP}_[0-9]+")
# An escape, or a class with the escapes in it
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|\[:[a-z^]{1,9}:\]|[^\]\\])*", re.DOTALL)
_ESCAPE = re.compile(r"\\.", re.DOTALL)
# RE2's own are ASCII only.
_EVERYWHERE = {r"\d": r"\p{Nd}", r"\D": r"\P{Nd}", r"\Z": r"\z"}
_OUTSIDE_CLASSES = {r"\w": r"[\pL\pN_]", r"\W": r"[^\pL\pN_]"}
_INSIDE_CLASSES = {r"\w": r"\pL\pN_"}
_OPTIONS = re2.Options()
_OPTIONS.log_errors = False


def _in_every_script(pattern: str) -> str:
    """Replace Python's classes of characters by those of RE2. Raises ValueError for `[\\W]`."""

    def replaced(token: re.Match[str]) -> str:
        if token[0].startswith("["):
            return _ESCAPE.sub(inside, token[0])
        return (_EVERYWHERE | _OUTSIDE_CLASSES).get(token[0], token[0])

    def inside(escape: re.Match[str]) -> str:
        if escape[0] == r"\W":
            raise ValueError(
                r"\W is not known inside […]: write \PL for what is no letter, \PN for no number"
            )
        return (_EVERYWHERE | _INSIDE_CLASSES).get(escape[0], escape[0])

    return _TOKEN.sub(replaced, pattern)


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> tuple[Any, tuple[str, ...]]:
    """Compile an expression; the second is its groups for the patient, in order. Raises ValueError."""
    try:
        found = re2.compile(_in_every_script(pattern), _OPTIONS)
    except re2.error as error:
        said = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else str(error)
        raise ValueError(
            f"not a regular expression of RE2: {said}. Lookarounds (?=…), (?!…), (?<=…), (?<!…) and "
            "backreferences \\1, (?P=…) are not known: write what surrounds the patient outside of the "
            f"group, as in ^(?P<{GROUP}>[0-9]+)_[0-9]+$; alternatives with different surroundings have "
            f"groups {GROUP}, {GROUP}_2, {GROUP}_3"
        ) from error
    groups = found.groupindex
    if GROUP not in groups:
        raise ValueError(f"the expression needs a group named '{GROUP}': (?P<{GROUP}>…)")
    return found, tuple(sorted((g for g in groups if g == GROUP or _FURTHER.fullmatch(g)), key=groups.get))


def _checked(pattern: str) -> str:
    _compiled(pattern)
    return pattern


# An expression with a group `patient`.
PatientPattern = Annotated[str, AfterValidator(_checked)]


def patient_in(pattern: str, stem: str) -> str | None:
    """Find the patient in a file's name without suffix: the first group for it that is not empty."""
    compiled, groups = _compiled(pattern)
    found = compiled.search(stem)
    return None if found is None else next((found[group] for group in groups if found[group]), None)
