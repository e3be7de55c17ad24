"""The operations of the API, as its routes declare them."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from fastapi import APIRouter
from fastapi.routing import APIRoute

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
