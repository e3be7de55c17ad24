"""What FedAvg takes, and every method that is made of it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from model_store.manifest import NetworkSpec
from model_store.task import Task
from personalization.errors import NetworkError
from personalization.losses import Loss
from personalization.networks.registry import builder
from personalization.networks.rotation import check_square
from personalization.precision import Precision
from training.choices.loss import LossConfig
from training.choices.randomisation import RandomisationConfig
from training.choices.start import StartConfig
from training.choices.volume import VolumeConfig
from training.errors import ConfigurationError
from training.local.registry import kind_of
from training.local.schedule import MOTION, OptimiserName, Schedule
from training.local.scores import Aggregation


class FedAvgConfig(LossConfig, RandomisationConfig, VolumeConfig, StartConfig):
    """What FedAvg takes. Defaults suit a laptop; the paper's are 100 rounds at width 32."""

    recipe: Literal["locum", "paper"] = Field(
        "locum", description="where the values that are not given come from: Locum's choice, or the paper"
    )
    local_epochs: int = Field(1, ge=1, description="passes over the site's slices per round")
    local_steps: int | None = Field(None, ge=1, description="batches per round, instead of local_epochs")
    least_steps: int = Field(10, ge=0, description="batches per round at least, where few slices make few")
    batch_size: int = Field(16, ge=1)
    optimiser: OptimiserName = Field("adam", description="restarted every round; sgd has momentum 0.9")
    learning_rate: float = Field(1e-3, gt=0, description="in the first half of the rounds")
    final_rate: float = Field(
        0.01, gt=0, le=1, description="share of it in the last round, by a cosine; 1 keeps it constant"
    )
    learning_rate_decay: float = Field(1.0, gt=0, le=1, description="factor per round, beside the cosine")
    amsgrad: bool = Field(False, description="of adam")
    augment: bool = Field(True, description="random rotation and flip in training")
    intensity: float = Field(
        1.0, ge=0, le=3, description="severity of the drawn scanners that slices go through; 0: none"
    )
    statistics: Literal["estimated", "averaged"] = Field(
        "estimated",
        description="the global model's batch norm: estimated on all sites' slices at the end, or averaged "
        "like its weights",
    )
    precision: Precision = Field(
        "float32", description="of training: bfloat16 takes half the time where the processor has it"
    )
    aggregation: Aggregation = Field("sample", description="weight of a site: n_k / n, or 1/K")
    selection: Literal["best", "last"] = Field("best", description="which round's model is published")

    EARLIER: ClassVar[Mapping[str, Any]] = {**RandomisationConfig.EARLIER, **VolumeConfig.EARLIER}
    SUITED: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "volumes": {
            "loss": "dice_ce",
            "batch_size": 2,
            "least_steps": 20,
            "optimiser": "adamw",
            "learning_rate": 3e-3,
        }
    }
    PAPER: ClassVar[Mapping[str, Any]] = {
        "least_steps": 0,
        "final_rate": 1.0,
        "intensity": 0.0,
        "domain_randomisation": "none",
        "statistics": "averaged",
    }

    def schedule(self, round_: int, task: Task, loss: Loss) -> Schedule:
        """How a site trains in a round, from 0."""
        steps = self.rounds * (self.local_steps or self.least_steps)
        strength = kind_of(task).augmentation(steps)
        held = self.rounds // 2
        passed = max(round_ - held, 0) / max(self.rounds - 1 - held, 1)
        cosine = self.final_rate + (1 - self.final_rate) * (1 + math.cos(math.pi * passed)) / 2
        return Schedule(
            epochs=self.local_epochs,
            steps=self.local_steps,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate * cosine * self.learning_rate_decay**round_,
            amsgrad=self.amsgrad,
            augment=self.augment,
            precision=self.precision,
            optimiser=self.optimiser,
            least_steps=self.least_steps,
            intensity=self.intensity * strength,
            loss=loss,
            randomise=self.randomises(round_),
            foreground=self.foreground,
            motion=MOTION.scaled(strength),
        )


class RotationHeadConfig(FedAvgConfig):
    """FedAvg with, if asked for, a head for test-time training."""

    rotation_head: bool = Field(
        False, description="whether the network learns to tell quarter turns, for the preset `ttt`"
    )

    EARLIER: ClassVar[Mapping[str, Any]] = {**FedAvgConfig.EARLIER, "rotation_head": False}

    @override
    def network_for(self, task: Task) -> NetworkSpec:
        """The network, with the head. Raises ConfigurationError for one without, or sides that differ."""
        spec = super().network_for(task)
        if not self.rotation_head:
            return spec
        try:
            if "rotation_head" not in inspect.signature(builder(spec.name)).parameters:
                raise NetworkError(f"expected a network that can have one, such as unet, found '{spec.name}'")
            check_square(task.input_shape)
        except NetworkError as error:
            raise ConfigurationError(
                f"rotation_head does not fit the task {task.name!r}", [str(error)]
            ) from error
        return spec.model_copy(update={"arguments": {**spec.arguments, "rotation_head": True}})
