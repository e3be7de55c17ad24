"""The options of `training.compare`, and what their texts say."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from training.errors import ConfigurationError
from training.options import DEFAULT_STORE, listed_methods

_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")


@dataclass(frozen=True, kw_only=True)
class ComparedOptions:
    """What is compared."""

    panel: ClassVar[str] = "Comparison"

    methods: Annotated[
        str,
        typer.Option(
            help="NAME,NAME: the others are measured by the first. Of: " + ", ".join(listed_methods()) + "."
        ),
    ]
    seeds: Annotated[str, typer.Option(help="How many, from 0; or a list, as 3,7 or 5,.")] = "3"
    rounds: Annotated[int | None, typer.Option(help="For all methods; by default those of the first.")] = None
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML with the sections `method`, of which each takes the fields that it has, and `run`."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """How long it takes, and where the table is."""

    panel: ClassVar[str] = "This table: time, folder, processes"

    out: Annotated[
        Path, typer.Option(help="The folder of rows and page; what is in it is not trained again.")
    ] = Path(".locum/compare")
    budget: Annotated[
        str | None,
        typer.Option(
            help="Such as 30m, 1h30m or 90s: stop then; the same command goes on from the last round."
        ),
    ] = None
    again: Annotated[
        str | None, typer.Option(help="NAME,NAME: methods to train again, as after a change of their code.")
    ] = None
    workers: Annotated[int | None, typer.Option(min=0, help="Processes; decides no result.")] = None
    store: Annotated[
        str, typer.Option(envvar="LOCUM_STORE", help="Where a `backbone` or `start` of the configuration is.")
    ] = DEFAULT_STORE


def names_of(text: str | None) -> tuple[str, ...]:
    """`a, b,` is a and b; nothing is none."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def seeds_of(text: str) -> tuple[int, ...]:
    """`3` is 0, 1, 2; `3,7` and `5,` are a list. Raises ConfigurationError."""
    numbers = names_of(text)
    if not numbers or not all(number.isdecimal() for number in numbers):
        raise ConfigurationError(
            "--seeds cannot be used", [f"expected a number or a list as 3,7, found '{text}'"]
        )
    return tuple(map(int, numbers)) if "," in text else tuple(range(int(text)))


def seconds_of(text: str) -> float:
    """`1h30m` is 5400. Raises ConfigurationError."""
    found = _DURATION.fullmatch(text.strip())
    if found is None or not text.strip():
        raise ConfigurationError(
            "--budget cannot be used", [f"expected such as 30m, 1h30m or 90s, found '{text}'"]
        )
    return sum(float(part or 0) * factor for part, factor in zip(found.groups(), (3600, 60, 1), strict=True))
