"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017.

The federation of IOP-FL (Jiang et al., 2023), Eq. 1 and 3. In a round every site k starts from the global
w_g, trains on its own slices (Eq. 3: w_k <- w_k - eta grad L, with Adam), and the server averages

    w_g <- sum_k (n_k / n) w_k         n_k training slices; uniform, 1/K, is an option (Eq. 1 as printed)

Batch-norm buffers are part of the weights: running statistics are averaged, counters copied. The optimiser
restarts every round. In each round the sites also validate the w_g they receive; the server keeps the best.

The default is not the paper's: the rate falls by a cosine in the second half of the rounds, a small site
takes more than one pass where its slices make few batches, and slices go through drawn scanners. Running
statistics then describe drawn scanners, and each site's those of its own weights. So after the last round
every site estimates the statistics of the kept w_g on its slices as they are, and w_g takes

    mean <- sum_k (n_k / n) mean_k     var <- sum_k (n_k / n) (var_k + mean_k^2) - mean^2

In the last pass every site also measures how far its slices are from these statistics, so that a service
knows how far hospitals naturally are apart (`personalization.iop_fl.spread`).

`recipe: paper` leaves all of this out (docs/explanation/iop-fl.md has what each was worth).

A classification has cross-entropy for the loss and accuracy for Dice; all else is the same. `loss` names
another loss. With `rotation_head` the network also learns to tell quarter turns (`common/rotation.py`), which
test-time training at a hospital needs.

Shared:  weights w_k and w_g; the number of training slices; Dice on validation patients (sum and count);
         once, mean and mean square of every batch-norm channel over the training slices;
         once, six numbers per batch norm: the site's shift from the published statistics, and its sampling
         variance; with masks, the share of pixels that are a target, where it is large, and its pieces;
         once, summary statistics of the training scans for the service's guard;
         once, Dice of the published model on test and validation patients, by label.
         once, of a run that starts from a version: sums of both versions' Dice on the validation patients.
Stays:   images, masks, and everything else.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn
from typing_extensions import override

