"""What a query may ask: a misspelt parameter is refused, where the framework would pass over it.

`?hopsital=north` would list every hospital's jobs, and `?At=2026-03-01T00:00:00Z` say what serves now.
"""

from __future__ import annotations

from fastapi import Request
from fastapi.dependencies.models import Dependant

from service.http.problems import invalid
from service.http.validation import place


async def known_parameters(request: Request) -> None:
    """A dependency of every route but those for machines that watch.

    Raises:
        Problem: 422 for a parameter of the query that the route does not take.
    """
    known = sorted(_taken(request.scope["route"].dependant))
    unknown = [name for name in dict.fromkeys(request.query_params) if name not in known]
    if not unknown:
        return
    there = f"there are: {', '.join(known)}" if known else "this path takes none"
    raise invalid(
        [{"field": place(("query", name)), "reason": f"not a parameter; {there}"} for name in unknown[:20]]
    )


def _taken(dependant: Dependant) -> set[str]:
    own = {field.alias for field in dependant.query_params}
    return own.union(*(_taken(below) for below in dependant.dependencies))
