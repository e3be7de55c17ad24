"""Which label-free criterion picks a cluster's model for a hospital from outside? On the phantom of shapes.

    python -m benchmarks.accuracy.picking.experiment --rows docs/results/picking.jsonl

FedBiCross is trained without one hospital. Every outside hospital (the one left out, and some that see and
share in ways of their own) then sends unlabeled images, and each criterion picks a cluster. Their labels say
afterwards what the picks are worth: accuracy of the picked model against the best cluster's, in hindsight,
and against a cluster picked by chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from benchmarks.harness.cells import STATE_DIR, Cell, Rows, run
from benchmarks.harness.tables import mean_and_spread, table, write_page
from model_store.preprocessing import prepare
from model_store.scan import Scan
from personalization.fedbicross.picking import cheapest, costs, observe, stability
from personalization.gate import judge
from personalization.gate.picking import PICKING, Pick
from personalization.options.picking import CRITERIA
from training.config import RunConfig
from training.data.federation import load_federation
from training.methods import FedBiCrossConfig
from training.methods.common.local_training import network_of
from training.phantom.shapes import (
    HOSPITALS,
    TASK,
    TRAINING,
    Camera,
    PhantomHospital,
    image_seed,
    make_shape,
    write_shapes,
)
from training.run import Run, execute

# Hospitals that no federation has: what they see and which classes they have goes its own way.
STRANGERS: Mapping[str, PhantomHospital] = {
    "oak": PhantomHospital(Camera(contrast=70, level=90, noise=22), (0.2, 0.6, 0.2)),
    "pine": PhantomHospital(Camera(contrast=120, level=60, noise=14, slope=30), (0.1, 0.1, 0.8)),
    "rowan": PhantomHospital(Camera(contrast=80, level=170, noise=20, inverted=True), (0.5, 0.4, 0.1)),
    "sorrel": PhantomHospital(
        Camera(contrast=120, level=200, noise=12, slope=-40, inverted=True), (1.0, 0.0, 0.0)
    ),
}
HINDSIGHT, CHANCE = "best in hindsight", "by chance"


def images_of(name: str, hospital: PhantomHospital, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """The network's input [N, C, H, W] and the true classes [N] of a hospital's images."""
    bounds = np.rint(np.cumsum(hospital.shares) * count).astype(int)
    labels = np.searchsorted(bounds, np.arange(count), side="right")
    side, slices = TASK.size[0], []
    for index, label in enumerate(labels):
        picture = make_shape(hospital.camera, int(label), side, image_seed(seed, name, index))
        slices.append(prepare(Scan(picture[..., None], None, "png"), TASK).slices)
    return torch.from_numpy(np.concatenate(slices)), torch.from_numpy(labels)


def compute(cell: Cell, work: Path) -> dict[str, Any]:
    """Train without a hospital; for each outside one, all costs and the clusters' accuracies."""
    torch.set_num_threads(1)
    seed = cell["seed"]
    root = work / "federation"
    if not root.exists():
        write_shapes(root, images_per_site=cell["images"], seed=seed)
    config = FedBiCrossConfig(**{**TRAINING, **cell["training"]})
    settings = RunConfig(seed=seed, leave_out=(cell["outside"],))
    job = Run(load_federation(root), "fedbicross", config, settings)
    result = execute(job, work / "run", workers=0, resume=(work / "run").exists())
    networks = {
        str(draft.cluster): network_of(draft.network, dict(draft.weights), torch.device("cpu"))
        for draft in result.publication.models
        if draft.cluster is not None
    }
    outside = {cell["outside"]: HOSPITALS[cell["outside"]], **STRANGERS}
    found = {}
    for name, hospital in outside.items():
        images, labels = images_of(name, hospital, cell["cohort"], seed + 1000)
        observed = {cluster: observe(network, images) for cluster, network in networks.items()}
        found[name] = {
            "accuracies": {
                cluster: float((own.answers.argmax(dim=1) == labels).double().mean())
                for cluster, own in observed.items()
            },
            "costs": {criterion: costs(criterion, observed) for criterion in CRITERIA},
            "stability": {
                criterion: stability(criterion, observed, torch.arange(len(images)), _draw(), draws=50)
                for criterion in CRITERIA
            },
        }
    return {"assignment": result.publication.composite["assignment"], "hospitals": found}


