"""FedOAP's rivals on its own backbone, with its loss and optimiser: what differs is what stays at a site.

FedPer (Arivazhagan et al., 2019) keeps the decoder and the head; FedRep (Collins et al., 2021) keeps the same
and trains the two in turn; FedBN (Li et al., 2021) keeps batch norm, and so has a backbone with it, FedOAP's
having none. What stays is split from what travels by the code of `training.methods`. FedAvg is FedOAP with
neither attention nor adapter and without a second stage. All begin with the same drawn network at every site.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from model_store.manifest import NetworkSpec
from model_store.task import Task
from personalization.networks import FedOapUNet
from personalization.networks.registry import names, register
from personalization.precision import Precision, mixed_precision, to_float32
from training.algorithm import ClientResult, Memory, Phase, ServerStage, State, StepContext
from training.data.segmentation.dataset import SiteData, SliceSet
from training.methods.common.export import EXPORT, PERSONAL
from training.methods.common.local_training import network_of, shapes_of
from training.methods.common.personal_parts import join_own, keep_own, own_part
from training.methods.common.state_tree import join, part
from training.methods.fedavg import WEIGHTS
from training.methods.fedbn import norm_tensors
from training.methods.fedoap.config import FedOapConfig
from training.methods.fedoap.method import FedOap

BODY = ("encoder", "bottleneck")
HEAD = ("upconv", "decoder", "head")
VALIDATED = 4  # one round in so many


class Sparing(FedOap):
    """FedOAP that validates few rounds of stage 1, and the end of it: nothing is chosen by them."""

    def client_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """The phase's step."""
        if context.phase == "train" and context.round % VALIDATED:
            data = _without_validation(data)
        return super().client_step(context, received, memory, data)


class FirstStage(Sparing):
    """FedOAP up to where stage 2 begins: a copy of this run's folder goes on with any second stage."""

    def plan(self) -> tuple[Phase | ServerStage, ...]:
        """The plan, broken off."""
        return tuple(step for step in super().plan() if step.name not in ("finetune", "export"))


class FedPer(Sparing):
    """What comes after the bottleneck stays at its site."""

    def is_own(self, name: str) -> bool:
        """Whether a tensor of the state stays."""
        return name.startswith(HEAD)

    def expected(self, phase: Phase, server: Memory) -> Mapping[str, State]:
        """What is shared; an exported model is a whole network."""
        if phase.name == EXPORT.name:
            return {PERSONAL.name: shapes_of(self.network)}
        shared = part(server.tensors, "global").items()
        return {WEIGHTS.name: {name: tensor for name, tensor in shared if not self.is_own(name)}}

    def client_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """The phase's step on a site's whole network."""
        result = self.whole_step(context, join_own(received, own_part(memory)), memory, data)
        return keep_own(result, memory, self.is_own)

    def whole_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """The phase's step, before the parts are split."""
        return super().client_step(context, received, memory, data)


class FedBn(FedPer):
    """Batch norm stays: weights, biases and running statistics."""

    def __init__(self, config: FedOapConfig, task: Task) -> None:
        super().__init__(config, task)
        name = _registered("benchmark-batch-norm-unet", BatchNormUNet)
        self.network = self.network.model_copy(update={"name": name})
        self._norms = norm_tensors(self.network)

    def is_own(self, name: str) -> bool:
        """Whether a tensor of the state stays."""
        return name in self._norms


class FedRep(FedPer):
    """FedPer that trains what stays in the first half of a round, and what is shared in the second."""

    def __init__(self, config: FedOapConfig, task: Task) -> None:
        super().__init__(config, task)
        if config.local_steps % 2:
            raise ValueError(
                f"FedRep halves a round's steps: expected an even number, found {config.local_steps}"
            )
        half = config.model_copy(update={"local_steps": config.local_steps // 2})
        self._turns = {turn: Sparing(half, task) for turn in ("head", "body")}
        for turn, frozen in (("head", BODY), ("body", HEAD)):
            name = _registered("benchmark-partly-frozen-unet", PartlyFrozenUNet)
            arguments = {**self.network.arguments, "frozen": list(frozen)}
            self._turns[turn].network = NetworkSpec(name=name, arguments=arguments)

    def whole_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """The phase's step on a site's whole network; in training both turns, one after the other."""
        if context.phase != "train":
            return super().whole_step(context, received, memory, data)
        kept: dict[str, State] = {}
        facts: dict[str, Any] = {}
        results: list[ClientResult] = []
        for turn, method in self._turns.items():
            own = Memory(part(memory.tensors, turn), memory.facts.get(turn, {}))
            draws = replace(context, generator=_for_a_turn(context, turn))
            results.append(method.client_step(draws, received, own, data))
            assert results[-1].memory is not None
            kept[turn], facts[turn] = results[-1].memory.tensors, results[-1].memory.facts
            received = {**received, WEIGHTS.name: results[-1].uploads[WEIGHTS.name]}
            data = _without_validation(data)
        first, last = results
        uploads = {**first.uploads, WEIGHTS.name: last.uploads[WEIGHTS.name]}
        return replace(first, uploads=uploads, memory=Memory(join(kept), facts))


class BatchNormUNet(FedOapUNet):
    """FedOAP's backbone with batch normalisation in place of instance normalisation."""

    def __init__(self, in_channels: int, width: int = 64, **options: Any) -> None:
        super().__init__(in_channels, width, **options)
        for module in [*self.modules()]:
            for name, child in [*module.named_children()]:
                if isinstance(child, nn.InstanceNorm2d):
                    setattr(module, name, nn.BatchNorm2d(child.num_features))


class PartlyFrozenUNet(FedOapUNet):
    """FedOAP's network, of which what begins with one of `frozen` is not trained."""

    def __init__(self, in_channels: int, width: int = 64, *, frozen: Sequence[str], **options: Any) -> None:
        super().__init__(in_channels, width, **options)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.startswith(tuple(frozen)))


class TrainedIn(FedOapUNet):
    """FedOAP's network with mixed precision in training, as `FedOap.logits` has it."""

    def __init__(self, precision: Precision, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._precision = precision

    @classmethod
    def of(cls, spec: NetworkSpec, state: State, device: torch.device, precision: Precision) -> TrainedIn:
        """A network with a copy of these weights."""
        with torch.device("meta"):
            network = cls(precision, **spec.arguments)
        # What `network_of` copied, laid out in memory as it does.
        network.load_state_dict(network_of(spec, state, device).state_dict(), assign=True)
        return network

    def segment(self, image_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """As FedOAP's; logits are float32."""
        if not self.training:
            return super().segment(image_BCHW)
        with mixed_precision(self._precision, image_BCHW.device):
            logits, mass = super().segment(image_BCHW)
        return to_float32(logits), mass


def _registered(name: str, network: type[nn.Module]) -> str:
    """Its name, known to the registry from the first use on: importing a benchmark registers nothing."""
    if name not in names():
        register(name)(network)
    return name


def _for_a_turn(context: StepContext, turn: str) -> Any:
    """Draws of its own for each turn of a round."""
    return lambda purpose: context.generator(f"{turn} {purpose}")


def _without_validation(data: SiteData) -> SiteData:
    val = data.val
    return replace(data, val=SliceSet(val.images[:0], val.targets[:0], (), (), ()))
