"""IOP-FL, inside personalization: Jiang et al., IOP-FL, IEEE TMI 2023 (Sections III-B and III-C).

The federation is FedAvg. Each site k then has a personal model P_k, which never feeds back into training.
By default it starts where the federation ended, and is published between the two:

    P_k = a few gentle passes over the site's slices from w_g, at a falling rate
    P_k(lambda) = w_g + lambda (P_k - w_g)

lambda is the smallest on a grid from 0 to 1 that is within one standard error of the best, on the site's own
validation patients. A site with fewer than three takes the lambda that all sites' patients together choose.
With lambda = 0 the site has no personal model: the global one serves it.

With `recipe: paper` it follows the site's local models w_k as an exponential moving average (Eq. 4 with its
base point restored: as printed, it decays to zero), and the P_k with the best Dice is published:

    P_k <- (1 - tau) P_k + tau w_k         P_k = w_g of round 0 at first, tau = 0.9, after each local training

Shared:  what FedAvg shares. For every lambda, sum and sum of squares of the change of the validation
         patients' Dice. Once, the scores of P_k(lambda) on test and validation patients. In the phase
         `export`, and only at sites that consent to it: the published P_k, its validation Dice beside w_g's,
         and lambda.
Stays:   P_k until then; images, masks, and everything else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from model_store.task import Task
from personalization.state import clone, ema, interpolate
from training.algorithm import (
    ClientResult,
    Group,
    Memory,
    ModelDraft,
    Phase,
    Plan,
    Publication,
    RoundResult,
    SiteSize,
    State,
    StepContext,
)
from training.errors import SiteFailed
from training.local.loop import train_locally
from training.local.networks import network_of, state_of
from training.local.norms import with_statistics
from training.local.schedule import Schedule
from training.local.scores import (
    AnySiteData,
    ValidationScore,
    check_score,
    dice_per_patient,
    evaluate,
)
from training.local.site import SiteData
from training.methods.fedavg import WEIGHTS, FedAvg, FedAvgConfig, RotationHeadConfig
from training.methods.registry import Panel, register
from training.parts.test import predicting, score_once, scored_metrics, scoring_phase
from training.state_tree import join, part

# A site without a personal model sends none.
PERSONAL = Group("personal", "weights", "collect", essential=False)


def _check_comparison(state: State, size: SiteSize) -> None:
    if sorted(state) != ["after", "before", "share"]:
        raise ValueError(f"expected the tensors 'after', 'before' and 'share', found {sorted(state)}")
    check_score(state["before"], size.scored)
    check_score(state["after"], size.scored)
    share, borrowed = state["share"].tolist()
    if share not in LAMBDAS or borrowed not in (0, 1):
        raise ValueError(f"expected a share in {LAMBDAS} and 0 or 1, found {share:g} and {borrowed:g}")


def _check_changes(state: State, size: SiteSize) -> None:
    """A change of Dice is in -1..1, so is its square, and each case has at most one."""
    changes = state["changes"]
    if changes.shape != (len(LAMBDAS), 3):
        raise ValueError(f"expected changes of shape [{len(LAMBDAS)}, 3], found {list(changes.shape)}")
    total, squares, number = changes.unbind(dim=1)
    if bool((total.abs() > number).any() or (squares < 0).any() or (squares > number).any()) or (
        size.scored is not None and float(number.max()) > size.scored
    ):
        raise ValueError(f"expected changes of Dice of at most {size.scored} cases, found {changes.tolist()}")


LEAST_PATIENTS = 3
LAMBDAS: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
COMPARISON = Group("comparison", "statistics", "collect", essential=False, check=_check_comparison)
# Sums over the validation patients, and the lambda that all of them together choose.
CHANGES = Group("changes", "statistics", "sum", essential=False, check=_check_changes)
SHARE = Group("share", "statistics")


class IopFlConfig(RotationHeadConfig):
    """What IOP-FL takes beside FedAvg's. `selection` applies to the moving average too."""

    personal: Literal["interpolated", "moving-average"] = Field(
        "interpolated",
        description="a site's model: between the global one and one tuned from it, or the paper's average",
    )
    personal_epochs: int = Field(5, ge=1, description="interpolated: passes from the global model")
    personal_rate: float = Field(
        0.01, gt=0, description="interpolated: SGD's learning rate, which falls to nothing by a cosine"
    )
    tau: float = Field(
        0.9, gt=0, le=1, description="moving-average: share of the newest local model in a personal one"
    )
    personal_statistics: Literal["averaged", "own"] = Field(
        "averaged",
        description="a personal model's batch norm: averaged like its weights, or estimated on its slices",
    )

    PAPER: ClassVar[Mapping[str, Any]] = {**FedAvgConfig.PAPER, "personal": "moving-average"}


