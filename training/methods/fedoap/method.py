"""FedOAP: Tashdeed et al., FedOAP: organ-agnostic personalized federated learning for tumours, 2025.

Stage 1 (Alg. 1): in a round, site k joins the shared gamma to its personal rho_k, takes a fixed number of
AdamW steps on both with L_s (appendix G), and sends gamma_k; the server averages (line 7, uniformly):

    gamma <- (1/K) sum_k gamma_k        gamma: all but rho; rho_k: query stage, W_q, spatial adapter

Keys and values of the other sites (Eq. 3) come from a bank: after its steps a site takes the mean of k and v
over its training images at each position, with the gamma_k it has then, and the server hands them on in the
next round. Tokens are one round stale, carry no gradient, and a site that sent none is not attended to; in
round 0 there are own tokens only.

Stage 2: every site fine-tunes all its weights with the perturbed boundary loss, on the last gamma and bank,
and keeps the best on its own validation patients.

Shared:  gamma_k; mean tokens (kind `features`, bounded by federation and site, not essential), the last of
         which are published in every model, with or without consent; Dice on validation patients; once,
         summary statistics; once, the scores of the site's model on its test and validation patients. In the
         phase `export`, and only at sites that consent: the site's whole model.
Stays:   rho_k until then; AdamW's moments; images, masks, and everything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from model_store.manifest import NetworkSpec
from model_store.task import Task
from personalization.fedoap.joining import predict
from personalization.networks import FedOapUNet
from training.algorithm import Memory, ModelDraft, Publication, State
from training.methods.fedoap.config import FedOapConfig
from training.methods.fedoap.models import check_task, with_bank, zero_shot
from training.methods.fedoap.stages import FirstStage, SecondStage
from training.methods.registry import Panel, register
from training.parts.describe import Describe
from training.parts.export import Export
from training.parts.part import Part, Parted
from training.parts.test import Test

OWN = "own"  # the first source of every attention: the image's own tokens


def attention(network: FedOapUNet, images_NCHW: Tensor) -> Tensor:
    """[N, sources]: each image's attention to its own tokens and to every site's."""
    return predict(network, images_NCHW)[1]


@register(
    "fedoap",
    FedOapConfig,
    panels=(Panel("transmission", after="traffic"),),
    attention=attention,
    refused={"volumes": "its keys and values are those of a 2-D U-Net's bottleneck"},
)
class FedOap(Parted):
    """FedOAP for a task with one foreground class. A method that is made of it has stages of its own."""

    stages: ClassVar[tuple[type[FirstStage], type[SecondStage]]] = (FirstStage, SecondStage)

    def __init__(self, config: FedOapConfig, task: Task) -> None:
        check_task(task)
        self.config = config
        self.task = task
        self.network = NetworkSpec(
            name="fedoap", arguments={"in_channels": task.in_channels, **config.network}
        )
        # Every site counts alike in what is described, whatever `aggregation` says.
        self.describe = Describe("uniform")
        first, second = self.stages
        self.first = first(config, task, self.network)
        self.second = second(self.first)
        self.test = Test(task, self.second.answers, ("personal",))
        self.export = Export(self.second.exported, self.whole, self.test)
        self.parts: Sequence[Part] = (self.describe, self.first, self.second, self.test, self.export)

    def whole(self, server: Memory) -> State:
        """An exported model is a whole network."""
        federated = self.first.slot.read(server)
        return {**federated.gamma, **federated.drawn}

    @override
    def made(self, server: Memory, metrics: Mapping[str, float]) -> Publication:
        """The global model, which attends to the whole bank, and each exported one, which leaves its own out.

        Raises PublishError when there is nothing trained that the global one's query stage could be made of.
        """
        federated, exported = self.first.slot.read(server), self.export.slot.read(server).models
        model, began = zero_shot(self.config, federated.gamma, federated.drawn, exported)
        # Without a metric: members validate it joined to their own parts, which it is published without.
        shared = ModelDraft("global", self.network, model)
        drafts = []
        for draft in (shared, *self.export.drafts(server, self.network)):
            absent = (draft.site,) if draft.site else ()
            network, state = with_bank(self.network, draft.weights, federated.bank, absent)
            sources = (OWN, *federated.bank) if self.config.attention else None
            drafts.append(replace(draft, network=network, weights=state, sources=sources))
        return Publication("cross-attention", tuple(drafts), {"zero_shot": began})
