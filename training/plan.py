"""Plan a federation of volumes, and print the plan: nothing is trained.

    python -m training.plan FOLDER [FOLDER ...] [--budget gpu-8gb] [--out PLAN]

Each FOLDER is a federation's, or one hospital's own. `python -m training.federate --plan` plans in the same
way before it trains, over a network too. With --out, task.yaml and config.yaml are written there: edit them,
and give them with `--task PLAN/task.yaml --config PLAN/config.yaml`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from training.exit_codes import FAILED
from training.planning.planner import BUDGETS

if TYPE_CHECKING:
    from model_store.task import Task
    from training.data.cases import Federation, Site


def load_hospitals(folders: Sequence[Path], task: Task | None = None) -> Federation[Any]:
    """Read one federation from several folders, each a federation's or a hospital's own.

    Without a task, all folders must lead to the same one. Raises FederationError for a folder that cannot be
    read, ConfigurationError for tasks that differ and for hospitals of the same name.
    """
    from training.data.cases import Federation, digest_of_sites
    from training.data.federation import load_federation
    from training.errors import ConfigurationError

    found = [load_federation(folder, task, by_value=True) for folder in folders]
    if len(found) == 1:
        return found[0]
    problems = []
    labels = {str(each.root): each.task.labels for each in found}
    if len({str(sorted(each.items())) for each in labels.values()}) > 1:
        problems.append(
            "the folders have different labels: "
            + "; ".join(f"{root}: {', '.join(names)}" for root, names in labels.items())
            + "; give one task with --task"
        )
    sites: list[Site[Any]] = [site for each in found for site in each.sites]
    names = [site.name for site in sites]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        problems.append(f"several hospitals are called {', '.join(twice)}; rename a folder")
    if problems:
        raise ConfigurationError("the folders are no federation", problems)
    first = found[0]
    digest = digest_of_sites(first.task, sites)
    return Federation(first.root, first.task, tuple(sites), first.inferred, digest)


def plan(
    folders: Annotated[list[Path], typer.Argument(help="Folders of federations, or of hospitals.")],
    task: Annotated[
        str | None, typer.Option(help="A task.yaml or a template's name; from the folder by default.")
    ] = None,
    budget: Annotated[
        str, typer.Option(help=f"What the network may cost: {', '.join(BUDGETS)}, or gigabytes of a GPU.")
    ] = "laptop",
    dimensions: Annotated[
        int | None,
        typer.Option(min=2, max=3, help="2 for slices, 3 for volumes; by default the data decide."),
    ] = None,
    leave_out: Annotated[list[str] | None, typer.Option(help="A site to leave out; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the split; test patients are not looked at.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Write task.yaml and config.yaml into this folder.")
    ] = None,
) -> None:
    """Plan a federation of volumes, and print the plan: nothing is trained."""
    # They import torch and the readers of scans, which help does not need.
    import yaml
    from rich.console import Console

    from model_store.errors import LocumStoreError
    from training.config import RunConfig
    from training.errors import TrainingError, in_words
    from training.planning.proposal import budget_of
    from training.planning_round import plan_federation
    from training.tasks import resolve

    console = Console(highlight=False, markup=False, soft_wrap=True)
    try:
        found = load_hospitals(folders, resolve(task, for_plan=True) if task else None)
        settings = RunConfig(seed=seed, leave_out=tuple(leave_out or ()))
        chosen: Literal[2, 3] | None = None if dimensions is None else 2 if dimensions == 2 else 3
        with tempfile.TemporaryDirectory() as place:
            proposal = plan_federation(
                found, settings, budget_of(budget), Path(place), dimensions=chosen, workers=0
            )
        written = proposal.write(out) if out else None
    except (TrainingError, LocumStoreError, OSError) as error:
        Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(f"error {in_words(error)}")
        raise typer.Exit(FAILED) from None
    for sentence in proposal.sentences:
        console.print(sentence)
    content = {
        "task": proposal.task.model_dump(mode="json", exclude_none=True),
        "method": dict(proposal.options),
    }
    console.print(f"\n{yaml.safe_dump(content, sort_keys=False, allow_unicode=True)}", end="")
    if written:
        console.print(f"\nwrote {written[0]} and {written[1]}")


if __name__ == "__main__":
    typer.run(plan)
