"""What can a hospital outside the federation use? IOP-FL's outside half, leaving each site out in turn.

The federation of the other sites is trained once per left-out site and seed, and kept. Arms are then compared
on the scans of the site left out, without their labels: the models as they are (running, test and baked batch
norm), their average and ensemble, Tent, and routing with every preset, as learned and merged. An arm that
learns does so twice: on all patients, who are also reported (transductive, as in the paper), and on one half
of the patients to report the other half, in turn (inductive, as a hospital would use it).

Labels are for reporting only. Fields named `diagnostic_` hold what labels say of epochs; nothing reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.accuracy.outside.report import sections
from benchmarks.accuracy.outside.study import LEARN_NO_ROUTING, Federations, Study
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.experiment import Experiment, Table
from personalization.gate import ROUTING, limits
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.objective import WeightedSum
from personalization.test_time.recipe import objective_of
from training.data.cases import Federation
from training.data.federation import TASK_FILE, load_federation
from training.methods.iop_fl import IopFlConfig
from training.phantom import write_federation
from training.tasks import template


@dataclass(frozen=True)
class Tries:
    """What --set may change of the routing arms' adaptation; None leaves the profile's value."""

    epochs: int | None = None
    routing_rate: float | None = None
    bn_rate: float | None = None
    train_bn_affine: bool | None = None

    def given(self) -> dict[str, Any]:
        """The values that are set."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Profile:
    """How long, how often, on what. `method` has fields of IopFlConfig; `sizes` replaces `size` for a set.

    At most about `images` slices are learned from at a time, and about `planted` in the planted cohorts.
    Without `train`, cells of federations that are not trained yet are left for a later run.
    """

    seeds: int
    epochs: int
    images: int
    planted: int
    size: int | None = None
    device: str = "cpu"
    method: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    adaptation: Tries = field(default_factory=Tries)
    train: bool = True


SHORT = {"recipe": "paper", "rounds": 25, "width": 16, "precision": "bfloat16"}
PHANTOM = {
    "recipe": "paper",
    "rounds": 12,
    "width": 8,
    "batch_size": 8,
    "learning_rate": 0.004,
    "learning_rate_decay": 0.9,
}
PROFILES = {
    "smoke": Profile(1, 2, 24, 16, 32, method={"recipe": "paper", "rounds": 2, "width": 4}),
    "cpu": Profile(
        3,
        5,
        128,
        64,
        method=SHORT,
        sizes={"retina_vessels": 144},
    ),
    # The federations are trained without augmentation and keep the last round, and are worse for it: is there
    # more to gain then?
    "plainly-trained": Profile(
        3,
        5,
        128,
        64,
        method=SHORT | {"augment": False, "selection": "last"},
    ),
    # Synthetic scans: defaults and limits may be chosen on them.
    "phantom": Profile(3, 10, 128, 64, method=PHANTOM),
    "full": Profile(3, 10, 512, 256, 256, "cuda", {"recipe": "paper", "rounds": 100, "width": 32}),
}
# Fixed before any run on this set: vessels are thin and branched, which the shape prior penalises, and the
# few images of a site make few steps of 16.
METHOD_OF_SET: Mapping[str, Mapping[str, Any]] = {"retina_vessels": {"batch_size": 4}}
SHAPE_WEIGHT_OF_SET: Mapping[str, float] = {"retina_vessels": 0.0}

# The first group answers the question, so all sites and seeds of it are computed before the others. The
# names of routing arms have preset and router.
GROUPS: tuple[tuple[str, ...], ...] = (
    ("plain", "baked", "routing paper direct", "routing statistics direct"),
    ("routing official direct",),
    ("planted",),
    ("routing paper pooled",),
)


