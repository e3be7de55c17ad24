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
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from model_store.task import Task
from personalization.feddp import calibration_loss, dice_loss, inconsistency
from personalization.networks import FedOapUNet
from training.algorithm import ClientResult, Group, Memory, Phase, Plan, RoundResult, State, StepContext
from training.local.site import SiteData
from training.methods.fedavg import WEIGHTS
from training.methods.fedoap import client as local
from training.methods.fedoap import models
from training.methods.fedoap.config import FedOapConfig
from training.methods.fedoap.method import FedOap, attention
from training.methods.registry import register
from training.state_tree import join, part

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


@register(
    "feddp",
    FedDpConfig,
    attention=attention,
    refused={"volumes": "its queries are those of a 2-D U-Net's bottleneck"},
)
class FedDp(FedOap):
    """FedDP on FedOAP's network, for a task with one foreground class."""

    def __init__(self, config: FedDpConfig, task: Task) -> None:
        models.check_task(task, "feddp")
        super().__init__(config, task)
        self.config: FedDpConfig = config

    @override
    def plan(self) -> Plan:
        """FedOAP's plan, with the collection of the sites' models and the calibration as stage 2."""
        rounds = self.config.fine_tune_rounds
        collect = Phase(
            "collect",
            1,
            (),
            (MEMBERS,),
            self.collect_step,
            self.keep_members,
            expected=self.expect_members,
            consent=True,
            everyone=True,
        )
        calibrate = Phase(
            "calibrate",
            rounds,
            (WEIGHTS, MEMBERS),
            (),
            self.calibrate_step,
            broadcast=self.send_members,
            consent=True,
            everyone=True,
        )
        before = ("describe", "train", "validate")
        others = [step for step in super().plan() if step.name != "finetune"]
        first = [step for step in others if step.name in before]
        return (*first, *((collect, calibrate) if rounds else ()), *others[len(first) :])

    def expect_members(self, server: Memory) -> Mapping[str, State]:
        """A personal part is one like that which was drawn."""
        return {MEMBERS.name: part(server.tensors, "drawn")}

    def send_members(self, server: Memory, site: str) -> Mapping[str, State]:
        """What all models share, and their personal parts."""
        return {
            WEIGHTS.name: part(server.tensors, "global"),
            MEMBERS.name: part(server.tensors, MEMBERS.name),
        }

    # ------------------------------------------------------------------ at a site

    @override
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of stage 1, as configured."""
        if self.config.first_loss == "dice":
            return dice_loss(logits, targets)
        return super().loss(logits, targets)

    @override
    def _network(self, context: StepContext, model: State, bank: State) -> FedOapUNet:
        """The network of stage 1, with clipped gradients."""
        network, clip = super()._network(context, model, bank), self.config.gradient_clip
        if clip is not None:
            for parameter in network.parameters():
                parameter.register_hook(partial(torch.clamp, min=-clip, max=clip))  # type: ignore[no-untyped-call]
        return network

    def collect_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """Send the personal part of the model of stage 1. Raises SiteFailed without one."""
        return ClientResult({MEMBERS.name: self._split(local.model_of(memory))[1]}, weight=1.0)

    def calibrate_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """A round of stage 2. Without other models, nothing changes."""
        config, members = self.config, models.entries(received[MEMBERS.name])
        if len(members) < LEAST_MODELS:
            return ClientResult({}, weight=1.0)
        shared = received[WEIGHTS.name]
        all_models = [
            models.on_device(self.network, {**shared, **personal}, {}, context.device).eval()
            for personal in members.values()
        ]

        def loss_of(network: FedOapUNet) -> local.Loss:
            def loss(images: Tensor, targets: Tensor) -> Tensor:
                with torch.no_grad():
                    answers = [torch.sigmoid(self.logits(model, images)) for model in all_models]
                differ = inconsistency(torch.stack(answers), config.inconsistency)
                logits = self.logits(network, images)
                return calibration_loss(logits, targets, differ, config.calibration_weight)

            return loss

        return local.fine_tune(config, self.network, context, memory, data, loss_of)

    # ------------------------------------------------------------------ at the server

    def keep_members(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Keep the personal parts, by site."""
        sent = result.collected.get(MEMBERS.name, {})
        members = {f"{MEMBERS.name}/{site}": dict(state) for site, state in sent.items()}
        return Memory({**server.tensors, **join(members)}, server.facts)
