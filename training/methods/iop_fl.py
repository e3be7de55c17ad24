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
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from model_store.manifest import NetworkSpec
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
from training.choices.fedavg import FedAvgConfig, RotationHeadConfig
from training.errors import SiteFailed
from training.local.loop import train_locally
from training.local.networks import network_of, state_of
from training.local.norms import with_statistics
from training.local.schedule import Schedule
from training.local.scores import ValidationScore, check_score, dice_per_patient, evaluate
from training.local.site import SiteData
from training.methods.fedavg import FedAvg
from training.methods.registry import Panel, register
from training.parts.part import Part, Slot
from training.parts.test import Model, Predict, Test
from training.parts.train import WEIGHTS, SiteRound, Train, Update

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


@dataclass(frozen=True)
class Average:
    """A site's moving average P_k, the one worth publishing, and its score; without one, `best` is empty."""

    personal: State = field(default_factory=dict)
    best: State = field(default_factory=dict)
    score: ValidationScore | None = None


@dataclass(frozen=True)
class Tuned:
    """A site's w_g and P_k, and what each lambda of `shares` scores, and changes, on its patients."""

    start: State = field(default_factory=dict)
    tuned: State = field(default_factory=dict)
    shares: tuple[float, ...] = ()
    scores: tuple[ValidationScore, ...] = ()
    changes: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class Federation:
    """The lambda that all sites' patients together choose."""

    share: float = 0.0


@dataclass(frozen=True)
class Exported:
    """The exported P_k, what each is worth, and whether any site consented."""

    models: Mapping[str, State] = field(default_factory=dict)
    compared: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    consented: bool = False


