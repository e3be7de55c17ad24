"""Sentences for what pydantic found wrong in a file that a person wrote."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

# `normalization` and `normalisation` are at 0.92, `rounds` and `round` at 0.91, `lr` and `rounds` at 0.25.
_ALIKE = 0.7


def misfits(model: type[BaseModel], error: ValidationError, *, values: bool = False) -> list[str]:
    """Say of each wrong field what is wrong with it; of an unknown one, the most similar field.

    Args:
        model: that was validated.
        error: of the validation.
        values: whether a sentence shows the value that was found.
    """
    found = []
    for each in error.errors():
        place = ".".join(map(str, each["loc"])) or "the whole"
        if each["type"] == "extra_forbidden":
            name = str(each["loc"][-1])
            alike = get_close_matches(name, _fields_beside(model, each["loc"]), n=1, cutoff=_ALIKE)
            hint = f"; did you mean '{alike[0]}'?" if alike else ""
            found.append(f"{place}: there is no such field{hint}")
        else:
            shown = f" (found {each['input']!r})" if values else ""
            found.append(f"{place}: {each['msg']}{shown}")
    return found


def _fields_beside(model: type[BaseModel], place: Sequence[int | str]) -> list[str]:
    """The fields that the object has in which the last part of the place was found."""
    models = {model}
    for part in place[:-1]:
        # A key of a mapping and the place in a list name no field: the models stay.
        inner = {
            found
            for each in models
            if part in each.model_fields
            for found in _models_in(each.model_fields[str(part)].annotation)
        }
        models = inner or models
    return [name for each in models for name in each.model_fields]


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)
