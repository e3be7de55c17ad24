"""What does a hospital gain that was never in the federation? IOP-FL's outside half, leaving each site out.

    python -m benchmarks.accuracy.outside.experiment --profile cpu --data ../shared/data/brain_lgg_flair \
        --rows docs/results/outside.cpu.jsonl

The federation of the other sites is trained once per left-out site and seed, and kept. On the scans of the
site left out, without their labels, arms are then compared: the models as they are (running, test and baked
batch norm), their average and ensemble, Tent, and routing with every preset, as it was learned and merged. An
arm that learns does so twice: on all patients, who are then reported (transductive, as in the paper), and on
one half of the patients to report the other, in turn (inductive, as a hospital would use it).

Labels are for reporting only. Fields named `diagnostic_` hold what they say of epochs; nothing reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.accuracy.outside.arms import HeldOutHospital, Models, plain_arms
from benchmarks.accuracy.outside.baked import baked_arms
from benchmarks.accuracy.outside.gate import Judge
from benchmarks.accuracy.outside.planted import Cohorts, inverted, planted, some
from benchmarks.accuracy.outside.report import page
from benchmarks.accuracy.outside.routing import routing_arms
from benchmarks.harness.cells import STATE_DIR, Cell, Rows, run
from benchmarks.harness.evaluation import Scans
from model_store.store import Store
from model_store.task import Task
from personalization.gate import ROUTING, limits
from personalization.iop_fl.space import GLOBAL
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.objective import WeightedSum
from personalization.test_time.presets import objective_of
from training.config import RunConfig
from training.data.cases import Case, Federation
from training.data.federation import TASK_FILE, load_federation
from training.engine.folder import RunFolder
from training.errors import TrainingError
from training.methods.iop_fl import IopFlConfig
from training.phantom import TRAINING, write_federation
from training.run import Result, Run, execute
from training.tasks import template


@dataclass(frozen=True)
class Profile:
    """How long, how often, on what. `method` are fields of IopFlConfig; `sizes` are sets' own `size`.

    At most about `images` slices are learned from at a time, and `planted` where something bad is.
    """

    seeds: int
    epochs: int
    images: int
    planted: int
    size: int | None = None
    device: str = "cpu"
    method: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)


SHORT = {"rounds": 25, "width": 16, "precision": "bfloat16"}
PROFILES = {
    "smoke": Profile(1, 2, 24, 16, 32, method={"rounds": 2, "width": 4}),
    "cpu": Profile(
        3,
        5,
        128,
        64,
        method=SHORT,
        sizes={"retina_vessels": 144},
    ),
    # The federations are trained as plainly as can be, and are worse: is there more to win then?
    "plainly-trained": Profile(
        3,
        5,
        128,
        64,
        method=SHORT | {"augment": False, "selection": "last"},
    ),
    # Nobody's scans: what defaults and limits may be chosen on.
    "phantom": Profile(3, 10, 128, 64, method=TRAINING),
    "full": Profile(3, 10, 512, 256, 256, "cuda", {"rounds": 100, "width": 32}),
}
# Fixed before anything was run on them: vessels are thin and branched, which the shape prior forbids, and
# few images a site make few steps of 16.
METHOD_OF_SET: Mapping[str, Mapping[str, Any]] = {"retina_vessels": {"batch_size": 4}}
SHAPE_WEIGHT_OF_SET: Mapping[str, float] = {"retina_vessels": 0.0}

# The set of another modality, for cohorts of scans that a hospital should not have sent.
FOREIGN = "breast_ultrasound"

LEARN_NO_ROUTING = {"plain": plain_arms, "baked": baked_arms}

# The first group answers the question, so all sites and seeds have it before the others start. What routes:
# preset and router.
GROUPS: tuple[tuple[str, ...], ...] = (
    ("plain", "baked", "routing paper direct", "routing statistics direct"),
    ("routing official direct",),
    ("planted",),
    ("routing paper pooled",),
)


def cells_of(
    set_: str, sites: tuple[str, ...], profile: str, settings: Profile, tries: Mapping[str, Any]
) -> list[Cell]:
    """Every cell, in the order of what one most wants to know."""
    common = {
        "set": set_,
        "profile": profile,
        "size": settings.sizes.get(set_, settings.size),
        "images": settings.images,
        "method": IopFlConfig(**{**settings.method, **METHOD_OF_SET.get(set_, {})}).model_dump(mode="json"),
    }
    # What it asks, and of whose slices as one: another gate makes other cells.
    gate = {"gate": {**limits(ROUTING), "unit": "patient"}}
    return [
        {"arms": arms, "seed": seed, "site": site, **common, "adaptation": adaptation}
        | ({} if arms in LEARN_NO_ROUTING else gate)
        for group in GROUPS
        for seed in range(settings.seeds)
        for site in sites
        for arms, adaptation in ((arms, adaptation_of(arms, set_, settings, tries)) for arms in group)
    ]


def adaptation_of(arms: str, set_: str, settings: Profile, tries: Mapping[str, Any]) -> dict[str, Any]:
    """All that decides how these arms learn, but the seed: a changed default makes other cells.

    For routing arms: the fields of AdaptationConfig, and under `loss` what its preset stands for.
    """
    if arms in LEARN_NO_ROUTING:
        return {"epochs": settings.epochs}
    preset, router = arms.split()[1:] if arms.startswith("routing") else ("paper", "direct")
    shape = {"shape_weight": SHAPE_WEIGHT_OF_SET[set_]} if set_ in SHAPE_WEIGHT_OF_SET else {}
    fields = {"preset": preset, "router": router, "epochs": settings.epochs, **shape, **tries}
    config = AdaptationConfig(**fields)
    facts = {name: value for name, value in config.facts().items() if name != "seed"}
    planted = {"planted": settings.planted} if arms == "planted" else {}
    objective = objective_of(config.preset)
    assert isinstance(objective, WeightedSum)
    loss = {**asdict(objective.weights(config)), "official": config.preset == "official"}
    return {**facts, "loss": loss, **planted}


class Federations:
    """The federations of all but one site, each trained once and kept: other cells and tries use it again."""

    def __init__(self, federation: Federation, folder: Path, device: str, workers: int, train: bool) -> None:
        self._federation = federation
        self._folder = folder
        self._device = device
        self._workers = workers
        self._train = train

    def run_of(self, cell: Cell) -> Run:
        """The training behind a cell."""
        federation = self._federation
        if cell["size"] is not None:
            size = (cell["size"], cell["size"])
            federation = replace(federation, task=federation.task.model_copy(update={"size": size}))
        settings = RunConfig(seed=cell["seed"], leave_out=(cell["site"],), consent="all", device=self._device)
        return Run(federation, "iop-fl", IopFlConfig(**cell["method"]), settings)

    def ready(self, cell: Cell) -> bool:
        """Whether the cell's federation is trained, or can be trained here and now."""
        folder = RunFolder(self._of(cell) / "run")
        try:
            with folder.held():
                checkpoint = folder.checkpoint()
                done = checkpoint is not None and checkpoint.step >= len(self.run_of(cell).algorithm().plan())
                return done or self._train
        except TrainingError:
            return False  # another process is training it

    def get(self, cell: Cell) -> Result:
        """Train what is left to train."""
        return execute(
            self.run_of(cell),
            self._of(cell) / "run",
            resume=True,
            store=Store(self._of(cell) / "store"),
            name="outside",
            workers=self._workers,
        )

    def _of(self, cell: Cell) -> Path:
        set_: str = cell["set"]
        return self._folder / set_ / f"{cell['site']}-{cell['seed']}"


