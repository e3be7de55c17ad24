"""FedIns: Feng et al., Towards Instance-adaptive Inference for Federated Learning, ICCV 2023.

On a frozen backbone, a federation trains a pool of M entries: scale and shift (SSF) for every insertion
point, a head, and a key. The query of an image is the frozen backbone's view of it. The image picks the
C entries with the keys most like its query, and is adapted by their mean (Eq. 9). In a round every site
trains the pool on

    (1 - w) L_task + w (1 - s)         s the sum of the C similarities; the public code's term, which the
                                       paper leaves out and without which keys get no gradient

and the server averages pools, weighted by images (Eq. 8) or uniformly. Entry m means the same at every site
only because all start from the server's draw.

The backbone never travels: every site reads it from its own store, checked by digest. A site keeps the
queries of its images, which nothing that is trained changes, and makes them once.

Beyond the paper: the U-Net, and centring. Its pooled bottleneck is positive, so that all queries look alike;
the federation's mean query is subtracted first. And `blocks`: with the last blocks of a ViT adapted alone, a
site keeps what the others compute, too (`stems_of`), and trains in the time of the last ones.

Shared:  pool, keys and heads; the number of training images; Dice or accuracy on validation patients; how
         often each entry was picked; once, the scores of the published pool on test and validation patients;
         once, summary statistics of the scans and, where queries are centred, their sum and number (kind
         `features`, within the site's bounds, not essential).
Stays:   images, masks, classes, queries; the backbone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from model_store.manifest import NetworkSpec
from model_store.task import Task
from personalization.fedins import InstanceAdaptive, key_entropy, unused
from personalization.metrics import metrics_of
from personalization.networks import Backbone, outline
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
from training.backbones import has_head_for
from training.errors import SiteFailed
from training.local.data import Data, Examples, slices_of
from training.local.scores import AnySiteData, ValidationScore, scored, weight_of
from training.methods.fedavg import SCORES, WEIGHTS, note_scores
from training.methods.fedins.client import (
    PoolTraining,
    predict_pool,
    queries_of,
    stems_of,
    summed_queries,
    train_pool,
    usage_by,
)
from training.methods.fedins.config import FedInsConfig
from training.methods.registry import Panel, register
from training.parts.describe import STATISTICS, describe, described, merge_described
from training.parts.test import score_once, scored_metrics, scoring_phase
from training.state_tree import join, part


def check_queries(state: State, size: SiteSize) -> None:  # noqa: ARG001
    """Raise ValueError without an image: the server divides by their number."""
    if not state["count"].item() >= 1:
        raise ValueError(f"expected the sum of 1 image at least, found {state['count'].item():g}")


def check_usage(state: State, size: SiteSize) -> None:  # noqa: ARG001
    """Raise ValueError for a negative number of picks, or one with which the sites' sum may overflow."""
    if bool(((state["picks"] < 0) | (state["picks"] > _MOST_PICKS)).any()):
        raise ValueError(f"expected 0 to {_MOST_PICKS} picks of every entry, found another number")


# A sum and a number are a mean of what a network makes of images.
QUERIES = Group("queries", "features", "sum", essential=False, bounded=True, check=check_queries)
CENTRE = Group("centre", "features")
USAGE = Group("usage", "statistics", "sum", essential=False, check=check_usage)
_FLOAT_BYTES = 4
_MOST_PICKS = 2**40


def pool_network(
    config: FedInsConfig,
    task: Task,
    spec: NetworkSpec,  # noqa: ARG001 - the backbone's, which brings its own
    state: State,
) -> InstanceAdaptive:
    """A pool on its backbone, on the CPU."""
    backbone = config.frozen.load(torch.device("cpu"))
    network = config.network(backbone, len(task.classes))
    network.pool.load_state_dict(state)
    return network


