"""The phase `export` of methods with personal models: a site that consents sends its own to be published."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from model_store.manifest import NetworkSpec
from model_store.task import Task
from training.algorithm import (
    ClientResult,
    ClientStep,
    Group,
    Memory,
    ModelDraft,
    Phase,
    RoundResult,
    State,
    StepContext,
)
from training.local.scores import ValidationScore
from training.parts.test import scored_metrics
from training.state_tree import join, part

PERSONAL = Group("personal", "weights", "collect")
PERSONAL_SCORE = Group(
    "personal_score", "statistics", "collect", essential=False, check=ValidationScore.check
)
EXPORT = "export"


def export_personal(model: State, score: ValidationScore, metric: str = "personal_val_dice") -> ClientResult:
    """A site's part of the phase: its model, and what the model scores on its own validation patients."""
    uploads = {PERSONAL.name: model, PERSONAL_SCORE.name: score.state()}
    return ClientResult(uploads, weight=1.0, metrics=score.metrics(metric))


def export_phase(client_step: ClientStep, expected: Callable[[Memory], Mapping[str, State]]) -> Phase:
    """The phase. `client_step` gives what `export_personal` gives; `expected` is like an exported model."""
    return Phase(
        EXPORT,
        1,
        (),
        (PERSONAL, PERSONAL_SCORE),
        client_step,
        keep_exported,
        expected=expected,
        consent=True,
        everyone=True,
    )


def keep_exported(context: StepContext, server: Memory, result: RoundResult) -> Memory:  # noqa: ARG001
    """The server step: its memory with the models of the sites that delivered one."""
    inside = {f"inside/{site}": dict(state) for site, state in result.collected[PERSONAL.name].items()}
    sent = result.collected.get(PERSONAL_SCORE.name, {})
    none = ValidationScore()
    scores = {
        site: (ValidationScore.received(sent[site]) if site in sent else none).facts()
        for site in result.weights
    }
    return Memory({**server.tensors, **join(inside)}, {**server.facts, "exported": scores})


def exported_models(server: Memory) -> dict[str, tuple[State, ValidationScore]]:
    """Site -> its model and score, of what `keep_exported` put into the server's memory."""
    return {
        site: (part(server.tensors, f"inside/{site}"), ValidationScore.noted(score))
        for site, score in server.facts.get("exported", {}).items()
    }


def personal_drafts(
    server: Memory, network: NetworkSpec, task: Task, metric: str = "val_dice"
) -> tuple[ModelDraft, ...]:
    """The exported models, ready to be published, each with what it scores on its site's test patients."""
    return tuple(
        ModelDraft(
            "inside",
            network,
            weights,
            site,
            score.metrics(metric) | scored_metrics(server.facts, task, "personal", (site,)),
        )
        for site, (weights, score) in exported_models(server).items()
    )
