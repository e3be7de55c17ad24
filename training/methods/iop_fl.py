"""IOP-FL, inside personalization: Jiang et al., IOP-FL, IEEE TMI 2023 (Sections III-B and III-C).

The federation is FedAvg. Beside it, each site k keeps a personal model P_k that follows its own local models
w_k as an exponential moving average (Eq. 4 with its base point restored: as printed, it decays to zero):

    P_k <- (1 - tau) P_k + tau w_k         P_k = w_g of round 0 at first, tau = 0.9, after each local training

P_k never feeds back into training. The site keeps the P_k with the best Dice on its own validation patients.

Shared:  what FedAvg shares. In the phase `export`, and only at sites that consent to it: the best P_k and its
         validation Dice, because serving a personal model needs it.
Stays:   P_k until then; images, masks, and everything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from pydantic import Field

from model_store.task import Task
from personalization.state import clone, ema
from training.algorithm import (
    ClientResult,
    Memory,
    Phase,
    Publication,
    RoundResult,
    ServerStage,
    State,
    StepContext,
)
from training.errors import SiteFailed
from training.methods.common.export import EXPORT, export_personal, keep_exported, personal_drafts
from training.methods.common.local_training import (
    AnySiteData,
    ValidationScore,
    estimate_statistics,
    evaluate,
    network_of,
    state_of,
)
from training.methods.common.state_tree import join, part
from training.methods.fedavg import WEIGHTS, FedAvg, FedAvgConfig
from training.methods.registry import register


class IopFlConfig(FedAvgConfig):
    """What IOP-FL takes beside FedAvg's. `selection` applies to the personal models too."""

    tau: float = Field(0.9, gt=0, le=1, description="share of the newest local model in a personal one")
    personal_statistics: Literal["averaged", "own"] = Field(
        "averaged",
        description="a personal model's batch norm: averaged like its weights, or estimated on its slices",
    )


@register("iop-fl", IopFlConfig)
class IopFl(FedAvg):
    """FedAvg, and a personal model at each site."""

    def __init__(self, config: IopFlConfig, task: Task) -> None:
        super().__init__(config, task)
        self.config: IopFlConfig = config

    def plan(self) -> tuple[Phase | ServerStage, ...]:
        """FedAvg's, and the consented export."""
        return (*super().plan(), EXPORT)

    def client_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: AnySiteData
    ) -> ClientResult:
        """FedAvg's step, and after local training the personal model's."""
        if context.phase == "export":
            return self._export(context, memory, data)
        result = super().client_step(context, received, memory, data)
        if context.phase == "validate" and not memory.tensors:
            # It was in no round: what it has is the global model, with no local training.
            return replace(
                result, memory=self._remember(0, memory, clone(received[WEIGHTS.name]), ValidationScore())
            )
        if context.phase != "train":
            return result
        # A site that joins late starts from the first global model it sees.
        previous = part(memory.tensors, "personal") or received[WEIGHTS.name]
        personal = ema(previous, result.uploads[WEIGHTS.name], self.config.tau)
        network = network_of(self.network, self._published(personal, data, context), context.device)
        score = evaluate(network, data.val, self.classes, self.config.batch_size)
        metrics = {**result.metrics, **score.metrics("personal_val_dice")}
        return replace(
            result, memory=self._remember(context.round + 1, memory, personal, score), metrics=metrics
        )

    def _remember(self, round_: int, memory: Memory, personal: State, score: ValidationScore) -> Memory:
        """The site's memory after a round: P_k, and the P_k worth exporting."""
        best = memory.facts.get("best")
        latest = {"total": score.total, "patients": score.patients, "round": round_}
        improved = best is None or score.beats(ValidationScore(best["total"], best["patients"]))
        if self.config.selection == "best" and improved:
            best, kept = latest, personal
        else:
            kept = part(memory.tensors, "best")
        return Memory(join({"personal": personal, "best": kept}), {"latest": latest, "best": best})

    def _published(self, personal: State, data: AnySiteData, context: StepContext) -> State:
        """What P_k is published as: as it is, or with batch-norm statistics of its own site's."""
        if self.config.personal_statistics == "averaged":
            return personal
        network = network_of(self.network, personal, context.device)
        estimate_statistics(network, data.train, self.config.batch_size)
        return state_of(network)

    def _export(self, context: StepContext, memory: Memory, data: AnySiteData) -> ClientResult:
        """The chosen P_k. Raises SiteFailed at a site that dropped out of every phase before."""
        if not memory.facts:
            raise SiteFailed("it has no personal model: it dropped out of every round")
        facts = memory.facts["best"] or memory.facts["latest"]
        chosen = part(memory.tensors, "best" if memory.facts["best"] else "personal")
        score = ValidationScore(facts["total"], facts["patients"])
        return export_personal(self._published(chosen, data, context), score)

    def server_step(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Set the exported models beside the global one."""
        if context.phase != "export":
            return super().server_step(context, server, result)
        return keep_exported(server, result)

    def publication(self, server: Memory) -> Publication:
        """A routing space of the global and the exported models; without any of those, the global alone."""
        base = super().publication(server)
        inside = personal_drafts(server, self.network)
        return replace(base, kind="routing-space", models=(*base.models, *inside)) if inside else base
