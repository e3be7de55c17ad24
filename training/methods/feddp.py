"""FedDP: Wang et al., FedDP: Dual Personalization in Federated Medical Image Segmentation, IEEE TMI 2023.

Stage 1, local query: self-attention of which the queries are personal; keys, values and all else are
averaged. The paper has a transformer, PVTv2, with queries in every layer. Here they are the query stage and
W_q at the bottleneck of FedOAP's U-Net without its adapter and its bank, so that both train one network.

Stage 2, inconsistency-guided calibration: every site trains its model further where the sites' models differ,

    U = std_k p_k(x) / max std_k p_k(x)            L = Dice(p, y) + lambda mean(U BCE(p, y))

over the models of the end of stage 1, its own among them. So these meet: in the phase `collect` the sites
that consent send their personal parts, and each of them gets all of these. A site without consent keeps the
model of stage 1; of fewer than two models there is no U, and nothing is calibrated.

The authors' code (jcwang123/FedDP, scripts/train_fed.py, train_ft.py and trainer_utils.py at its last commit)
clips values of gradients at 1 in stage 1, trains there with Dice, and divides by the maximum of the batch
(`inconsistency: batch`). Its lambda is in no file that is public; validation should choose it. It steps by
Adam at one rate; here are FedOAP's steps, AdamW with a cosine. `first_loss: fedoap` is ours: FedOAP's loss in
stage 1, for a fairer comparison.

Shared:  all but the personal part; Dice on validation patients; once, summary statistics; once, the scores of
         the site's model on its test and validation patients. In the phase `collect`, and only at sites that
         consent: the personal part, which the other consenting sites get. In the phase `export`, by the same
         consent: the site's whole model.
Stays:   the personal part until then; AdamW's moments; images, masks, and everything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from model_store.manifest import NetworkSpec
from model_store.task import Task
from personalization.feddp import calibration_loss, dice_loss, inconsistency
from personalization.networks import FedOapUNet
from training.algorithm import ClientResult, Group, Memory, Phase, Plan, RoundResult, State, StepContext
from training.local.site import SiteData
from training.methods.fedoap.config import FedOapConfig
from training.methods.fedoap.method import FedOap, attention
from training.methods.fedoap.models import by_site, check_task, on_device
from training.methods.fedoap.stages import FirstStage, Loss, SecondStage, logits
from training.methods.registry import register
from training.parts.part import Slot
from training.parts.train import WEIGHTS
from training.state_tree import join

MEMBERS = Group("members", "weights", "collect")
# Fewer models have no deviation.
LEAST_MODELS = 2


class FedDpConfig(FedOapConfig):
    """FedOAP's fields for its network, its steps and its rounds of stage 2, and FedDP's own."""

    attention: Literal[True] = Field(True, description="always: its queries are what is personal")
    adapter: Literal[False] = Field(False, description="none: it is FedOAP's")
    kv: Literal["averaged"] = Field("averaged", description="keys and values are averaged, without a bank")
    fine_tune_loss: Literal["plain"] = Field("plain", description="calibration, with the weight below")
    calibration_weight: float = Field(1.0, ge=0, description="lambda, of the weighted cross-entropy")
    first_loss: Literal["dice", "fedoap"] = Field(
        "dice", description="of stage 1: Dice alone, or FedOAP's, which adds cross-entropy"
    )
    inconsistency: Literal["image", "batch"] = Field(
        "image", description="the maximum that U is divided by is that of the image, or of the batch"
    )
    gradient_clip: float | None = Field(
        1.0, gt=0, description="bound on each value of a gradient of stage 1; null: none"
    )

    EARLIER: ClassVar[Mapping[str, Any]] = {**FedOapConfig.EARLIER, "first_loss": "dice"}


@dataclass(frozen=True)
class Members:
    """The personal parts of the sites that consent."""

    personal: Mapping[str, State] = field(default_factory=dict)


class LocalQuery(FirstStage):
    """FedOAP's first stage with FedDP's loss, and gradients of which each value is clipped."""

    def __init__(self, config: FedDpConfig, task: Task, spec: NetworkSpec) -> None:
        super().__init__(config, task, spec)
        self.config: FedDpConfig = config

    @override
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self.config.first_loss == "dice":
            return dice_loss(logits, targets)
        return super().loss(logits, targets)

    @override
    def network(self, context: StepContext, model: State, received: Mapping[str, State]) -> FedOapUNet:
        network, clip = super().network(context, model, received), self.config.gradient_clip
        if clip is not None:
            for parameter in network.parameters():
                parameter.register_hook(partial(torch.clamp, min=-clip, max=clip))  # type: ignore[no-untyped-call]
        return network


class Calibration(SecondStage):
    """The collection of the sites' models, and the rounds of calibration by them."""

    def __init__(self, first: LocalQuery) -> None:
        super().__init__(first)
        self.config: FedDpConfig = first.config
        self.members = Slot("members", Members())

    @override
    def tuning(self) -> Plan:
        collect = Phase(
            "collect", 1, (), (MEMBERS,), self.collect, self.keep_members, expected=self.expect_members
        )
        rounds, downloads = self.config.fine_tune_rounds, (WEIGHTS, MEMBERS)
        calibrate = Phase("calibrate", rounds, downloads, (), self.step, broadcast=self.send_members)
        return tuple(replace(phase, consent=True, everyone=True) for phase in (collect, calibrate))

    def expect_members(self, server: Memory) -> Mapping[str, State]:
        """A personal part is one like that which was drawn."""
        return {MEMBERS.name: self.first.slot.read(server).drawn}

    def send_members(self, server: Memory, site: str) -> Mapping[str, State]:
        """What all models share, and their personal parts."""
        gamma, members = self.first.slot.read(server).gamma, self.members.read(server)
        return {WEIGHTS.name: gamma, MEMBERS.name: join(members.personal)}

    def collect(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """Send the personal part of the model of stage 1. Raises SiteFailed without one."""
        return ClientResult({MEMBERS.name: self.first.split(self.own(memory).model)[1]}, weight=1.0)

    def keep_members(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Keep the personal parts, by site."""
        return self.members.write(server, Members(result.collected.get(MEMBERS.name, {})))

    @override
    def step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """A round of stage 2. Without other models, nothing changes."""
        if len(by_site(received[MEMBERS.name])) < LEAST_MODELS:
            return ClientResult({}, weight=1.0)
        return super().step(context, received, memory, data)

    @override
    def loss(self, context: StepContext, received: Mapping[str, State], network: FedOapUNet) -> Loss:
        """L, with U over the models of all members."""
        config, gamma = self.config, received[WEIGHTS.name]
        models = [
            on_device(self.first.spec, {**gamma, **personal}, {}, context.device).eval()
            for personal in by_site(received[MEMBERS.name]).values()
        ]

        def loss(images: Tensor, targets: Tensor) -> Tensor:
            with torch.no_grad():
                answers = [torch.sigmoid(logits(config, model, images)) for model in models]
            differ = inconsistency(torch.stack(answers), config.inconsistency)
            own = logits(config, network, images)
            return calibration_loss(own, targets, differ, config.calibration_weight)

        return loss


@register(
    "feddp",
    FedDpConfig,
    attention=attention,
    refused={"volumes": "its queries are those of a 2-D U-Net's bottleneck"},
)
class FedDp(FedOap):
    """FedDP on FedOAP's network, for a task with one foreground class."""

    stages = (LocalQuery, Calibration)

    def __init__(self, config: FedDpConfig, task: Task) -> None:
        check_task(task, "feddp")
        super().__init__(config, task)