class Experiment:
    """Computes one cell, on the federation that belongs to it."""

    def __init__(self, federation: Federation, federations: Federations, device: str) -> None:
        self._federation = federation
        self._federations = federations
        self._device = torch.device(device)

    def __call__(self, cell: Cell, _work: Path) -> dict[str, Any]:
        """Dice per arm and patient of the site left out, and the gate's verdicts."""
        result = self._federations.get(cell)
        task, seed = result.run.federation.task, cell["seed"]
        states = {draft.site or GLOBAL: draft.weights for draft in result.publication.models}
        # The sites in order, the global model last, as a routing space has them
        ordered = {name: states[name] for name in sorted(states, key=lambda name: (name == GLOBAL, name))}
        models = Models(result.publication.models[0].network, ordered, self._device)
        judge = Judge(models, result.publication.statistics, task)
        cases = self._federation.site(cell["site"]).cases
        scans = Scans.load(cases, task)
        hospital = HeldOutHospital.of(scans, seed, cell["images"])
        facts = cell["adaptation"]
        if cell["arms"] in LEARN_NO_ROUTING:
            return LEARN_NO_ROUTING[cell["arms"]](models, hospital, facts["epochs"], seed)
        fields = {name: value for name, value in facts.items() if name not in ("loss", "planted")}
        config = AdaptationConfig(**fields, seed=seed)
        if cell["arms"] == "planted":
            cohorts = self._cohorts(cases, scans, task, facts["planted"])
            return planted(models, judge, scans, cohorts, config)
        return routing_arms(models, judge, hospital, config)

    def _cohorts(self, cases: Sequence[Case], scans: Scans, task: Task, count: int) -> Cohorts:
        few = some(scans, count)
        foreign = None
        folder = self._federation.root.parent / FOREIGN
        if folder.is_dir() and folder.name != self._federation.root.name:
            site = load_federation(folder, template(FOREIGN)).sites[0]
            foreign = Scans.load(site.cases[:count], task)
        return Cohorts(
            scans.of(few), Scans.load([c for c in cases if c.patient in few], task, inverted), foreign
        )


