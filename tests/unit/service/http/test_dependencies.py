"""Every route takes its caller, and gets the service's parts as that caller may see them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

import pytest
import yaml
from fastapi import APIRouter, Depends
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from fastapi.security import SecurityScopes

from service.database import ANONYMOUS, Caller
from service.errors import RoleMissing
from service.http.dependencies import AsPublic, caller, context_of
from service.openapi import description
from tests.helpers.service.routes import every_route, operations


def taken(dependant: Dependant) -> Iterator[object]:
    for below in dependant.dependencies:
        yield below.call
        yield from taken(below)


def routes_of(router: APIRouter) -> list[APIRoute]:
    return [route for route in router.routes if isinstance(route, APIRoute)]


def without_caller(routes: Iterable[APIRoute]) -> list[str]:
    """The paths that are answered without asking who the caller is."""
    return [route.path for route in routes if caller not in taken(route.dependant)]


def test_every_route_depends_on_the_caller() -> None:
    paths = yaml.safe_load(description())["paths"]
    described = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert set(operations()) == described
    # The page's own files, which a person needs to sign in.
    assert without_caller(every_route()) == ["/", "/page/{name}"]


def test_route_without_a_caller_is_detected() -> None:
    router = APIRouter()

    @router.get("/bare")
    def bare() -> None: ...

    @router.get("/by-context")
    def by_context(context: AsPublic) -> None: ...

    @router.get("/by-dependency", dependencies=[Depends(caller)])
    def by_dependency() -> None: ...

    assert without_caller(routes_of(router)) == ["/bare"]


def test_missing_role_is_named_with_what_to_do() -> None:
    reader = Caller("key:node", frozenset({"reader"}), None)
    required = SecurityScopes(["operator", "federation"])
    with pytest.raises(RoleMissing) as refused:
        asyncio.run(context_of(required, None, reader, None))  # type: ignore[arg-type]
    assert str(refused.value) == (
        "this needs the role operator or federation; key:node has reader: ask an admin for a key "
        "with that role"
    )


@pytest.mark.parametrize("hospital", [None, "north", "nowhere"])
def test_anonymous_caller_sees_every_hospital(hospital: str | None) -> None:
    assert ANONYMOUS.sees(hospital)
    assert ANONYMOUS.roles == {"reader", "operator", "approver", "admin", "federation"}