def _draw() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def regrets(row: Mapping[str, Any]) -> list[dict[str, list[float]]]:
    """For each outside hospital, how much accuracy each way to choose loses to the best cluster.

    A list of equally likely losses: one for a criterion, one per cluster for chance. `HINDSIGHT` has what the
    best cluster's accuracy is.
    """
    lost = []
    for each in row["result"]["hospitals"].values():
        accuracies = each["accuracies"]
        best = max(accuracies.values())
        found = {name: [best - accuracies[cheapest(costs)]] for name, costs in each["costs"].items()}
        lost.append(found | {CHANCE: [best - a for a in accuracies.values()], HINDSIGHT: [best]})
    return lost


def page(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The tables: the left-out hospital by itself, and the strangers."""
    several = [row for row in rows if len(set(row["result"]["assignment"].values())) > 1]
    sections = [
        f"{len(rows)} federations, {len(several)} of them with several clusters: only those have anything "
        "to choose. Accuracy lost to the best cluster in hindsight, mean ± deviation over federations and "
        "hospitals, and how often the best cluster (or one as good) was picked."
    ]
    for title, which in (("The hospital that was left out", slice(0, 1)), ("Strangers", slice(1, None))):
        lost = [each for row in several for each in regrets(row)[which]]
        if not lost:
            continue
        body = [
            [
                name,
                mean_and_spread([float(np.mean(each[name])) for each in lost]),
                f"{max(max(each[name]) for each in lost):.3f}",
                f"{np.mean([np.mean([loss <= 0 for loss in each[name]]) for each in lost]):.0%}",
            ]
            for name in (*CRITERIA, CHANCE)
        ]
        best = mean_and_spread([each[HINDSIGHT][0] for each in lost])
        sections += [
            f"{title}: {len(lost)} choices. The best cluster's accuracy is {best}.",
            table(["criterion", "accuracy lost", "at most", "best picked"], body),
        ]
    return [*sections, *_gate([each for row in several for each in row["result"]["hospitals"].values()])]


def _gate(hospitals: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the gate says to the picks of the default criterion, and how right these are."""
    criterion = CRITERIA[0]
    right: dict[str, list[float]] = {"passed": [], "refused": []}
    for each in hospitals:
        chosen = cheapest(each["costs"][criterion])
        pick = Pick(chosen, each["costs"], stability=each["stability"][criterion], source_warnings=0.0)
        verdict = judge(PICKING, pick)
        right["passed" if verdict.passed else "refused"].append(each["accuracies"][chosen])
    body = [
        [name, len(found), mean_and_spread(found), sum(accuracy < 0.5 for accuracy in found)]
        for name, found in right.items()
    ]
    return [
        f"What the gate says to the picks by `{criterion}`, all hospitals together (without the guard, which "
        "would warn of some). The criterion and the gate's thresholds were chosen on this phantom, so that "
        "it flatters both:",
        table(["gate", "picks", "accuracy", "below 0.5"], body),
    ]


def main(
    rows: Annotated[Path, typer.Option(help="Where finished cells are kept; the page is written beside it.")],
    seeds: Annotated[int, typer.Option(help="Federations per hospital left out.")] = 3,
    state_dir: Annotated[Path, typer.Option(help="Scratch space.")] = STATE_DIR,
) -> None:
    """Train and pick where there is no row yet, then write the page."""
    cells: list[Cell] = [
        {"outside": outside, "seed": seed, "images": 60, "cohort": 40, "training": {}}
        for seed in range(seeds)
        for outside in HOSPITALS
    ]
    found = run("picking", cells, Rows(rows), compute, state_dir)
    command = f"python -m benchmarks.accuracy.picking.experiment --rows {rows} --seeds {seeds}"
    title = "Picking a cluster without labels, on the phantom"
    write_page(rows.with_suffix(".md"), title, command, rows, page(found))


if __name__ == "__main__":
    typer.run(main)
