"""Federate the hospitals of a folder and publish what they learned.

    python -m training.federate --method iop-fl --data DIR --out STORE --consent all

Without --data, the phantom federation is written and used. An error is printed as a message, with exit code
2; a run that was killed continues with --resume. Hospitals that keep their folders take part over a network:

    python -m training.federate --engine network --kit KITS/server --task task.yaml --method iop-fl

With --plan, sites tell first what their volumes are like, and task and network follow from it
(`training.planning`).
"""

from __future__ import annotations

import typer

from training.options import (
    DataOptions,
    ExecutionOptions,
    LogOptions,
    NetworkOptions,
    PlanningOptions,
    PublishingOptions,
    TrainingOptions,
    grouped,
)


@grouped
def federate(
    training: TrainingOptions,
    data: DataOptions,
    planning: PlanningOptions,
    publishing: PublishingOptions,
    execution: ExecutionOptions,
    network: NetworkOptions,
    logging: LogOptions,
) -> None:
    """Federate the hospitals of a folder and publish what they learned."""
    # It imports torch, which help does not need.
    from training.command import run

    run(training, data, planning, publishing, execution, network, logging)


if __name__ == "__main__":
    typer.run(federate)