@register("iop-fl", IopFlConfig, panels=(Panel("changes"),))
class IopFl(FedAvg):
    """FedAvg, and a personal model at each site."""

    def __init__(self, config: IopFlConfig, task: Task) -> None:
        super().__init__(config, task)
        self.config: IopFlConfig = config

    @override
    def plan(self) -> Plan:
        """FedAvg's plan, with each site's own model before the test of both, and the export after it."""
        *before, _ = super().plan()
        personalise = Phase(
            "personalise",
            1,
            (WEIGHTS,),
            (CHANGES,),
            self.personalise_step,
            self.choose_share,
            self.send_selected,
            everyone=True,
        )
        test = scoring_phase(self.task, (WEIGHTS, SHARE), self.score_step, self.send_tested, ("", "personal"))
        export = Phase(
            "export",
            1,
            (SHARE,),
            (PERSONAL, COMPARISON),
            self.export_step,
            self.keep_exported,
            self.send_share,
            self.expect_personal,
            consent=True,
            everyone=True,
        )
        return (*before, personalise, test, export)

    def send_share(self, server: Memory, site: str) -> Mapping[str, State]:
        """The federation's lambda."""
        return {SHARE.name: {"share": torch.tensor(server.facts.get("share", 0.0))}}

    def send_tested(self, server: Memory, site: str) -> Mapping[str, State]:
        """The selected w_g, and the federation's lambda."""
        return {**self.send_selected(server, site), **self.send_share(server, site)}

    def expect_personal(self, server: Memory) -> Mapping[str, State]:
        """An exported model is one like w_g."""
        return {PERSONAL.name: self.selected(server)[0]}

    # ------------------------------------------------------------------ at a site

    @override
    def train_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: AnySiteData
    ) -> ClientResult:
        """FedAvg's step; with the moving average, the personal model's after it."""
        result = super().train_step(context, received, memory, data)
        if self.config.personal == "interpolated":
            return result
        # A site that joins late starts from the first global model it sees.
        previous = part(memory.tensors, "personal") or received[WEIGHTS.name]
        personal = ema(previous, result.uploads[WEIGHTS.name], self.config.tau)
        network = network_of(self.network, self._with_statistics(personal, data, context), context.device)
        score = evaluate(network, data.val, self.classes, self.config.batch_size)
        metrics = {**result.metrics, **score.metrics("personal_val_dice")}
        return replace(
            result, memory=self._remember(memory, personal, score, context.round + 1), metrics=metrics
        )

    def _remember(self, memory: Memory, personal: State, score: ValidationScore, rounds_done: int) -> Memory:
        """The site's memory after so many rounds: P_k, and the P_k worth publishing."""
        best = memory.facts.get("best")
        improved = best is None or score.beats(ValidationScore(**best))
        if self.config.selection == "best" and self.config.selectable(rounds_done) and improved:
            best, kept = {"total": score.total, "patients": score.patients}, personal
        else:
            kept = part(memory.tensors, "best")
        return Memory(join({"personal": personal, "best": kept}), {"best": best})

    def _with_statistics(self, personal: State, data: AnySiteData, context: StepContext) -> State:
        """P_k as it is, or with batch-norm statistics of its own site's."""
        if self.config.personal_statistics == "averaged":
            return personal
        return with_statistics(self.network, personal, data.all_train, self.config.batch_size, context.device)

    def personalise_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """Choose what the site publishes, and compare it with w_g on its validation patients.

        A patient that P_k was trained on says nothing: a site without others has no comparison.
        """
        global_model = received[WEIGHTS.name]

        def dice(state: State) -> dict[str, float]:
            if not data.held_out:
                return {}
            network = network_of(self.network, state, context.device)
            return dice_per_patient(network, data.val, self.classes, self.config.batch_size)

        shares: tuple[float, ...]
        if self.config.personal == "interpolated":
            tuned, shares = self._tuned(context, global_model, data), LAMBDAS
        else:
            # A site that was in no round has the global model.
            kept = part(memory.tensors, "best") or part(memory.tensors, "personal") or clone(global_model)
            tuned, shares = self._with_statistics(kept, data, context), (0.0, 1.0)
        found = [dice(interpolate(global_model, tuned, share)) for share in shares]
        scores = [ValidationScore.of(each) for each in found]
        changes = changes_of(found)
        facts = {
            "shares": shares,
            "scores": [[score.total, score.patients] for score in scores],
            "changes": changes.tolist(),
        }
        own = shares[chosen(changes)] if self.config.personal == "interpolated" else 1.0
        best = scores[shares.index(own)].metrics("personal_val_dice")
        uploads = {CHANGES.name: {"changes": changes}} if self.config.personal == "interpolated" else {}
        return ClientResult(
            {CHANGES.name: {}, **uploads},
            weight=1.0,
            memory=Memory(join({"start": global_model, "tuned": tuned}), facts),
            metrics=best,
        )

    def _tuned(self, context: StepContext, global_model: State, data: SiteData) -> State:
        """P_k, from w_g."""
        config = self.config
        network = network_of(self.network, global_model, context.device)
        schedule = Schedule(
            config.personal_epochs,
            None,
            config.batch_size,
            config.personal_rate,
            augment=config.augment,
            precision=config.precision,
            optimiser="sgd",
            falls=True,
            intensity=config.intensity,
            loss=self.loss,
            randomise=config.domain_randomisation != "none",
            foreground=config.foreground,
        )
        train_locally(network, data.train, schedule, context.generator("personalise"))
        return state_of(network)

    def _share(self, received: Mapping[str, State], memory: Memory) -> tuple[float, bool]:
        """The site's lambda, and whether it is that of the federation, for want of patients."""
        if self.config.personal == "moving-average":
            return 1.0, False
        changes = torch.tensor(memory.facts["changes"], dtype=torch.float64)
        if int(changes[0, 2]) < LEAST_PATIENTS:
            return float(received[SHARE.name]["share"]), True
        return memory.facts["shares"][chosen(changes)], False

    @override
    def score_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: AnySiteData
    ) -> ClientResult:
        """Score the selected w_g and P_k(lambda) on the test patients. With lambda = 0, P_k is w_g."""
        w_g = network_of(self.network, received[WEIGHTS.name], context.device)
        shared, own = predicting(w_g, self.config.batch_size), None
        if "shares" in memory.facts and (share := self._share(received, memory)[0]):
            start, tuned = part(memory.tensors, "start"), part(memory.tensors, "tuned")
            network = network_of(self.network, interpolate(start, tuned, share), context.device)
            own = predicting(network, self.config.batch_size)
        return score_once({"": shared, "personal": own}, data, self.task)

    def export_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """P_k(lambda), by the site's own patients or the federation's.

        Raises SiteFailed at a site that was not there to tune it.
        """
        facts = memory.facts
        if "shares" not in facts:
            raise SiteFailed("it has no personal model: it dropped out before the phase `personalise`")
        shares, (share, borrowed) = facts["shares"], self._share(received, memory)
        scores = [ValidationScore(total, patients) for total, patients in facts["scores"]]
        before, after = scores[0], scores[shares.index(share)]
        comparison: State = {
            "before": before.state()["score"],
            "after": after.state()["score"],
            "share": torch.tensor([share, borrowed], dtype=torch.float64),
        }
        start, tuned = part(memory.tensors, "start"), part(memory.tensors, "tuned")
        published = interpolate(start, tuned, share) if share else {}
        return ClientResult(
            {COMPARISON.name: comparison, PERSONAL.name: published},
            weight=1.0,
            metrics=after.metrics("personal_val_dice") | {"personal_share": share},
        )

    # ------------------------------------------------------------------ at the server

    def choose_share(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Keep the lambda that all sites' patients together choose."""
        together = result.reduced.get(CHANGES.name, {}).get("changes")
        share = LAMBDAS[chosen(together)] if together is not None else 0.0
        return Memory(server.tensors, {**server.facts, "share": share})

    def keep_exported(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Set the exported models beside the global one, and what each is worth."""
        sent = {site: state for site, state in result.collected.get(PERSONAL.name, {}).items() if state}
        inside = {f"inside/{site}": dict(state) for site, state in sent.items()}
        compared = {
            site: {
                "share": float(state["share"][0]),
                "share_from": "the federation's patients" if state["share"][1] else "its own patients",
                "val_dice_global": _mean(state["before"]),
                "val_dice": _mean(state["after"]),
            }
            for site, state in result.collected.get(COMPARISON.name, {}).items()
        }
        facts = {
            **server.facts,
            "exported": sorted(sent),
            "personal": compared,
            "consented": bool(result.weights),
        }
        return Memory({**server.tensors, **join(inside)}, facts)

    @override
    def publication(self, server: Memory) -> Publication:
        """A routing space of the global and the exported models; without consent, the global model alone."""
        base = super().publication(server)
        compared = server.facts.get("personal", {})
        inside = tuple(
            ModelDraft(
                "inside",
                self.network,
                part(server.tensors, f"inside/{site}"),
                site,
                {
                    name: value
                    for name, value in compared.get(site, {}).items()
                    if name.startswith("val_dice") and value is not None
                }
                | scored_metrics(server.facts, self.task, "personal", (site,)),
            )
            for site in server.facts.get("exported", ())
        )
        details = {**base.details, "personal": compared}
        if not server.facts.get("consented"):
            return base
        return replace(base, kind="routing-space", models=(*base.models, *inside), details=details)


def changes_of(dice: Sequence[Mapping[str, float]]) -> Tensor:
    """For each lambda, [L, 3] float64: sum and sum of squares of the changes of Dice, number of patients.

    Changes are from lambda = 0, the first. A patient without a target in whom nothing is found counts 1.
    """
    values = torch.tensor(
        [[_defined(each[patient]) for patient in dice[0]] for each in dice], dtype=torch.float64
    )
    changes = values - values[:1]
    number = torch.full((len(dice),), changes.shape[1], dtype=torch.float64)
    return torch.stack([changes.sum(dim=1), changes.square().sum(dim=1), number], dim=1)


def chosen(changes_L3: Tensor) -> int:
    """The first lambda within one standard error of the best: P_k is to earn what it changes.

    Fewer than three patients choose the first, 0: what two of them agree on is chance too often.
    """
    total, squares, number = changes_L3.unbind(dim=1)
    count = int(number[0])
    if count < LEAST_PATIENTS:
        return 0
    means = total / count
    best = int(means.argmax())
    variance = ((squares[best] - count * means[best] ** 2) / (count - 1)).clamp(min=0)
    error = (variance / count).sqrt()
    # Rounding must not let a mean lose against itself.
    return int((means >= means[best] - error - 1e-12).nonzero()[0])


def _defined(value: float) -> float:
    return 1.0 if math.isnan(value) else value


def _mean(score: Any) -> float | None:
    total, patients = score.tolist()
    return total / patients if patients else None
