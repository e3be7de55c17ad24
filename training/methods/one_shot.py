"""Methods in which a hospital uploads its classifier once: its training, and what the server begins with.

Every hospital trains a classifier, by default a ResNet-18, on its images and sends it, with its batch-norm
statistics. All begin alike unless the configuration says otherwise: weights that begin apart have no average.
The sites are sent a seed for it, 8 bytes. What the server makes of the uploads is the method's.

The server keeps the uploads as `model/SITE/...`, and the sizes of the sites in the fact `sites`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import nn
from typing_extensions import override

from model_store.manifest import NetworkSpec
from model_store.task import Task
from personalization.precision import Precision
from personalization.state import StreamingMean
from training.algorithm import (
    Algorithm,
    ClientResult,
    Group,
    Memory,
    Phase,
    RoundResult,
    State,
    StepContext,
)
from training.choices.network import NetworkConfig
from training.choices.randomisation import RandomisationConfig
from training.errors import TrainingError
from training.local.classifier import ClassCounts, SgdSchedule, train_classifier
from training.local.images import Images
from training.local.networks import new_network, shapes_of, state_of
from training.local.site import SiteData
from training.parts.describe import STATISTICS, describe, merge_described
from training.state_tree import join, part

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


class OneShot(Algorithm):
    """The phase `local`, of every site."""

    def __init__(self, config: OneShotConfig, task: Task) -> None:
        self.config = config
        self.task = task
        self.classes = len(task.classes)
        self.shape = (task.in_channels, *task.size)
        self.network = config.network_for(task)

    @override
    def initial(self, context: StepContext) -> Memory:
        """The seed of the weights that all sites begin with."""
        return Memory({"seed": torch.randint(2**62, (1,), generator=context.generator("weights"))})

    def local_phase(self) -> Phase:
        """The one upload."""
        return Phase(
            "local",
            1,
            (SEED,),
            (MODEL, STATISTICS),
            self.train_once,
            self.keep_uploads,
            self.send_seed,
            self.expect_model,
            everyone=True,
        )

    def send_seed(self, server: Memory, site: str) -> Mapping[str, State]:
        """The seed, to every site the same."""
        return {SEED.name: {"seed": server.tensors["seed"]}}

    def expect_model(self, server: Memory) -> Mapping[str, State]:
        """An upload is a network of the task."""
        return {MODEL.name: shapes_of(self.network)}

    def expect_counts(self, server: Memory) -> Mapping[str, State]:
        """Counts are of the task's classes."""
        none = torch.zeros(self.classes, dtype=torch.float64)
        return {COUNTS.name: ClassCounts(none, none).state()}

    def train_once(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData[Images]
    ) -> ClientResult:
        """Train once. The site's memory has the upload as `own/...`."""
        start = torch.Generator().manual_seed(int(received[SEED.name]["seed"]))
        if not self.config.common_start:
            start = context.generator("weights")
        network = new_network(self.network, start).to(context.device)
        loss = train_classifier(network, data.train, self.config.local(), context.generator("train"))
        counts = ClassCounts.of(network, data.val, self.classes)
        own = state_of(network)
        weight = float(len(data.train))
        return ClientResult(
            {MODEL.name: own, **describe(data, weight).uploads},
            weight,
            Memory(join({"own": own})),
            {"loss": loss, **counts.metrics("local_val_")},
        )

    def keep_uploads(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Keep the uploads by site."""
        models = {f"model/{site}": dict(state) for site, state in result.collected[MODEL.name].items()}
        return Memory(join(models), {"sites": dict(result.weights), **merge_described(result)})


def uploaded(server: Memory) -> dict[str, State]:
    """The uploads that the server keeps, by site."""
    return {site: part(server.tensors, f"model/{site}") for site in server.facts["sites"]}


def first_student(
    start: Start,
    network: NetworkSpec,
    models: Sequence[State],
    sizes: Sequence[float],
    generator: torch.Generator,
) -> State:
    """The weights that a student of some uploads begins with: their plain mean, the one of the largest site
    (the first of equals), or a draw. `sizes` are those of the models' sites."""
    if start == "random":
        return state_of(new_network(network, generator))
    if start == "largest_client":
        return dict(models[max(range(len(models)), key=lambda index: sizes[index])])
    mean = StreamingMean()
    for model in models:
        mean.add(model, 1.0)
    return mean.result()


def check_student(what: str, student: nn.Module, rate: str) -> None:
    """Raise TrainingError where a student's training diverged. `rate` names the field to lower."""
    bad = [key for key, tensor in student.state_dict().items() if not bool(torch.isfinite(tensor).all())]
    if bad:
        raise TrainingError(f"{what} diverged ('{bad[0]}' is not finite): lower {rate} and start another run")
