"""Methods in which a hospital uploads its classifier once: its training, and what the server begins with.

Every hospital trains a classifier, by default a ResNet-18, on its images and sends it, with its batch-norm
statistics. All begin alike unless the configuration says otherwise: weights that begin apart have no average.
The sites are sent a seed for it, 8 bytes. What the server makes of the uploads is the method's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn
from typing_extensions import override

from model_store.manifest import NetworkSpec
from model_store.task import Task
from personalization.precision import Precision
from personalization.state import StreamingMean
from training.algorithm import ClientResult, Group, Memory, Phase, Plan, RoundResult, State, StepContext
from training.choices.network import NetworkConfig
from training.choices.randomisation import RandomisationConfig
from training.errors import SiteFailed, TrainingError
from training.local.classifier import ClassCounts, SgdSchedule, train_classifier
from training.local.images import Images
from training.local.networks import new_network, shapes_of, state_of
from training.local.site import SiteData
from training.parts.describe import GROUPS, Described, describe
from training.parts.part import Added, Part, Parted, Slot

SEED = Group("seed", "statistics", "collect")
MODEL = Group("model", "weights", "collect")
COUNTS = Group("counts", "statistics", "collect", essential=False, check=ClassCounts.check)

Start = Literal["average", "largest_client", "random"]


class OneShotConfig(RandomisationConfig, NetworkConfig):
    """How a hospital trains before its one upload."""

    rounds: int = Field(1, ge=1, le=1, description="a hospital uploads once: there is one round")
    # Not part of what is written down: the values that it stands for are.
    recipe: Literal["locum", "paper"] = Field(
        "locum",
        exclude=True,
        description="where the values that are not given come from: Locum's choice, or the paper",
    )
    precision: Precision = Field(
        "float32", description="bfloat16 takes two thirds of the time where the processor has it"
    )
    local_epochs: int = Field(20, ge=1, description="passes over the site's images, once")
    learning_rate: float = Field(0.01, gt=0, description="of local SGD")
    milestones: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field(
        (0.5, 0.75),
        description="shares of the local epochs after which the rate falls to a tenth; none: a constant rate",
    )
    batch_size: int = Field(32, ge=2)
    momentum: float = Field(0.9, ge=0, lt=1)
    weight_decay: float = Field(5e-4, ge=0)
    augment: bool = Field(False, description="random rotation and flip in local training")
    common_start: bool = Field(True, description="all sites begin with the same weights, by a seed sent out")

    def local(self) -> SgdSchedule:
        """Training on private data before the upload."""
        return SgdSchedule(
            self.local_epochs,
            self.batch_size,
            self.learning_rate,
            self.momentum,
            self.weight_decay,
            milestones=self.milestones,
            augment=self.augment,
            precision=self.precision,
            domain_randomisation=self.domain_randomisation,
        )


# (context, the seed of the first weights, the site's data) -> the site's model, and numbers to watch
TrainOnce = Callable[[StepContext, int, SiteData[Images]], tuple[State, Mapping[str, float]]]


@dataclass(frozen=True)
class Uploaded:
    """The seed of the weights that all sites begin with; after the upload the models, and the numbers of
    training images, by site."""

    seed: State = field(default_factory=dict)
    models: Mapping[str, State] = field(default_factory=dict)
    images: Mapping[str, float] = field(default_factory=dict)

    def student(
        self, start: Start, network: NetworkSpec, draw: torch.Generator, sites: Collection[str]
    ) -> State:
        """The weights that a student of some uploads begins with: their plain mean, the one of the largest
        site (the first of equals), or a draw."""
        if start == "random":
            return state_of(new_network(network, draw))
        if start == "largest_client":
            return self.models[max(sites, key=lambda site: self.images[site])]
        mean = StreamingMean()
        for site in sites:
            mean.add(self.models[site], 1.0)
        return mean.result()


@dataclass(frozen=True)
class Own:
    """What a site uploaded."""

    model: State = field(default_factory=dict)


class Upload(Part):
    """The phase `local`, of every site. A site `keeps` its model if it needs it again.

    A site sends its summary statistics beside it: there is no phase before.
    """

    def __init__(self, network: NetworkSpec, train: TrainOnce, *, keeps: bool) -> None:
        self.network = network
        self.train = train
        self.keeps = keeps
        self.slot = Slot("upload", Uploaded())
        self.described = Slot("describe", Described())
        self.own = Slot("own", Own())

    @override
    def begin(self, context: StepContext, server: Memory) -> Memory:
        """The seed, from that of the run."""
        seed = torch.randint(2**62, (1,), generator=context.generator("weights"))
        return self.slot.write(server, Uploaded({"seed": seed}))

    @override
    def plan(self) -> Plan:
        groups = (SEED,), (MODEL, *GROUPS)
        return (Phase("local", 1, *groups, self.step, self.keep, self.send_seed, self.expect, everyone=True),)

    def send_seed(self, server: Memory, site: str) -> Mapping[str, State]:
        """The seed, to every site the same."""
        return {SEED.name: self.slot.read(server).seed}

    def expect(self, server: Memory) -> Mapping[str, State]:
        """An upload is a network of the task."""
        return {MODEL.name: shapes_of(self.network)}

    def step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData[Images]
    ) -> ClientResult:
        """Train once."""
        model, metrics = self.train(context, int(received[SEED.name]["seed"]), data)
        kept = self.own.write(memory, Own(model)) if self.keeps else None
        uploads = {MODEL.name: model, **describe(data, context.bounds)}
        return ClientResult(uploads, float(len(data.train)), kept, metrics)

    def keep(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Keep the uploads."""
        models = {site: dict(result.collected[MODEL.name][site]) for site in result.weights}
        after = self.slot.write(server, Uploaded(models=models, images=result.weights))
        return self.described.write(after, Described.of(result))

    def uploaded(self, memory: Memory) -> State:
        """The model that a site uploaded. Raises SiteFailed without one."""
        if not self.own.holds(memory):
            raise SiteFailed("it has no model of its own: it dropped out of the phase 'local'")
        return self.own.read(memory).model

    @override
    def publish(self, server: Memory) -> Added:
        return self.described.read(server).added()


