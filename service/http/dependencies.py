"""What a query may ask: a misspelt parameter is refused, where the framework would pass over it.

`?hopsital=north` would list every hospital's jobs, and `?At=2026-03-01T00:00:00Z` say what serves now.
"""

from __future__ import annotations

from fastapi import Request
from fastapi.dependencies.models import Dependant

from service.errors import RequestInvalid
from service.validation import MOST_ENTRIES, place


async def known_parameters(request: Request) -> None:
    """A dependency of every route but those for machines that watch.

    Raises:
        RequestInvalid: the query has a parameter that the route does not take.
    """
    known = sorted(_taken(request.scope["route"].dependant))
    unknown = [name for name in dict.fromkeys(request.query_params) if name not in known]
    if not unknown:
        return
    there = f"there are: {', '.join(known)}" if known else "this path takes none"
    raise RequestInvalid(
        [
            {"field": place(("query", name)), "reason": f"not a parameter; {there}"}
            for name in unknown[:MOST_ENTRIES]
        ]
    )


def _taken(dependant: Dependant) -> set[str]:
    own = {field.alias for field in dependant.query_params}
    return own.union(*(_taken(below) for below in dependant.dependencies))