class Outside(Experiment[Profile]):
    """IOP-FL outside the federation."""

    name = "outside"
    title = "Outside personalization"
    question = "What can a hospital outside the federation use?"
    profiles = PROFILES
    tables = (
        Table("outside.cpu", data="../shared/data/brain_lgg_flair"),
        Table("outside.retina.cpu", data="../shared/data/retina_vessels"),
        Table("outside.plainly-trained", "plainly-trained", "../shared/data/brain_lgg_flair", seeds=1),
        Table("outside.phantom", "phantom", ".locum/phantom"),
    )
    data_help = (
        "a federation folder with a task.yaml, or a data set with a task template of its name; "
        "with --profile phantom, a folder that is written when it is not there"
    )
    shows_tries = True

    @cached_property
    def _federation(self) -> Federation:
        if self.options.profile == "phantom" and not self.data.exists():
            write_federation(self.data)
        named = None if (self.data / TASK_FILE).is_file() else template(self._set)
        return load_federation(self.data, named)

    @cached_property
    def _federations(self) -> Federations:
        options = self.options
        folder = options.state_dir / f"{self.name}.{options.profile}"
        return Federations(self._federation, folder, self.profile.device, options.workers, self.profile.train)

    @property
    def _set(self) -> str:
        return self.data.resolve().name

    def cells(self) -> list[Cell]:
        """Every cell, the most informative ones first; of a try, only the routing arms."""
        return cells_of(self._set, self._federation.names, self.options.profile, self.profile)

    def ready(self, cell: Cell) -> bool:
        """Whether the cell's federation is trained, or may be trained now."""
        return self._federations.ready(cell)

    def compute(self, cell: Cell, work: Path) -> dict[str, Any]:  # noqa: ARG002
        """Dice of every arm at the site left out."""
        return Study(self._federation, self._federations, self.profile.device).compute(cell)

    def sections(self, rows: Sequence[Row]) -> list[str]:
        """A part per data set and setting, its tries last."""
        return sections(rows, lambda cell: adaptation_of(cell["arms"], cell["set"], self.baseline))


def cells_of(set_: str, sites: Sequence[str], profile: str, settings: Profile) -> list[Cell]:
    """Every cell, the most informative ones first; of a try, only the routing arms, which it changes."""
    common = {
        "set": set_,
        "profile": profile,
        "size": settings.sizes.get(set_, settings.size),
        "images": settings.images,
        "method": IopFlConfig(**{**settings.method, **METHOD_OF_SET.get(set_, {})}).model_dump(mode="json"),
    }
    # The gate's thresholds, and the unit that it judges as one: another gate makes other cells.
    gate = {"gate": {**limits(ROUTING), "unit": "patient"}}
    tried = bool(settings.adaptation.given())
    return [
        {"arms": arms, "seed": seed, "site": site, **common, "adaptation": adaptation}
        | ({} if arms in LEARN_NO_ROUTING else gate)
        for group in GROUPS
        for seed in range(settings.seeds)
        for site in sites
        for arms, adaptation in ((arms, adaptation_of(arms, set_, settings)) for arms in group)
        if arms.startswith("routing") or not tried
    ]


def adaptation_of(arms: str, set_: str, settings: Profile) -> dict[str, Any]:
    """All that decides how these arms learn, except the seed: a changed default makes other cells.

    For routing arms: the fields of AdaptationConfig, and under `loss` the weights of its preset.
    """
    if arms in LEARN_NO_ROUTING:
        return {"epochs": settings.epochs}
    preset, router = arms.split()[1:] if arms.startswith("routing") else ("paper", "direct")
    shape = {"shape_weight": SHAPE_WEIGHT_OF_SET[set_]} if set_ in SHAPE_WEIGHT_OF_SET else {}
    tries = settings.adaptation.given()
    fields = {"preset": preset, "router": router, "epochs": settings.epochs, **shape, **tries}
    config = AdaptationConfig(**fields)
    facts = {name: value for name, value in config.facts().items() if name not in ("seed", "doses")}
    planted = {"planted": settings.planted} if arms == "planted" else {}
    objective = objective_of(config.preset)
    assert isinstance(objective, WeightedSum)
    loss = {**asdict(objective.weights(config)), "official": config.preset == "official"}
    return {**facts, "loss": loss, **planted}