from model_store.manifest import NetworkSpec
from model_store.task import Task
from personalization.dose import targets_of
from personalization.errors import NetworkError
from personalization.iop_fl.batch_norm import profile
from personalization.iop_fl.spread import FEWEST, FILE, Spread, check_sent, sent_by
from personalization.metrics import metrics_of
from personalization.networks.registry import builder
from personalization.networks.rotation import check_square
from personalization.precision import Precision
from training.algorithm import (
    Algorithm,
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
from training.choices.loss import LossConfig
from training.choices.randomisation import RandomisationConfig
from training.choices.start import StartConfig
from training.choices.volume import VolumeConfig
from training.errors import ConfigurationError
from training.local.data import slices_of
from training.local.loop import Penalty, train_locally
from training.local.networks import network_of, new_network, state_of
from training.local.norms import (
    batch_moments,
    moments_of,
    positive_variances,
    with_moments,
)
from training.local.registry import kind_of
from training.local.schedule import MOTION, OptimiserName, Schedule
from training.local.scores import (
    Aggregation,
    AnySiteData,
    ValidationScore,
    evaluate,
    weight_of,
)
from training.methods.registry import register
from training.parts.describe import describe_phase, described, keep_described
from training.parts.judge import PARENT, judge_once, judgement, judging_phase
from training.parts.rotation import rotation_term, together
from training.parts.test import Predict, predicting, score_once, scored_metrics, scoring_phase
from training.state_tree import join, part

WEIGHTS = Group("weights", "weights", "mean", repair=positive_variances)
SCORES = Group("scores", "statistics", "collect", essential=False, check=ValidationScore.check)
MOMENTS = Group("moments", "statistics", "mean", essential=False)


def _check_spread(state: State, size: SiteSize) -> None:  # noqa: ARG001
    check_sent(state)


def _check_one(state: State, size: SiteSize) -> None:  # noqa: ARG001
    if state["members"].tolist() != [1.0]:
        raise ValueError(f"expected 1 member, found {state['members'].tolist()}")


# With noise on the weights the shift from them is not that between hospitals.
SPREAD = Group("spread", "statistics", "mean", essential=False, check=_check_spread, beside_noise=False)
MEMBERS = Group("spread_members", "statistics", "sum", essential=False, check=_check_one, beside_noise=False)


class FedAvgConfig(LossConfig, RandomisationConfig, VolumeConfig, StartConfig):
    """What FedAvg takes. Defaults suit a laptop; the paper's are 100 rounds at width 32."""

    recipe: Literal["locum", "paper"] = Field(
        "locum", description="where the values that are not given come from: Locum's choice, or the paper"
    )
    local_epochs: int = Field(1, ge=1, description="passes over the site's slices per round")
    local_steps: int | None = Field(None, ge=1, description="batches per round, instead of local_epochs")
    least_steps: int = Field(10, ge=0, description="batches per round at least, where few slices make few")
    batch_size: int = Field(16, ge=1)
    optimiser: OptimiserName = Field("adam", description="restarted every round; sgd has momentum 0.9")
    learning_rate: float = Field(1e-3, gt=0, description="in the first half of the rounds")
    final_rate: float = Field(
        0.01, gt=0, le=1, description="share of it in the last round, by a cosine; 1 keeps it constant"
    )
    learning_rate_decay: float = Field(1.0, gt=0, le=1, description="factor per round, beside the cosine")
    amsgrad: bool = Field(False, description="of adam")
    augment: bool = Field(True, description="random rotation and flip in training")
    intensity: float = Field(
        1.0, ge=0, le=3, description="severity of the drawn scanners that slices go through; 0: none"
    )
    statistics: Literal["estimated", "averaged"] = Field(
        "estimated",
        description="the global model's batch norm: estimated on all sites' slices at the end, or averaged "
        "like its weights",
    )
    precision: Precision = Field(
        "float32", description="of training: bfloat16 takes half the time where the processor has it"
    )
    aggregation: Aggregation = Field("sample", description="weight of a site: n_k / n, or 1/K")
    selection: Literal["best", "last"] = Field("best", description="which round's model is published")

    EARLIER: ClassVar[Mapping[str, Any]] = {**RandomisationConfig.EARLIER, **VolumeConfig.EARLIER}
    SUITED: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "volumes": {
            "loss": "dice_ce",
            "batch_size": 2,
            "least_steps": 20,
            "optimiser": "adamw",
            "learning_rate": 3e-3,
        }
    }
    PAPER: ClassVar[Mapping[str, Any]] = {
        "least_steps": 0,
        "final_rate": 1.0,
        "intensity": 0.0,
        "domain_randomisation": "none",
        "statistics": "averaged",
    }


class RotationHeadConfig(FedAvgConfig):
    """FedAvg with, if asked for, a head for test-time training."""

    rotation_head: bool = Field(
        False, description="whether the network learns to tell quarter turns, for the preset `ttt`"
    )

    EARLIER: ClassVar[Mapping[str, Any]] = {**FedAvgConfig.EARLIER, "rotation_head": False}

    @override
    def network_for(self, task: Task) -> NetworkSpec:
        """The network, with the head. Raises ConfigurationError for one without, or sides that differ."""
        spec = super().network_for(task)
        if not self.rotation_head:
            return spec
        try:
            if "rotation_head" not in inspect.signature(builder(spec.name)).parameters:
                raise NetworkError(f"expected a network that can have one, such as unet, found '{spec.name}'")
            check_square(task.input_shape)
        except NetworkError as error:
            raise ConfigurationError(
                f"rotation_head does not fit the task {task.name!r}", [str(error)]
            ) from error
        return spec.model_copy(update={"arguments": {**spec.arguments, "rotation_head": True}})


