"""The operations of the API, as its routes declare them."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Annotated, Any, get_args

from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from service import routes

Operation = tuple[str, str]
"""A method, and a path as openapi.yaml has it."""


def every_route() -> list[APIRoute]:
    """The routes of every module, those that the description leaves out included."""
    modules = [import_module(f"service.routes.{module.name}") for module in iter_modules(routes.__path__)]
    routers = [getattr(module, "router", APIRouter()) for module in modules]
    return [route for router in routers for route in router.routes if isinstance(route, APIRoute)]


@cache
def operations() -> dict[Operation, APIRoute]:
    """Every operation that the description has, with its route, in the order of their paths."""
    described = [route for route in every_route() if route.include_in_schema]
    found = {(method, route.path_format): route for route in described for method in route.methods}
    return dict(sorted(found.items(), key=lambda each: (each[0][1], each[0][0])))


def plain_body(route: APIRoute) -> dict[str, Any] | None:
    """A JSON body that the route accepts, by the types of what it requires; None where it requires none."""
    if route.body_field is None or not route.body_field.field_info.is_required():
        return None
    body = route.body_field.field_info.annotation
    assert isinstance(body, type)
    assert issubclass(body, BaseModel)
    return _plain(body)


def _plain(model: type[BaseModel]) -> dict[str, Any]:
    return {name: _accepted(field) for name, field in model.model_fields.items() if field.is_required()}


def _accepted(field: FieldInfo) -> Any:
    """The first of some plain values that the field accepts."""
    kind = field.annotation
    nested = [_plain(kind)] if isinstance(kind, type) and issubclass(kind, BaseModel) else []
    given = TypeAdapter(Annotated[kind, field])
    for value in ("north", "1.2", "c" * 32, 1, False, *get_args(kind), *nested):
        with suppress(ValidationError):
            given.validate_python(value)
            return value
    raise AssertionError(f"no plain value is a {field!r}: state a body in the test")
