"""MOON: Li, He, Song, Model-Contrastive Federated Learning, CVPR 2021.

FedAvg with another local loss: what a site's network makes of an image is drawn towards what the global model
makes of it, and away from what the site's model of its last round made of it (Eq. 3 and 4):

    h_k(w; w_g, w_prev) = L_k(w) + mu l_con
    l_con = -log( exp(s(z, z_glob) / t) / (exp(s(z, z_glob) / t) + exp(s(z, z_prev) / t)) )

with z of the image by w, z_glob by w_g and z_prev by w_prev, both in evaluation mode and without gradients, s
the cosine, and the mean over the batch. With mu = 0 the method is FedAvg. A site without an earlier round has
no such term: z_prev would be z_glob, and the gradient 0. The paper tunes mu among 0.1, 1, 5 and 10.

z is the input of the output layer. A classifier gets a projection head before it, as in the paper:
`personalization.networks.projected`, which is trained, averaged and published with all else. With
`projection: 0` the network stays as it is, and z is its features. The paper has no segmentation: there z is
the mean over the image of what enters the decoder, the bottleneck of a U-Net, without a projection. Images
pass three networks in place of one.

The authors' code (QinbinLi/MOON) has the same loss; its pool of several earlier models is left out, as in the
paper.

Shared:  what FedAvg shares.
Stays:   w_prev, as large as the weights; what stays in FedAvg.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from model_store.manifest import NetworkSpec
from model_store.task import Task
from personalization.networks import outline
from personalization.networks.capabilities import head_paths
from personalization.networks.projected import OUTPUT
from personalization.precision import Precision, mixed_precision, to_float32
from training.algorithm import State
from training.choices.fedavg import FedAvgConfig
from training.errors import ConfigurationError
from training.local.loop import Penalty, train_locally
from training.local.networks import network_of, state_of
from training.local.registry import kind_of
from training.local.schedule import Schedule
from training.methods.fedavg import FedAvg
from training.methods.registry import register
from training.parts.part import Slot
from training.parts.train import WEIGHTS, SiteRound, Update

# The paper's, of a classification.
_PROJECTION = 256


class MoonConfig(FedAvgConfig):
    """What MOON takes beside FedAvg's."""

    mu: float = Field(1.0, ge=0, description="weight of the contrastive term; 0 is FedAvg")
    contrast_temperature: float = Field(0.5, gt=0, description="t, by which the cosines are divided")
    projection: int | None = Field(
        None,
        ge=0,
        description="width of z behind a projection head; 0: the network's features as they are, which is "
        "all that a segmentation has. By default 256, and 0 of a segmentation",
    )
    weight_decay: float = Field(0.0, ge=0, description="of the local optimiser")

    PAPER: ClassVar[Mapping[str, Any]] = {
        **FedAvgConfig.PAPER,
        "local_epochs": 10,
        "batch_size": 64,
        "optimiser": "sgd",
        "learning_rate": 0.01,
        "weight_decay": 1e-5,
    }


@dataclass(frozen=True)
class Previous:
    """The model that a site sent last; empty before its first round."""

    model: State = field(default_factory=dict)


@register("moon", MoonConfig, kinds=("segmentation", "classification"))
class Moon(FedAvg):
    """FedAvg with the contrastive term.

    Raises ConfigurationError for a projection of a segmentation.
    """

    previous = Slot("previous", Previous())

    def __init__(self, config: MoonConfig, task: Task) -> None:
        super().__init__(config, task)
        self.config: MoonConfig = config
        paths = head_paths(outline(self.network.name, **self.network.arguments))
        self._compared = paths[0] if kind_of(task).dense else paths[-1]
        if self.network.name == "projected":
            self._compared = f"{paths[-1]}.{OUTPUT}"

    @override
    def architecture(self, task: Task) -> NetworkSpec:
        config = self.config
        assert isinstance(config, MoonConfig)
        plain = super().architecture(task)
        if kind_of(task).dense:
            if config.projection:
                raise ConfigurationError(
                    f"method moon does not fit the task '{task.name}'",
                    [
                        f"projection: expected 0 of a segmentation, found {config.projection}: its features "
                        "are compared as they are"
                    ],
                )
            return plain
        width = _PROJECTION if config.projection is None else config.projection
        if not width:
            return plain
        arguments = {"network": plain.name, "arguments": plain.arguments, "projection": width}
        return NetworkSpec(name="projected", arguments=arguments)

    @override
    def schedule(self, round_: int) -> Schedule:
        return replace(super().schedule(round_), weight_decay=self.config.weight_decay)

    @override
    def update(self, network: nn.Module, here: SiteRound) -> Update:
        """FedAvg's update with the contrastive term; the site keeps the model that it sends."""
        config = self.config
        schedule, draw = self.schedule(here.context.round), here.context.generator("train")
        data, device = here.data.train, here.context.device
        previous = self.previous.read(here.memory).model
        if config.mu and previous:
            with contrast(
                network,
                network_of(self.network, here.received[WEIGHTS.name], device),
                network_of(self.network, previous, device),
                self._compared,
                mu=config.mu,
                temperature=config.contrast_temperature,
                precision=config.precision,
            ) as term:
                loss = train_locally(network, data, schedule, draw, term)
        else:
            loss = train_locally(network, data, schedule, draw)
        after = state_of(network)
        return Update(after, loss, memory=self.previous.write(here.memory, Previous(after)))


def contrastive_loss(z_BF: Tensor, global_BF: Tensor, previous_BF: Tensor, temperature: float) -> Tensor:
    """Compute l_con, the mean over the batch."""
    near, far = (functional.cosine_similarity(z_BF, other) for other in (global_BF, previous_BF))
    logits_B2 = torch.stack([near, far], dim=1) / temperature
    return functional.cross_entropy(logits_B2, torch.zeros_like(near, dtype=torch.long))


@contextmanager
def representation(network: nn.Module, path: str) -> Iterator[list[Tensor]]:
    """Within the context, the list has the images of the network's last pass, and their z [B, F]: what
    entered the module at `path`, the mean over its spatial axes."""
    seen: list[Tensor] = []

    def images(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen[:] = [inputs[0]]

    def features(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        found = to_float32(inputs[0])
        seen[1:] = [found.flatten(2).mean(dim=2) if found.ndim > 2 else found]

    handles = [
        network.register_forward_pre_hook(images),
        network.get_submodule(path).register_forward_pre_hook(features),
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def contrast(
    network: nn.Module,
    w_g: nn.Module,
    previous: nn.Module,
    path: str,
    *,
    mu: float,
    temperature: float,
    precision: Precision = "float32",
) -> Iterator[Penalty]:
    """Within the context, the penalty is mu l_con of the network's last batch.

    `path` is that of the module that takes z, in all three networks.
    """
    for anchor in (w_g, previous):
        anchor.eval().requires_grad_(False)
    with (
        representation(network, path) as own,
        representation(w_g, path) as from_global,
        representation(previous, path) as from_previous,
    ):

        def term() -> Tensor:
            images, z = own
            with torch.no_grad(), mixed_precision(precision, images.device):
                w_g(images)
                previous(images)
            return mu * contrastive_loss(z, from_global[1], from_previous[1], temperature)

        yield term