@register(
    "fedins",
    FedInsConfig,
    kinds=("segmentation", "classification"),
    panels=(Panel("pool"),),
    network=pool_network,
    refused={
        "volumes": "its pool adapts a frozen U-Net or ViT for slices, and no backbone for volumes is known"
    },
)
class FedIns(Algorithm):
    """FedIns on a U-Net for a segmentation task, on a ViT for a classification."""

    def __init__(self, config: FedInsConfig, task: Task) -> None:
        manifest = config.frozen.manifest
        self.config = config
        self.task = task
        self.classes = len(task.classes)
        self.network = manifest.network
        self.loss = config.loss_for(task)
        backbone = outline(manifest.network.name, **manifest.network.arguments)
        assert isinstance(backbone, Backbone)  # `find_backbone` takes no other
        self.metric = f"val_{metrics_of(task.kind)[0].name}"
        self.centred = config.centre == "yes" or (config.centre == "auto" and backbone.centred_queries)
        knows_task = has_head_for(manifest, task)
        self.starts_at_head = config.head == "backbone" or (config.head == "auto" and knows_task)

    @override
    def plan(self) -> Plan:
        """Describe data and queries once, train, validate the last pool, which no round has, and test."""
        once = (STATISTICS, QUERIES) if self.centred else (STATISTICS,)
        pool = (WEIGHTS, CENTRE) if self.centred else (WEIGHTS,)
        down = (*pool, USAGE) if self.config.frequency_penalty else pool
        return (
            Phase(
                "describe",
                1,
                (),
                once,
                self.describe_step,
                self.keep_centre,
                expected=self.expect_queries,
                everyone=True,
            ),
            Phase(
                "train",
                self.config.rounds,
                down,
                (WEIGHTS, SCORES, USAGE),
                self.train_step,
                self.average,
                partial(self.send, groups=down),
                self.expect_picks,
            ),
            Phase(
                "validate",
                1,
                pool,
                (SCORES, USAGE),
                self.validate_step,
                self.note_last,
                partial(self.send, groups=pool),
                self.expect_picks,
                everyone=True,
            ),
            scoring_phase(self.task, pool, self.score_step, partial(self.send_selected, groups=pool)),
        )

    @override
    def initial(self, context: StepContext) -> Memory:
        """The pool of round 0, from the run's seed, and no centre yet."""
        # The generator is the CPU's, so the pool of round 0 is the same on every device.
        network = self._on(torch.device("cpu"))
        backbone = network.backbone
        head = backbone.output_head if self.starts_at_head else None
        network.pool.draw(context.generator("pool"), head)
        pool, centre = _split(network)
        return Memory(join({"global": pool, "fixed": centre}))

    def send(
        self,
        server: Memory,
        site: str,
        *,
        groups: tuple[Group, ...],
    ) -> Mapping[str, State]:
        """The pool, the centre, and the picks of the round before; to every site the same."""
        found = {
            WEIGHTS.name: part(server.tensors, "global"),
            CENTRE.name: part(server.tensors, "fixed"),
            USAGE.name: part(server.tensors, "usage") or {"picks": torch.zeros(self.config.entries)},
        }
        return {group.name: found[group.name] for group in groups}

    def send_selected(
        self,
        server: Memory,
        site: str,
        *,
        groups: tuple[Group, ...],
    ) -> Mapping[str, State]:
        """The pool that is published, and the centre."""
        return {**self.send(server, site, groups=groups), WEIGHTS.name: self.selected(server)[0]}

    def expect_queries(self, server: Memory) -> Mapping[str, State]:
        """A sum of queries, where they are centred."""
        if not self.centred:
            return {}
        total = torch.zeros_like(part(server.tensors, "fixed")["centre"], dtype=torch.float64)
        return {QUERIES.name: {"sum": total, "count": torch.zeros(())}}

    def expect_picks(self, server: Memory) -> Mapping[str, State]:
        """Picks, which are whole, unlike those that are sent."""
        return {USAGE.name: {"picks": torch.zeros(self.config.entries, dtype=torch.int64)}}

    # ------------------------------------------------------------------ at a site

    def describe_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: AnySiteData
    ) -> ClientResult:
        """Make the queries; describe the data and, where queries are centred, their sum."""
        weight = weight_of(data, self.config.aggregation)
        fixed = memory.tensors or self._fixed(self._on(context.device), data)
        uploads = dict(describe(data, weight).uploads)
        if self.centred:
            patients, bounds = data.train.patients, context.bounds
            uploads[QUERIES.name] = summed_queries(fixed["train"], patients, bounds, context.noise)
        return ClientResult(uploads, weight, Memory(fixed))

    def validate_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: AnySiteData
    ) -> ClientResult:
        """Score the pool that came and count its picks."""
        return self._scored(context, received, memory, data)[0]

    def train_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: AnySiteData
    ) -> ClientResult:
        """Score the pool that came and count its picks; then train from it."""
        scored, network, fixed = self._scored(context, received, memory, data)
        training = self._training(context, received.get(USAGE.name, {}))
        loss = train_pool(
            network,
            slices_of(data.train),
            fixed["train"],
            training,
            context.generator("train"),
            fixed.get("train stems"),
        )
        uploads = {**scored.uploads, WEIGHTS.name: _split(network)[0]}
        return replace(scored, uploads=uploads, metrics={**scored.metrics, "loss": loss})

    def _scored(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: AnySiteData
    ) -> tuple[ClientResult, InstanceAdaptive, State]:
        """What a site says of the pool that came, the network with it, and what the backbone makes of its
        images."""
        config = self.config
        network = self._received(context, received)
        fixed = memory.tensors or self._fixed(network, data)
        if not len(data.train):
            raise SiteFailed("expected at least one image to train on, found none")
        score = ValidationScore()
        if len(data.val):
            val = slices_of(data.val)
            found = self._predict(context, network, val, fixed["val"], "score", fixed.get("val stems"))
            score = scored(found, val, self.classes)
        picks = usage_by(network, fixed["train"])
        uploads = {SCORES.name: score.state(), USAGE.name: {"picks": picks}}
        metrics = {
            **score.metrics(self.metric),
            "key_entropy": key_entropy(picks),
            "dead_keys": float(unused(picks)),
        }
        # A site that was not there when queries were made keeps them from now on.
        kept = None if memory.tensors else Memory(fixed)
        weight = weight_of(data, config.aggregation)
        return ClientResult(uploads, weight, kept, metrics), network, fixed

    def score_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: AnySiteData
    ) -> ClientResult:
        """Score the selected pool on the test patients, with queries that are made for it."""
        network = self._received(context, received)

        def answer(data: Data) -> Tensor:
            examples = slices_of(data)
            queries = queries_of(network, examples, self.config.batch_size)
            return self._predict(context, network, examples, queries, "test")

        return score_once({"": answer}, data, self.task)

    def _predict(
        self,
        context: StepContext,
        network: InstanceAdaptive,
        examples: Examples,
        queries_NQ: Tensor,
        purpose: str,
        stems_NTD: Tensor | None = None,
    ) -> Tensor:
        config = self.config
        draw = context.generator(purpose)
        found = predict_pool(
            network, examples, queries_NQ, config.batch_size, config.routing, draw, stems_NTD
        )
        return torch.from_numpy(examples.answered(found.numpy()))

    def _received(self, context: StepContext, received: Mapping[str, State]) -> InstanceAdaptive:
        """The backbone with the pool that came."""
        network = self._on(context.device)
        # Where there is no centre, the empty pool's zeros stay.
        centre = received.get(CENTRE.name, _split(network)[1])
        network.pool.load_state_dict({**received[WEIGHTS.name], **centre})
        return network

    def _fixed(self, network: InstanceAdaptive, data: AnySiteData) -> State:
        """What the frozen backbone makes of the site's images: queries and, of the kept blocks, stems."""
        size, found = self.config.batch_size, dict[str, Tensor]()
        for split, own in (("train", data.train), ("val", data.val)):
            if split == "val" and own is data.train:
                return found | {name.replace("train", "val"): made for name, made in found.items()}
            examples = slices_of(own)
            found[split] = queries_of(network, examples, size)
            # Images that are augmented give others in every batch.
            wanted = split == "val" or not self.config.augment
            if wanted and (stems := stems_of(network, examples, size)) is not None:
                found[f"{split} stems"] = stems
        return found

    def _training(self, context: StepContext, usage: State) -> PoolTraining:
        config = self.config
        penalty = None
        if usage:
            picks = usage["picks"].to(context.device)
            images = picks.sum() / min(config.top, config.entries)
            penalty = config.frequency_penalty * picks / images.clamp(min=1)
        return PoolTraining(
            config.local_epochs,
            config.batch_size,
            config.learning_rate * config.learning_rate_decay**context.round,
            config.key_weight,
            config.optimiser,
            config.augment,
            config.routing,
            penalty,
            config.precision,
            self.loss,
            config.randomises(context.round),
        )

    def _on(self, device: torch.device) -> InstanceAdaptive:
        """The backbone with an empty pool."""
        config = self.config
        network = config.network(config.frozen.load(device), self.classes)
        network.pool.to(device)
        return network

    # ------------------------------------------------------------------ at the server

    def keep_centre(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Keep what the sites describe, and the mean query."""
        fixed = self._centre(server, result.reduced.get(QUERIES.name))
        tensors = {**server.tensors, **join({"fixed": fixed})}
        return Memory(tensors, {**server.facts, **merge_described(result), "usage": []})

    def average(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Average; note scores and picks of the pool that was sent, and keep it if it is the best so far."""
        noted = self._noted(server, result, context.round)
        return Memory({**noted.tensors, **join({"global": result.reduced[WEIGHTS.name]})}, noted.facts)

    def note_last(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Note scores and picks of the pool of the last round, and keep it if it is the best."""
        return self._noted(server, result, self.config.rounds)

    def _noted(self, server: Memory, result: RoundResult, rounds_done: int) -> Memory:
        selection = self.config.selection if self.config.selectable(rounds_done) else "last"
        facts = note_scores(server.facts, result, self.metric, rounds_done, selection)
        picks = result.reduced.get(USAGE.name, {}).get("picks")
        facts["usage"] = [*facts["usage"], _seen(rounds_done, picks)]
        states = {name: part(server.tensors, name) for name in ("global", "fixed", "best")}
        if facts["best"] != server.facts.get("best"):
            states["best"] = states["global"]
        if picks is not None:
            states["usage"] = {"picks": picks.float()}
        return Memory(join(states), facts)

    def _centre(self, server: Memory, total: State | None) -> State:
        """The mean query of the training images; as it was (zero) where no site sends any."""
        if total is None:
            return part(server.tensors, "fixed")
        return {"centre": (total["sum"] / total["count"].double()).float()}

    def selected(self, server: Memory) -> tuple[State, dict[str, Any]]:
        """The best pool, or the last one where nothing could be validated; its score and round."""
        chosen = server.facts.get("best")
        return part(server.tensors, "best" if chosen else "global"), chosen or server.facts["latest"]

    @override
    def publication(self, server: Memory) -> Publication:
        """The selected pool."""
        facts = server.facts
        pool, noted = self.selected(server)
        weights = {**pool, **part(server.tensors, "fixed")}
        metrics = {name: value for name, value in noted.items() if name != "round" and value is not None}
        metrics |= scored_metrics(facts, self.task)
        usage = next((seen["picks"] for seen in facts["usage"] if seen["round"] == noted["round"]), None)
        return Publication(
            "ssf-pool",
            (ModelDraft("ssf-pool", self.network, weights, metrics=metrics),),
            {
                "selected_round": noted["round"],
                "backbone": self.config.backbone,
                "exchanged": self._exchanged(weights),
                "key_usage": [
                    {name: seen[name] for name in ("round", "entropy", "dead")} for seen in facts["usage"]
                ],
            },
            described(facts),
            composite={
                "backbone": self.config.frozen.artefact().digest,
                "entries": self.config.entries,
                "top": min(self.config.top, self.config.entries),
                "usage": usage,
                "routing": self.config.routing,
                "blocks": self.config.blocks,
            },
            exhibits=Memory({}, {"usage": facts["usage"], "exchanged": self._exchanged(weights)}),
        )

    def _exchanged(self, pool: State) -> dict[str, int]:
        """Bytes that a site sends in a round for its pool, and would for all of the backbone's weights."""
        full = outline(self.network.name, **self.network.arguments).state_dict()
        floats = [tensor for tensor in full.values() if tensor.is_floating_point()]
        return {
            "pool": _FLOAT_BYTES * sum(t.numel() for name, t in pool.items() if name != "centre"),
            "full_fine_tuning": _FLOAT_BYTES * sum(tensor.numel() for tensor in floats),
        }


def _split(network: InstanceAdaptive) -> tuple[State, State]:
    """What is averaged, and the centre, on the CPU."""
    state = {name: tensor.detach().cpu().clone() for name, tensor in network.pool.state_dict().items()}
    centre = state.pop("centre")
    return state, {"centre": centre}


def _seen(round_: int, picks: Tensor | None) -> dict[str, object]:
    """How the keys of the pool after `round_` rounds were used, over all sites that let it out."""
    if picks is None:
        return {"round": round_, "picks": None, "entropy": None, "dead": None}
    return {
        "round": round_,
        "picks": [int(count) for count in picks.tolist()],
        "entropy": key_entropy(picks),
        "dead": unused(picks),
    }
