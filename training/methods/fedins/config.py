"""What FedIns takes, and how its run finds its backbone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from typing_extensions import override

from model_store.store import Store
from model_store.task import Task
from personalization.fedins import InstanceAdaptive, PromptAdaptive
from personalization.networks import BlockBackbone, outline
from personalization.precision import Precision
from training.backbones import FrozenBackbone, find_backbone
from training.choices.loss import LossConfig
from training.choices.randomisation import RandomisationConfig
from training.config import Descent
from training.errors import ConfigurationError

PoolPicking = Literal["instance", "batch", "random"]
Optimiser = Literal["adam", "sgd"]
_MISSING = "FedIns adapts a backbone that is already trained"


class FedInsConfig(LossConfig, RandomisationConfig):
    """What FedIns takes. The paper has 300 rounds of 10 local epochs by SGD at 0.01, batches of 32."""

    EARLIER: ClassVar[Mapping[str, Any]] = {**RandomisationConfig.EARLIER, "blocks": None}

    backbone: str | None = Field(
        None, description="NAME[@VERSION] in the store, or a file of a ViT's weights"
    )
    # Not part of the run's identity: the pinned reference holds the digest.
    store: Path | None = Field(
        None, exclude=True, description="where the backbone is; --out on a command line"
    )
    entries: int = Field(25, ge=1, description="M, the size of the pool")
    top: int = Field(3, ge=1, description="C, how many an image picks; all of them where M is smaller")
    key_weight: float = Field(0.1, ge=0, le=1, description="w of the key-matching term; 0 freezes the keys")
    local_epochs: int = Field(2, ge=1, description="passes over the site's images per round")
    batch_size: int = Field(16, ge=1)
    optimiser: Optimiser = Field("adam", description="adam, or the paper's plain sgd; restarted every round")
    learning_rate: float = Field(3e-3, gt=0)
    learning_rate_decay: float = Field(1.0, gt=0, le=1, description="factor per round")
    augment: bool = Field(
        False, description="random rotation and flip; queries and stems are then computed for every batch"
    )
    precision: Precision = Field(
        "float32", description="of training: bfloat16 takes half the time where the processor has it"
    )
    aggregation: Literal["sample", "uniform"] = Field(
        "sample", description="weight of a site: n_k / n (Eq. 8), or 1/K"
    )
    selection: Literal["best", "last"] = Field("best", description="which round's pool is published")
    centre: Literal["auto", "yes", "no"] = Field(
        "auto", description="subtract the federation's mean query before the cosine; auto: for a U-Net"
    )
    head: Literal["auto", "backbone", "drawn"] = Field(
        "auto", description="where the pool's heads start; auto: at the backbone's, if it knows the task"
    )
    frequency_penalty: float = Field(
        0.0,
        ge=0,
        description="in training, lowers a key's similarity by this times the share of the images that "
        "picked it in the round before",
    )
    routing: PoolPicking = Field(
        "instance",
        description="batch (one mean for a whole batch) and random are controls, and not published",
    )
    adapter: Literal["ssf", "prompt"] = Field(
        "ssf",
        description="what an entry adapts a ViT by: scales and shifts, or prompt tokens before every block, "
        "which are the paper's ablation and not published",
    )
    blocks: int | None = Field(
        None,
        ge=1,
        description="how many of a ViT's last blocks are adapted; all without. A site makes what the others "
        "compute once, so that training takes the time of these blocks alone, unless images are changed",
    )
    prompts: int = Field(10, ge=1, description="tokens per block of an entry, with adapter prompt")

    @override
    def prepared(self, store: Store, task: Task, name: str) -> FedInsConfig:
        """`pinned`, for a pool that is published. Raises ConfigurationError, for a control too."""
        controls = [("routing", self.routing, "instance"), ("adapter", self.adapter, "ssf")]
        found = [
            f"{field}: '{value}' is a control for benchmarks, expected '{expected}'"
            for field, value, expected in controls
            if value != expected
        ]
        if found:
            raise ConfigurationError("what is trained here is published, and a control is not", found)
        return self.pinned(store, task, name)

    @override
    def at_hospital(self, store: Path | None) -> FedInsConfig:
        if store is None:
            raise ConfigurationError(
                "this hospital cannot take part in the operator's run",
                ["the method adapts a backbone: give this hospital's store, which has it, with --store"],
            )
        return self.model_copy(update={"store": store})

    @override
    def descent(self) -> Descent:
        return Descent(weights=self.frozen.manifest.lineage.weights)

    def pinned(self, store: Store, task: Task, name: str) -> FedInsConfig:
        """With the backbone resolved to one digest in `store`. Raises ConfigurationError."""
        found = find_backbone(store, self.backbone, task, name)
        known = found.manifest.network.arguments["classes"]
        if self.head == "backbone" and known != len(task.classes):
            raise ConfigurationError(
                "the pool's heads cannot start at the backbone's",
                [f"head: it has {known} classes, the task {len(task.classes)}; expected 'auto' or 'drawn'"],
            )
        if self.blocks is not None:
            spec = found.manifest.network
            backbone = outline(spec.name, **spec.arguments)
            depth = backbone.depth if isinstance(backbone, BlockBackbone) else 0
            if self.blocks > depth:
                expected = f"1 to {depth}, which the backbone has" if depth else f"none with a {spec.name}"
                raise ConfigurationError(
                    "these blocks cannot be adapted", [f"blocks: expected {expected}, found {self.blocks}"]
                )
        return self.model_copy(update={"backbone": found.reference, "store": found.root})

    def network(self, classes: int, device: torch.device) -> InstanceAdaptive:
        """A pool of zeros on the backbone. Raises NetworkError for prompts on another network than a ViT."""
        backbone = self.frozen.load(device)
        if self.adapter == "prompt":
            found: InstanceAdaptive = PromptAdaptive(
                backbone, classes, self.entries, self.top, self.prompts, blocks=self.blocks
            )
        else:
            found = InstanceAdaptive(backbone, classes, self.entries, self.top, blocks=self.blocks)
        found.pool.to(device)
        return found

    @property
    def frozen(self) -> FrozenBackbone:
        """The backbone. Raises ConfigurationError when none was pinned."""
        if self.backbone is None or self.store is None or "@sha256:" not in self.backbone:
            raise ConfigurationError(
                _MISSING, ["backbone: expected NAME@sha256:… and a store; FedInsConfig.pinned resolves both"]
            )
        return FrozenBackbone(self.store, self.backbone)
