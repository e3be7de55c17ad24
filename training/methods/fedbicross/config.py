"""What FedBiCross takes: every number of the paper, and a name for all that it leaves open.

The defaults suit a laptop: 20 passes over a site's images, and two trajectories. The paper's sizes are
PAPER_SIZES, and its letter is LITERAL_READING: there the student starts at random and learns in the six outer
steps only. `recipe: paper` takes both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from personalization.fedbicross.clustering import Mixing
from personalization.fedbicross.inversion import InversionWeights
from personalization.fedbicross.synthesis import SynthesisConfig
from training.local.classifier import SgdSchedule
from training.methods.one_shot import OneShotConfig

PAPER_SIZES: Mapping[str, Any] = {
    "width": 64,
    "local_epochs": 100,
    "learning_rate": 0.001,
    "milestones": (),
    "batch_size": 128,
    "steps": 500,
    "synthesis_batch": 256,
    "personal_epochs": 10,
}
LITERAL_READING: Mapping[str, Any] = {
    "min_silhouette": -1,
    "epochs": 1,
    "bn_per_member": False,
    "jitter": False,
    "labels": "uniform",
    "init": "random",
    "every_step": False,
    "outer_scaling": "plain",
}


class FedBiCrossConfig(OneShotConfig):
    """See the module; groups of fields follow the stages."""

    probes: int = Field(256, ge=1, description="noise images on which the models' outputs are compared")
    probe_output: Literal["softmax", "logits"] = "softmax"
    min_silhouette: float = Field(0.05, ge=-1, le=1, description="below it, one cluster")
    clusters: int | None = Field(None, ge=1, description="this many instead of the silhouette's choice")

    epochs: int = Field(2, ge=1, description="trajectories from fresh noise, one after the other")
    steps: int = Field(50, ge=1, description="T, steps of one trajectory")
    synthesis_batch: int = Field(64, ge=4, description="B, images per cluster")
    image_rate: float = Field(0.05, gt=0, description="of Adam on the images")
    tv_weight: float = Field(2.5e-5, ge=0)
    bn_weight: float = Field(10.0, ge=0)
    bn_per_member: bool = Field(True, description="divide the batch-norm term by the cluster's size")
    jitter: bool = Field(True, description="roll the images by up to 2 pixels each step")
    labels: Literal["balanced", "uniform"] = "balanced"
    checkpoint_every: int = Field(10, ge=1, description="steps between checkpoints; decides no result")

    init: Literal["cluster_average", "largest_client", "random"] = "cluster_average"
    temperature: float = Field(20.0, gt=0)
    every_step: bool = Field(True, description="the student learns at every step, not at outer ones only")
    inner_steps: int = Field(1, ge=1)
    inner_rate: float = Field(0.01, gt=0, description="eta_G, of plain SGD on the student")
    bilevel: bool = Field(True, description="learn w; else it stays as it starts")
    mixing: Mixing = Field(
        "uniform",
        description="where w starts: 1/K each; by the similarity of the clusters' answers to noise; or "
        "intra, each cluster with its own images alone",
    )
    outer_steps: int = Field(6, ge=1, description="S, steps of a trajectory in which w is learned")
    outer_rate: float = Field(0.1, gt=0, description="eta_w")
    outer_scaling: Literal["normalised", "plain"] = "normalised"
    train_share: float = Field(0.8, gt=0, lt=1, description="of B, for the inner step; the rest validates")

    personal_epochs: int = Field(5, ge=0, description="0: a personal model is its cluster's")
    personal_rate: float = Field(0.001, gt=0)
    cluster_weight: float = Field(0.5, ge=0)
    own_weight: float = Field(0.3, ge=0)
    personal_temperature: float = Field(1.0, gt=0)

    PAPER: ClassVar[Mapping[str, Any]] = {
        **PAPER_SIZES,
        **LITERAL_READING,
        "domain_randomisation": "none",
    }

    @model_validator(mode="after")
    def _strata(self) -> FedBiCrossConfig:
        if self.outer_steps > self.steps:
            raise ValueError(f"outer_steps: expected at most steps ({self.steps}), found {self.outer_steps}")
        return self

    def personal(self) -> SgdSchedule:
        """Stage 3: a constant rate, and images as they are, so that the teachers are asked once."""
        return SgdSchedule(
            self.personal_epochs,
            self.batch_size,
            self.personal_rate,
            self.momentum,
            self.weight_decay,
            milestones=(),
            precision=self.precision,
        )

    def synthesis(self) -> SynthesisConfig:
        """Stage 2."""
        return SynthesisConfig(
            steps=self.steps,
            batch_size=self.synthesis_batch,
            image_rate=self.image_rate,
            weights=InversionWeights(self.tv_weight, self.bn_weight, self.bn_per_member),
            jitter=self.jitter,
            labels=self.labels,
            temperature=self.temperature,
            every_step=self.every_step,
            inner_steps=self.inner_steps,
            inner_rate=self.inner_rate,
            bilevel=self.bilevel,
            outer_steps=self.outer_steps,
            outer_rate=self.outer_rate,
            outer_scaling=self.outer_scaling,
            train_share=self.train_share,
            precision=self.precision,
        )
