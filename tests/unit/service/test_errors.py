"""The tree of errors is drawn as it is."""

from __future__ import annotations

import inspect
import re

from service import errors


def test_every_error_is_in_the_tree_below_its_base_with_its_status() -> None:
    drawn: dict[str, tuple[str | None, int]] = {}
    above: dict[int, str] = {}
    for line in (errors.__doc__ or "").splitlines():
        found = re.fullmatch(r" {4}((?:[│├└─ ] ?)*)([A-Z]\w+)(?: +(\d{3}))?(?:  .*)?", line)
        if found is None:
            continue
        depth = len(found[1])
        base = above.get(max((each for each in above if each < depth), default=-1))
        above = {each: name for each, name in above.items() if each < depth} | {depth: found[2]}
        # Without a status of its own it has its base's.
        inherited = 500 if base is None else drawn[base][1]
        drawn[found[2]] = base, int(found[3]) if found[3] else inherited
    own = {
        name: (None if name == "ServiceError" else each.__base__.__name__, each.status)
        for name, each in inspect.getmembers(errors, inspect.isclass)
        if each.__module__ == errors.__name__
    }
    assert drawn == own
