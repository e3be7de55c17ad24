"""`Prefer: wait=N` (RFC 7240): for how long a client would rather wait than be told where to look."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Preferences are separated by commas, a preference's parameters follow it after semicolons.
_WAIT = re.compile(r'\s*wait\s*=\s*"?(\d{1,9})"?\s*(?:;.*)?', re.IGNORECASE)


def preferred_wait(headers: Iterable[str], longest: int) -> int | None:
    """Seconds to wait, at most `longest`; None without such a preference.

    The first one counts, and one that cannot be read is as good as none (RFC 7240, section 2).
    """
    for header in headers:
        for preference in header.split(","):
            if found := _WAIT.fullmatch(preference):
                return min(int(found[1]), longest)
    return None