@dataclass(frozen=True)
class Counted:
    """The right answers by class on validation images, by site, as `ClassCounts.state` has them."""

    counts: Mapping[str, State] = field(default_factory=dict)

    @classmethod
    def of(cls, result: RoundResult) -> Counted:
        """What the sites that let them out sent as `COUNTS`."""
        return cls({site: dict(state) for site, state in result.collected.get(COUNTS.name, {}).items()})

    def metrics(self, sites: Collection[str] | None = None) -> dict[str, float]:
        """The validation metrics of all sites together, or of some."""
        found = [ClassCounts(**c) for site, c in self.counts.items() if sites is None or site in sites]
        return sum(found[1:], found[0]).metrics("val_") if found else {}


class OneShot(Parted):
    """One upload of every hospital, of which a method makes what it will."""

    keeps: ClassVar[bool] = False  # whether a hospital needs its model after the upload

    def __init__(self, config: OneShotConfig, task: Task) -> None:
        self.config = config
        self.task = task
        self.classes = len(task.classes)
        self.shape = (task.in_channels, *task.size)
        self.network = config.network_for(task)
        self.upload = Upload(self.network, self.train_once, keeps=self.keeps)
        self.parts: Sequence[Part] = (self.upload,)

    def train_once(
        self, context: StepContext, seed: int, data: SiteData[Images]
    ) -> tuple[State, Mapping[str, float]]:
        """f_k, trained on the site's images."""
        common = self.config.common_start
        start = torch.Generator().manual_seed(seed) if common else context.generator("weights")
        network = new_network(self.network, start).to(context.device)
        loss = train_classifier(network, data.train, self.config.local(), context.generator("train"))
        counts = ClassCounts.of(network, data.val, self.classes)
        return state_of(network), {"loss": loss, **counts.metrics("local_val_")}

    def expect_counts(self, server: Memory) -> Mapping[str, State]:
        """Counts are of the task's classes."""
        return {COUNTS.name: ClassCounts(*torch.zeros(2, self.classes, dtype=torch.float64)).state()}


def check_student(what: str, student: nn.Module, rate: str) -> None:
    """Raise TrainingError where a student's training diverged. `rate` names the field to lower."""
    bad = [key for key, tensor in student.state_dict().items() if not bool(torch.isfinite(tensor).all())]
    if bad:
        raise TrainingError(f"{what} diverged ('{bad[0]}' is not finite): lower {rate} and start another run")