class Personalise(Part):
    """Each site's own model, after the training: P_k, and how much of it."""

    def __init__(self, method: IopFl) -> None:
        self.method = method
        self.average = Slot("moving_average", Average())
        self.own = Slot("personalise", Tuned())
        self.federation = Slot("share", Federation())

    @override
    def plan(self) -> Plan:
        send = self.method.train.send_selected
        return (Phase("personalise", 1, (WEIGHTS,), (CHANGES,), self.step, self.choose, send, everyone=True),)

    def send_share(self, server: Memory, site: str) -> Mapping[str, State]:
        """The federation's lambda."""
        return {SHARE.name: {"share": torch.tensor(self.federation.read(server).share)}}

    # ------------------------------------------------------------------ at a site

    def follow(self, w_k: State, here: SiteRound) -> tuple[Memory, dict[str, float]]:
        """The site's memory with its moving average after a round, and what that scores."""
        method, config, context = self.method, self.method.config, here.context
        # A site that joins late starts from the first global model it sees.
        before = self.average.read(here.memory).personal or here.received[WEIGHTS.name]
        personal = ema(before, w_k, config.tau)
        network = network_of(
            method.network, self._with_statistics(personal, here.data, context), context.device
        )
        score = evaluate(network, here.data.val, method.classes, config.batch_size)
        kept = self.remember(here.memory, personal, score, context.round + 1)
        return kept, score.metrics("personal_val_dice")

    def remember(self, memory: Memory, personal: State, score: ValidationScore, rounds_done: int) -> Memory:
        """The site's memory after so many rounds: P_k, and the P_k worth publishing."""
        config, before = self.method.config, self.average.read(memory)
        after = replace(before, personal=personal)
        improved = before.score is None or score.beats(before.score)
        if config.selection == "best" and config.selectable(rounds_done) and improved:
            after = Average(personal, personal, ValidationScore(score.total, score.patients))
        return self.average.write(memory, after)

    def _with_statistics(self, personal: State, data: SiteData, context: StepContext) -> State:
        """P_k as it is, or with batch-norm statistics of its own site's."""
        config = self.method.config
        if config.personal_statistics == "averaged":
            return personal
        network = self.method.network
        return with_statistics(network, personal, data.all_train, config.batch_size, context.device)

    def step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """Choose what the site publishes, and compare it with w_g on its validation patients.

        A patient that P_k was trained on says nothing: a site without others has no comparison.
        """
        method, config, w_g = self.method, self.method.config, received[WEIGHTS.name]

        def dice(state: State) -> dict[str, float]:
            if not data.held_out:
                return {}
            network = network_of(method.network, state, context.device)
            return dice_per_patient(network, data.val, method.classes, config.batch_size)

        shares: tuple[float, ...]
        if config.personal == "interpolated":
            tuned, shares = self.tuned(context, w_g, data), LAMBDAS
        else:
            average = self.average.read(memory)
            # A site that was in no round has the global model.
            kept = average.best or average.personal or clone(w_g)
            tuned, shares = self._with_statistics(kept, data, context), (0.0, 1.0)
        found = [dice(interpolate(w_g, tuned, share)) for share in shares]
        scores = tuple(ValidationScore.of(each) for each in found)
        changes = changes_of(found)
        own = shares[chosen(changes)] if config.personal == "interpolated" else 1.0
        rows = tuple(tuple(row) for row in changes.tolist())
        return ClientResult(
            {CHANGES.name: {"changes": changes} if config.personal == "interpolated" else {}},
            weight=1.0,
            memory=self.own.write(self.average.clear(memory), Tuned(w_g, tuned, shares, scores, rows)),
            metrics=scores[shares.index(own)].metrics("personal_val_dice"),
        )

    def tuned(self, context: StepContext, w_g: State, data: SiteData) -> State:
        """P_k, from w_g."""
        config = self.method.config
        network = network_of(self.method.network, w_g, context.device)
        schedule = Schedule(
            epochs=config.personal_epochs,
            batch_size=config.batch_size,
            learning_rate=config.personal_rate,
            augment=config.augment,
            precision=config.precision,
            optimiser="sgd",
            falls=True,
            intensity=config.intensity,
            loss=self.method.loss,
            randomise=config.domain_randomisation != "none",
            foreground=config.foreground,
        )
        train_locally(network, data.train, schedule, context.generator("personalise"))
        return state_of(network)

    def share(self, received: Mapping[str, State], own: Tuned) -> tuple[float, bool]:
        """A site's lambda, and whether it is that of the federation, for want of patients."""
        if self.method.config.personal == "moving-average":
            return 1.0, False
        changes = torch.tensor(own.changes, dtype=torch.float64)
        if int(changes[0, 2]) < LEAST_PATIENTS:
            return float(received[SHARE.name]["share"]), True
        return own.shares[chosen(changes)], False

    # ------------------------------------------------------------------ at the server

    def choose(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Keep the lambda that all sites' patients together choose."""
        together = result.reduced.get(CHANGES.name, {}).get("changes")
        share = LAMBDAS[chosen(together)] if together is not None else 0.0
        return self.federation.write(server, Federation(share))


class ExportShare(Part):
    """The export of P_k(lambda), of the sites that consent."""

    def __init__(self, train: Train, personalise: Personalise, test: Test) -> None:
        self.train = train
        self.personalise = personalise
        self.test = test
        self.slot = Slot("export", Exported())

    @override
    def plan(self) -> Plan:
        return (
            Phase(
                "export",
                1,
                (SHARE,),
                (PERSONAL, COMPARISON),
                self.step,
                self.keep,
                self.personalise.send_share,
                self.expect,
                consent=True,
                everyone=True,
            ),
        )

    def expect(self, server: Memory) -> Mapping[str, State]:
        """An exported model is one like w_g."""
        return {PERSONAL.name: self.train.slot.read(server).selected}

    def step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """P_k(lambda), by the site's own patients or the federation's.

        Raises SiteFailed at a site that was not there to tune it.
        """
        if not self.personalise.own.holds(memory):
            raise SiteFailed("it has no personal model: it dropped out before the phase `personalise`")
        own = self.personalise.own.read(memory)
        share, borrowed = self.personalise.share(received, own)
        before, after = own.scores[0], own.scores[own.shares.index(share)]
        comparison: State = {
            "before": before.state()["score"],
            "after": after.state()["score"],
            "share": torch.tensor([share, borrowed], dtype=torch.float64),
        }
        published = interpolate(own.start, own.tuned, share) if share else {}
        return ClientResult(
            {COMPARISON.name: comparison, PERSONAL.name: published},
            weight=1.0,
            metrics=after.metrics("personal_val_dice") | {"personal_share": share},
        )

    def keep(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Set the exported models beside the global one, and what each is worth."""
        sent = {site: dict(state) for site, state in result.collected.get(PERSONAL.name, {}).items() if state}
        compared = {
            site: {
                "share": float(state["share"][0]),
                "share_from": "the federation's patients" if state["share"][1] else "its own patients",
                "val_dice_global": _mean(state["before"]),
                "val_dice": _mean(state["after"]),
            }
            for site, state in result.collected.get(COMPARISON.name, {}).items()
        }
        models = {site: sent[site] for site in sorted(sent)}
        return self.slot.write(server, Exported(models, compared, bool(result.weights)))

    def drafts(self, server: Memory, network: NetworkSpec) -> tuple[ModelDraft, ...]:
        """The exported models, ready to be published."""
        exported = self.slot.read(server)
        return tuple(
            ModelDraft(
                "inside",
                network,
                model,
                site,
                {
                    name: value
                    for name, value in exported.compared.get(site, {}).items()
                    if name.startswith("val_dice") and value is not None
                }
                | self.test.metrics(server, "personal", (site,)),
            )
            for site, model in exported.models.items()
        )


@register("iop-fl", IopFlConfig, panels=(Panel("changes"),))
class IopFl(FedAvg):
    """FedAvg, and a personal model at each site."""

    def __init__(self, config: IopFlConfig, task: Task) -> None:
        super().__init__(config, task)
        self.config: IopFlConfig = config
        plain = self.test
        self.personalise = Personalise(self)
        self.test = Test(task, self.answers, ("", "personal"), (WEIGHTS, SHARE), self.send_tested)
        self.export = ExportShare(self.train, self.personalise, self.test)
        self.exchange(plain, self.personalise, self.test, self.export)

    def send_tested(self, server: Memory, site: str) -> Mapping[str, State]:
        """The selected w_g, and the federation's lambda."""
        return {**self.train.send_selected(server, site), **self.personalise.send_share(server, site)}

    @override
    def update(self, network: nn.Module, here: SiteRound) -> Update:
        """FedAvg's update; with the moving average, the personal model's after it."""
        update = super().update(network, here)
        if self.config.personal == "interpolated":
            return update
        kept, metrics = self.personalise.follow(update.weights, here)
        return replace(update, memory=kept, metrics=metrics)

    @override
    def answers(
        self, context: StepContext, received: Mapping[str, State], memory: Memory
    ) -> Mapping[Model, Predict | None]:
        """The models that a site tests: the selected w_g, and P_k(lambda). With lambda = 0, P_k is w_g."""
        own, personal = self.personalise.own.read(memory), None
        if own.shares and (share := self.personalise.share(received, own)[0]):
            personal = self.train.answers(context, interpolate(own.start, own.tuned, share))
        return {**super().answers(context, received, memory), "personal": personal}

    @override
    def made(self, server: Memory, metrics: Mapping[str, float]) -> Publication:
        """A routing space of the global and the exported models; without consent, the global model alone."""
        base, exported = super().made(server, metrics), self.export.slot.read(server)
        if not exported.consented:
            return base
        models = (*base.models, *self.export.drafts(server, self.network))
        return replace(base, kind="routing-space", models=models, details={"personal": exported.compared})


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
