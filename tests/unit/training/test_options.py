"""The options of training.federate are grouped for the code, and flat for a person."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, fields

import pytest
import typer
from typer.testing import CliRunner

from training.errors import ConfigurationError
from training.federate import federate
from training.methods.registry import methods
from training.options import (
    DataOptions,
    ExecutionOptions,
    LogOptions,
    NetworkOptions,
    PlanningOptions,
    PublishingOptions,
    TrainingOptions,
    grouped,
    listed_methods,
)

# What a person could give before the options were grouped, and the options of a plan.
KNOWN = [
    "plan",
    "budget",
    "method",
    "data",
    "task",
    "out",
    "backbone",
    "name",
    "clients",
    "dirichlet",
    "leave_out",
    "rounds",
    "loss",
    "start",
    "rotation_head",
    "seed",
    "config",
    "workers",
    "consent",
    "run",
    "sign",
    "graph_operators",
    "playbook",
    "resume",
    "resume_before",
    "keep_rounds",
    "engine",
    "kit",
    "listen",
    "deadline",
    "quorum",
    "silence",
    "rehearse",
    "planned",
    "tensorboard",
    "mlflow",
]


def test_command_has_the_options_that_it_always_had() -> None:
    assert sorted(inspect.signature(federate).parameters) == sorted(KNOWN)


def test_every_option_is_in_one_group() -> None:
    groups = (
        TrainingOptions,
        DataOptions,
        PlanningOptions,
        PublishingOptions,
        ExecutionOptions,
        NetworkOptions,
        LogOptions,
    )
    assert sorted(field.name for group in groups for field in fields(group)) == sorted(KNOWN)


def test_grouped_command_gets_its_objects_with_defaults() -> None:
    seen: list[tuple[TrainingOptions, ExecutionOptions]] = []

    def command(training: TrainingOptions, execution: ExecutionOptions) -> None:
        """Do something."""
        seen.append((training, execution))

    app = typer.Typer()
    app.command()(grouped(command))
    done = CliRunner().invoke(app, ["--method", "fedavg", "--rounds", "3", "--resume-before", "train:2"])
    assert done.exit_code == 0, done.output
    assert seen == [
        (TrainingOptions(method="fedavg", rounds=3), ExecutionOptions(resume_before="train:2")),
    ]
    assert seen[0][1].resumes
    assert seen[0][1].taken_back() == ("train", 2)
    with pytest.raises(FrozenInstanceError):
        seen[0][0].rounds = 4  # type: ignore[misc]


def test_help_shows_options_by_group() -> None:
    app = typer.Typer()
    app.command()(federate)
    text = CliRunner().invoke(app, ["--help"]).output
    places = [
        text.index(name) for name in (TrainingOptions.panel, "--rounds", DataOptions.panel, "--leave-out")
    ]
    assert places == sorted(places)
    assert LogOptions.panel in text


def test_missing_required_option_is_an_error() -> None:
    app = typer.Typer()
    app.command()(federate)
    assert CliRunner().invoke(app, []).exit_code == 2


@pytest.mark.parametrize("text", ["17", "train", "train:", ":17", "train:x"])
def test_round_that_is_none_is_rejected(text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"expected PHASE:ROUND such as train:17, found '{text}'"):
        ExecutionOptions(resume_before=text).taken_back()


@pytest.mark.parametrize(
    ("text", "sites"), [(None, None), (" all ", "all"), ("A, B,", ("A", "B")), ("", ())], ids=str
)
def test_consent_names_sites(text: str | None, sites: object) -> None:
    assert PublishingOptions(consent=text).consenting() == sites


def test_help_names_the_methods_that_are_registered() -> None:
    assert listed_methods() == list(methods())