@register("fedavg", RotationHeadConfig, kinds=("segmentation", "classification"))
class FedAvg(Algorithm):
    """FedAvg of one network: by default a U-Net for a segmentation, a ResNet-18 for a classification."""

    def __init__(self, config: FedAvgConfig, task: Task) -> None:
        self.config = config
        self.task = task
        self.classes = len(task.classes)
        self.network = self.architecture(task)
        self.loss = config.loss_for(task)
        # Without batch norm there is nothing to estimate.
        self._estimates = config.statistics == "estimated" and bool(moments_of(self.network))
        self.metric = f"val_{metrics_of(task.kind)[0].name}"

    def architecture(self, task: Task) -> NetworkSpec:
        """The network that the sites train."""
        return self.config.network_for(task)

    def first_weights(self, generator: torch.Generator) -> State:
        """The weights before any training: those of the start, and what it does not have from `generator`."""
        return self.config.started(state_of(new_network(self.network, generator)))

    @override
    def plan(self) -> Plan:
        """Describe the data once, train, validate the last global model, which no round has; estimate the
        statistics of the selected one, validate it with them, and test it."""
        return (
            describe_phase(self.config.aggregation, self.note_described),
            self.train_phase(),
            self.validate_phase(),
            *(self.estimate_phases() if self._estimates else ()),
            *self.judge_phases(),
            scoring_phase(self.task, (WEIGHTS,), self.score_step, self.send_selected),
        )

    def train_phase(self) -> Phase:
        """The rounds of training."""
        groups = (WEIGHTS, SCORES)
        return Phase(
            "train", self.config.rounds, (WEIGHTS,), groups, self.train_step, self.average, self.send_global
        )

    def validate_phase(self) -> Phase:
        """The validation of the model after the last round."""
        return Phase(
            "validate",
            1,
            (WEIGHTS,),
            (SCORES,),
            self.validate_step,
            self.note_last,
            self.send_global,
            everyone=True,
        )

    def estimate_phases(self) -> tuple[Phase, ...]:
        """The statistics of the selected model, and its validation with them."""
        estimate = Phase(
            "estimate",
            1,
            (WEIGHTS,),
            (MOMENTS,),
            self.estimate_step,
            self.take_moments,
            self.send_selected,
            self.expect_moments,
            everyone=True,
        )
        revalidate = Phase(
            "revalidate",
            1,
            (WEIGHTS,),
            (SCORES, SPREAD, MEMBERS),
            self.revalidate_step,
            self.note_selected,
            self.send_selected,
            everyone=True,
        )
        return estimate, revalidate

    def judge_phases(self) -> tuple[Phase, ...]:
        """The comparison of the selected model with the version that it started from, if it did."""
        if not self.config.is_judged:
            return ()
        return (judging_phase((WEIGHTS, PARENT), self.judge_step, self.send_both),)

    @override
    def initial(self, context: StepContext) -> Memory:
        """w_g of round 0, from the run's seed."""
        return Memory(join({"global": self.first_weights(context.generator("weights"))}))

    def send_global(self, server: Memory, site: str) -> Mapping[str, State]:
        """w_g, to every site the same."""
        return {WEIGHTS.name: part(server.tensors, "global")}

    def send_selected(self, server: Memory, site: str) -> Mapping[str, State]:
        """The selected w_g, to every site the same."""
        return {WEIGHTS.name: self.selected(server)[0]}

    def send_parent(self, server: Memory, site: str) -> Mapping[str, State]:
        """The weights that the run started from, to every site the same."""
        return {PARENT.name: self.config.start_state()}

    def send_both(self, server: Memory, site: str) -> Mapping[str, State]:
        """The selected w_g, and the weights that the run started from."""
        return {**self.send_selected(server, site), **self.send_parent(server, site)}

    def expect_moments(self, server: Memory) -> Mapping[str, State]:
        """Moments of every batch norm."""
        return {MOMENTS.name: moments_of(self.network)}

    # ------------------------------------------------------------------ at a site

    def network_here(self, context: StepContext, w_g: State, data: AnySiteData) -> nn.Module:
        """The network that a site validates, and trains, when it receives w_g in a round: w_g as it is."""
        return network_of(self.network, w_g, context.device)

    def train_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: AnySiteData
    ) -> ClientResult:
        """Validate w_g, then train from it."""
        network = self.network_here(context, received[WEIGHTS.name], data)
        validated = self._validated(network, data)
        metrics = {**validated.metrics, "loss": self.train(context, network, data)}
        uploads = {**validated.uploads, WEIGHTS.name: state_of(network)}
        return ClientResult(uploads, validated.weight, metrics=metrics)

    def validate_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: AnySiteData
    ) -> ClientResult:
        """Validate the w_g of the last round."""
        return self._validated(self.network_here(context, received[WEIGHTS.name], data), data)

    def revalidate_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: AnySiteData
    ) -> ClientResult:
        """Validate the selected w_g, and measure how far the site's slices are from its statistics. Hospitals
        count alike, whatever their size."""
        network = network_of(self.network, received[WEIGHTS.name], context.device)
        validated, sent = self._validated(network, data), self._spread(network, data)
        members: State = {"members": torch.ones(1, dtype=torch.float64)} if sent else {}
        uploads = {**validated.uploads, SPREAD.name: sent, MEMBERS.name: members}
        return replace(validated, uploads=uploads, weight=1.0)

    def _spread(self, network: nn.Module, data: AnySiteData) -> State:
        if not len(data.all_train):
            return {}
        slices = data.all_train.met()
        # A copy is aligned as torch aligns (`predict`).
        images = torch.from_numpy(slices.images).clone()
        found = profile(network, images, slices.patients, self.config.batch_size)
        if not slices.dense:
            return sent_by(found, None)
        targets = targets_of(torch.from_numpy(slices.targets), slices.patients, self.classes)
        return sent_by(found, (targets.share, targets.largest, targets.pieces))

    def score_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: AnySiteData
    ) -> ClientResult:
        """Score the selected w_g on the test patients."""
        network = network_of(self.network, received[WEIGHTS.name], context.device)
        return score_once({"": predicting(network, self.config.batch_size)}, data, self.task)

    def judge_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: AnySiteData
    ) -> ClientResult:
        """Score the selected w_g and its parent on the validation patients."""
        selected = self.predicting(context, received[WEIGHTS.name])
        return judge_once(self.predicting(context, received[PARENT.name]), selected, data, self.classes)

    def predicting(self, context: StepContext, weights: State) -> Predict:
        """The answers of the network with these weights."""
        return predicting(network_of(self.network, weights, context.device), self.config.batch_size)

    def estimate_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: AnySiteData
    ) -> ClientResult:
        """Moments of the model that was sent, over the site's slices as they are."""
        network = network_of(self.network, received[WEIGHTS.name], context.device)
        moments = batch_moments(network, data.all_train, self.config.batch_size)
        return ClientResult({MOMENTS.name: moments}, weight_of(data, self.config.aggregation))

    def _validated(self, network: nn.Module, data: AnySiteData) -> ClientResult:
        score = evaluate(network, data.val, self.classes, self.config.batch_size)
        weight = weight_of(data, self.config.aggregation)
        return ClientResult({SCORES.name: score.state()}, weight, metrics=score.metrics(self.metric))

    def train(self, context: StepContext, network: nn.Module, data: AnySiteData) -> float:
        """Train a site's network in place, from w_g (Eq. 3); returns the mean loss."""
        return train_locally(
            network,
            data.train,
            self.schedule(context.round),
            context.generator("train"),
            together(self.penalty(network), self._rotation(context, network, data)),
        )

    def _rotation(self, context: StepContext, network: nn.Module, data: AnySiteData) -> Penalty | None:
        """The loss of the rotation head; None without one."""
        config = self.config
        if not isinstance(config, RotationHeadConfig) or not config.rotation_head:
            return None
        draw = context.generator("rotation")
        # No network of volumes has the head.
        return rotation_term(network, slices_of(data.train), config.batch_size, config.precision, draw)

    def penalty(self, network: nn.Module) -> Penalty | None:
        """What is added to the loss of every batch, of a network that holds w_g now; nothing in FedAvg."""
        return None

    def schedule(self, round_: int) -> Schedule:
        """How a site trains in a round."""
        config = self.config
        steps = config.rounds * (config.local_steps or config.least_steps)
        strength = kind_of(self.task).augmentation(steps)
        held = config.rounds // 2
        passed = max(round_ - held, 0) / max(config.rounds - 1 - held, 1)
        cosine = config.final_rate + (1 - config.final_rate) * (1 + math.cos(math.pi * passed)) / 2
        return Schedule(
            config.local_epochs,
            config.local_steps,
            config.batch_size,
            config.learning_rate * cosine * config.learning_rate_decay**round_,
            config.amsgrad,
            config.augment,
            config.precision,
            config.optimiser,
            config.least_steps,
            intensity=config.intensity * strength,
            loss=self.loss,
            randomise=config.randomises(round_),
            foreground=config.foreground,
            motion=MOTION.scaled(strength),
        )

    # ------------------------------------------------------------------ at the server

    def note_described(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Keep what the sites' training scans are like."""
        return keep_described(context, server, result)

    def average(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Note the scores of the w_g that was sent, keep it if it is the best so far, take the average."""
        noted = self._noted(server, result, context.round)
        return Memory({**noted.tensors, **join({"global": result.reduced[WEIGHTS.name]})}, noted.facts)

    def note_last(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Note the scores of the w_g of the last round, and keep it if it is the best."""
        return self._noted(server, result, self.config.rounds)

    def take_moments(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Put the sites' statistics into the selected w_g."""
        slot = "best" if server.facts.get("best") else "global"
        estimated = with_moments(self.selected(server)[0], result.reduced.get(MOMENTS.name, {}))
        return Memory({**server.tensors, **join({slot: estimated})}, server.facts)

    def note_selected(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Note the scores of the selected w_g, and how far the sites are apart."""
        facts, rounds = server.facts, self.selected(server)[1]["round"]
        after = note_scores(facts, result, self.metric, rounds, self.config.selection)
        spread = self._spread_of(result)
        noted = {**after, "best": after["latest"] if facts["best"] else None}
        return Memory(server.tensors, noted if spread is None else {**noted, "spread": spread})

    def _spread_of(self, result: RoundResult) -> dict[str, Any] | None:
        """As JSON; None where fewer sites than two measured."""
        mean, members = result.reduced.get(SPREAD.name), result.reduced.get(MEMBERS.name)
        if mean is None or members is None or (count := int(members["members"])) < FEWEST:
            return None
        layers = tuple(dict.fromkeys(name.rsplit(".", 1)[0] for name in moments_of(self.network)))
        return Spread.of(layers, mean, count).model_dump(mode="json")

    def _noted(self, server: Memory, result: RoundResult, rounds_done: int) -> Memory:
        """The memory with the scores of its w_g, which has so many rounds of training behind it."""
        states = {"global": part(server.tensors, "global"), "best": part(server.tensors, "best")}
        selection = self.config.selection if self.config.selectable(rounds_done) else "last"
        facts = note_scores(server.facts, result, self.metric, rounds_done, selection)
        if facts["best"] != server.facts.get("best"):
            states["best"] = states["global"]
        return Memory(join(states), facts)

    def selected(self, server: Memory) -> tuple[State, dict[str, Any]]:
        """The best global model, or the last one where nothing could be validated; its score and round."""
        chosen = server.facts.get("best")
        return part(server.tensors, "best" if chosen else "global"), chosen or server.facts["latest"]

    @override
    def publication(self, server: Memory) -> Publication:
        weights, facts = self.selected(server)
        metrics = {name: value for name, value in facts.items() if name != "round" and value is not None}
        metrics |= scored_metrics(server.facts, self.task)
        return Publication(
            "model",
            (ModelDraft("global", self.network, weights, metrics=metrics),),
            {"selected_round": facts["round"], **self.judged(server)},
            described(server.facts),
            files=self.files(server),
        )

    def judged(self, server: Memory) -> dict[str, Any]:
        """The comparison with the version that the run started from, for the details."""
        return judgement(server.facts, self.task, self.config.start)

    def files(self, server: Memory) -> Mapping[str, bytes]:
        """How far the sites are apart, beside the model, if two or more measured."""
        found = server.facts.get("spread")
        return {} if found is None else {FILE: Spread.model_validate(found).to_bytes()}


def note_scores(
    facts: Mapping[str, Any], result: RoundResult, metric: str, rounds_done: int, selection: str
) -> dict[str, Any]:
    """The server's facts, with what the sites' scores of the model that was sent come to.

    A site that was not there this round counts with its last score: else rounds would be compared on
    different patients. For the same reason the best is forgotten when patients are scored for the first time.
    """
    before = facts.get("scores", {})
    sent = result.collected.get(SCORES.name, {}).items()
    scores = {**before, **{site: ValidationScore.received(state).facts() for site, state in sent}}
    total = ValidationScore.together([ValidationScore.noted(score) for score in scores.values()])
    latest = {metric: None, **total.metrics(metric), "round": rounds_done}
    newly = any(score["patients"] for site, score in scores.items() if site not in before)
    best = None if newly else facts.get("best")
    if total.patients and (best is None or total.mean > best[metric]):
        best = latest
    return {**facts, "scores": scores, "latest": latest, "best": best if selection == "best" else None}