def main(
    data: Annotated[
        Path,
        typer.Option(
            help="A federation folder, or a set with a template of its name. Profile `phantom` makes it."
        ),
    ],
    rows: Annotated[Path, typer.Option(help="Where finished cells are kept; the page is written beside it.")],
    profile: Annotated[str, typer.Option(help=f"One of {', '.join(PROFILES)}.")] = "cpu",
    seeds: Annotated[int | None, typer.Option(help="Fewer seeds than the profile's, for a try.")] = None,
    only: Annotated[str | None, typer.Option(help="Arms whose name begins so, for a try.")] = None,
    epochs: Annotated[int | None, typer.Option(help="A try: of adaptation.")] = None,
    routing_rate: Annotated[float | None, typer.Option(help="A try: of the coefficients.")] = None,
    bn_rate: Annotated[float | None, typer.Option(help="A try: of batch norm's scales and shifts.")] = None,
    train_bn_affine: Annotated[
        bool | None, typer.Option(help="A try: whether batch norm's scales and shifts are learned.")
    ] = None,
    train: Annotated[
        bool, typer.Option(help="Train federations that are missing; else leave them to who does.")
    ] = True,
    workers: Annotated[int, typer.Option(help="Worker processes; does not change a result.")] = 1,
    state_dir: Annotated[Path, typer.Option(help="Where federations are kept, and unfinished cells.")] = (
        STATE_DIR
    ),
) -> None:
    """Compute the cells that have no row yet; the page of results is written after each."""
    if profile not in PROFILES:
        raise typer.BadParameter(f"unknown profile '{profile}'; there are {', '.join(PROFILES)}")
    torch.set_num_threads(1)
    usual = PROFILES[profile]
    settings = replace(usual, seeds=seeds or usual.seeds)
    tries = {
        "epochs": epochs,
        "routing_rate": routing_rate,
        "bn_rate": bn_rate,
        "train_bn_affine": train_bn_affine,
    }
    chosen = {name: value for name, value in tries.items() if value is not None}
    if profile == "phantom" and not data.exists():
        write_federation(data)
    set_ = data.resolve().name
    federation = load_federation(data, None if (data / TASK_FILE).is_file() else template(set_))
    name = f"outside.{profile}"
    federations = Federations(federation, state_dir / name, settings.device, workers, train)
    experiment = Experiment(federation, federations, settings.device)
    command = (
        f"python -m benchmarks.accuracy.outside.experiment --profile {profile} --data {data} --rows {rows}"
    )

    def usual_of(cell: Cell) -> dict[str, Any]:
        return adaptation_of(cell["arms"], cell["set"], usual, {})

    write = partial(page, rows, usual_of, command)
    cells = cells_of(set_, federation.names, profile, settings, chosen)
    if only is not None or chosen:
        wanted = only or "routing"  # a try changes no other arms
        cells = [cell for cell in cells if cell["arms"].startswith(wanted)]
    run(name, cells, Rows(rows), experiment, state_dir, write, federations.ready)
    write()


if __name__ == "__main__":
    typer.run(main)
