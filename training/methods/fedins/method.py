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
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from model_store.manifest import NetworkSpec
from model_store.task import Task
from personalization.fedins import InstanceAdaptive, key_entropy, unused
from personalization.metrics import metrics_of
from personalization.networks import Backbone, outline
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
from training.backbones import has_head_for
from training.errors import SiteFailed
from training.local.data import Answers, Data, slices_of
from training.local.scores import ValidationScore, scored, weight_of
from training.local.site import SiteData
from training.methods.fedins.client import predict_pool, see, train_pool, usage_by
from training.methods.fedins.config import FedInsConfig
from training.methods.fedins.queries import CENTRE, DescribeQueries, Seen
from training.methods.registry import Panel, register
from training.parts.part import Added, Part, Parted, Slot
from training.parts.test import Model, Predict, Test
from training.parts.train import SCORES, WEIGHTS, Shared


def check_usage(state: State, size: SiteSize) -> None:  # noqa: ARG001
    """Raise ValueError for a negative number of picks, or one with which the sites' sum may overflow."""
    if bool(((state["picks"] < 0) | (state["picks"] > _MOST_PICKS)).any()):
        raise ValueError(f"expected 0 to {_MOST_PICKS} picks of every entry, found another number")


USAGE = Group("usage", "statistics", "sum", essential=False, check=check_usage)
_FLOAT_BYTES = 4
_MOST_PICKS = 2**40


@dataclass(frozen=True)
class Picked:
    """How the keys of the pool after `round` rounds were used, over all sites that let it out."""

    round: int
    picks: list[int] | None = None
    entropy: float | None = None
    dead: int | None = None

    @classmethod
    def of(cls, round_: int, picks: Tensor | None) -> Picked:
        """From the number of picks of every entry."""
        if picks is None:
            return cls(round_)
        return cls(round_, [int(count) for count in picks.tolist()], key_entropy(picks), unused(picks))


@dataclass(frozen=True)
class Usage:
    """The use of the keys by round, and the `picks` of the last round in which a site let them out."""

    picks: State
    rounds: tuple[Picked, ...] = ()


class TrainPool(Part):
    """The rounds in which the pool is averaged; the sites also score it, and count its picks."""

    def __init__(self, method: FedIns) -> None:
        self.method = method
        self.config = method.config
        self.slot = Slot("train", Shared())
        self.usage = Slot("usage", Usage({"picks": torch.zeros(self.config.entries)}))
        self.downloads = (WEIGHTS, CENTRE) if method.describe.centred else (WEIGHTS,)

    @override
    def begin(self, context: StepContext, server: Memory) -> Memory:
        """The pool of round 0, from the run's seed."""
        # The generator is the CPU's, so the pool of round 0 is the same on every device.
        network = self.config.network(self.method.classes, torch.device("cpu"))
        head = network.backbone.output_head if self.method.starts_at_head else None
        network.pool.draw(context.generator("pool"), head)
        return self.slot.write(server, Shared(pool_of(network)))

    @override
    def plan(self) -> Plan:
        """The rounds, and the score of the last pool, which no round has."""
        rounds, pool, said = self.config.rounds, self.downloads, (SCORES, USAGE)
        down = (*pool, USAGE) if self.config.frequency_penalty else pool
        train = Phase(
            "train", rounds, down, (WEIGHTS, *said), self.step, self.average, self.send_all, self.expect
        )
        last = Phase("validate", 1, pool, said, self.score_step, self.keep_last, self.send, self.expect)
        return train, replace(last, everyone=True)

    @override
    def publish(self, server: Memory) -> Added:
        noted = self.slot.read(server).noted
        rounds = self.usage.read(server).rounds
        usage = [{"round": each.round, "entropy": each.entropy, "dead": each.dead} for each in rounds]
        return Added(noted.metrics, {"selected_round": noted.round, "key_usage": usage})

    def send(self, server: Memory, site: str) -> Mapping[str, State]:
        """The pool and the centre, to every site the same."""
        return {WEIGHTS.name: self.slot.read(server).w_g, **self.method.describe.centre(server)}

    def send_all(self, server: Memory, site: str) -> Mapping[str, State]:
        """The pool, the centre, and the picks of the round before where these count."""
        picks = {USAGE.name: self.usage.read(server).picks} if self.config.frequency_penalty else {}
        return {**self.send(server, site), **picks}

    def send_selected(self, server: Memory, site: str) -> Mapping[str, State]:
        """The pool that is published, and the centre."""
        return {**self.send(server, site), WEIGHTS.name: self.slot.read(server).selected}

    def expect(self, server: Memory) -> Mapping[str, State]:
        """Picks, which are whole, unlike those that are sent."""
        return {USAGE.name: {"picks": torch.zeros(self.config.entries, dtype=torch.int64)}}

    # ------------------------------------------------------------------ at a site

    def step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """Score the pool that came and count its picks; then train from it."""
        scored, network, seen = self._scored(context, received, memory, data)
        images, draw = slices_of(data.train), context.generator("train")
        penalty = self._penalty(context, received)
        loss = train_pool(
            network, images, seen.train, self.config, context.round, self.method.loss, draw, penalty
        )
        uploads = {**scored.uploads, WEIGHTS.name: pool_of(network)}
        return replace(scored, uploads=uploads, metrics={**scored.metrics, "loss": loss})

    def score_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """Score the pool that came and count its picks."""
        return self._scored(context, received, memory, data)[0]

    def _scored(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> tuple[ClientResult, InstanceAdaptive, Seen]:
        """What a site says of the pool that came, the network with it, and what the backbone makes of its
        images."""
        method, describe = self.method, self.method.describe
        network = method.network_here(context, received)
        seen = describe.see(network, memory, data)
        if not len(data.train):
            raise SiteFailed("expected at least one image to train on, found none")
        score = ValidationScore()
        if len(data.val):
            val, draw = slices_of(data.val), context.generator("score")
            score = scored(predict_pool(network, val, seen.val, self.config, draw), val, method.classes)
        picks = usage_by(network, seen.train["queries"])
        uploads = {SCORES.name: score.state(), USAGE.name: {"picks": picks}}
        metrics = {
            **score.metrics(method.metric),
            "key_entropy": key_entropy(picks),
            "dead_keys": float(unused(picks)),
        }
        # A site that was not there when queries were made keeps them from now on.
        kept = None if describe.seen.holds(memory) else describe.seen.write(memory, seen)
        weight = weight_of(data, self.config.aggregation)
        return ClientResult(uploads, weight, kept, metrics), network, seen

    def _penalty(self, context: StepContext, received: Mapping[str, State]) -> Tensor | None:
        """[M], by the share of the images that picked an entry in the round before."""
        config = self.config
        if USAGE.name not in received:
            return None
        picks = received[USAGE.name]["picks"].to(context.device)
        images = picks.sum() / min(config.top, config.entries)
        return config.frequency_penalty * picks / images.clamp(min=1)

    # ------------------------------------------------------------------ at the server

    def average(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Average (Eq. 8), once scores and picks of the pool that was sent are noted."""
        noted = self.note(server, result, context.round)
        shared = replace(self.slot.read(noted), w_g=result.reduced[WEIGHTS.name])
        return self.slot.write(noted, shared)

    def keep_last(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Note scores and picks of the pool of the last round."""
        return self.note(server, result, self.config.rounds)

    def note(self, server: Memory, result: RoundResult, rounds_done: int) -> Memory:
        """The server's memory with scores and picks of its pool, and with that if it is the best so far."""
        shared = self.slot.read(server).after(result, self.config, self.method.metric, rounds_done)
        picks, usage = result.reduced.get(USAGE.name, {}).get("picks"), self.usage.read(server)
        latest = usage.picks if picks is None else {"picks": picks.float()}
        noted = Usage(latest, (*usage.rounds, Picked.of(rounds_done, picks)))
        return self.usage.write(self.slot.write(server, shared), noted)


def pool_network(
    config: FedInsConfig,
    task: Task,
    spec: NetworkSpec,  # noqa: ARG001 - the backbone's, which brings its own
    state: State,
) -> InstanceAdaptive:
    """A pool on its backbone, on the CPU."""
    network = config.network(len(task.classes), torch.device("cpu"))
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
class FedIns(Parted):
    """FedIns on a U-Net for a segmentation task, on a ViT for a classification."""

    def __init__(self, config: FedInsConfig, task: Task) -> None:
        manifest = config.frozen.manifest
        self.config = config
        self.task = task
        self.classes = len(task.classes)
        self.network = manifest.network
        self.loss = config.loss_for(task)
        self.metric = f"val_{metrics_of(task.kind)[0].name}"
        backbone = outline(manifest.network.name, **manifest.network.arguments)
        assert isinstance(backbone, Backbone)  # `find_backbone` takes no other
        centred = config.centre == "yes" or (config.centre == "auto" and backbone.centred_queries)
        knows_task = has_head_for(manifest, task)
        self.starts_at_head = config.head == "backbone" or (config.head == "auto" and knows_task)
        self.describe = DescribeQueries(config, self.classes, backbone.query_width, centred=centred)
        self.train = TrainPool(self)
        self.test = Test(task, self.answers, ("",), self.train.downloads, self.train.send_selected)
        self.parts = (self.describe, self.train, self.test)

    def network_here(self, context: StepContext, received: Mapping[str, State]) -> InstanceAdaptive:
        """The backbone with the pool that came."""
        network = self.config.network(self.classes, context.device)
        # Where there is no centre, the empty pool's zeros stay.
        centre = received.get(CENTRE.name, {"centre": network.pool.centre})
        network.pool.load_state_dict({**received[WEIGHTS.name], **centre})
        return network

    def answers(
        self, context: StepContext, received: Mapping[str, State], memory: Memory
    ) -> Mapping[Model, Predict | None]:
        """The model that a site tests: the selected pool, with queries that are made for it."""
        return {"": partial(self._answer, context, self.network_here(context, received))}

    def _answer(self, context: StepContext, network: InstanceAdaptive, data: Data) -> Answers:
        examples, draw = slices_of(data), context.generator("test")
        seen = see(network, examples, self.config.batch_size, stems=False)
        return predict_pool(network, examples, seen, self.config, draw)

    @override
    def made(self, server: Memory, metrics: Mapping[str, float]) -> Publication:
        """The selected pool."""
        config = self.config
        shared, rounds = self.train.slot.read(server), self.train.usage.read(server).rounds
        weights = {**shared.selected, **self.describe.mean.read(server).query}
        exchanged = self._exchanged(shared.selected)
        return Publication(
            "ssf-pool",
            (ModelDraft("ssf-pool", self.network, weights, metrics=metrics),),
            {"backbone": config.backbone, "exchanged": exchanged},
            composite={
                "backbone": config.frozen.artefact().digest,
                "entries": config.entries,
                "top": min(config.top, config.entries),
                "usage": next((each.picks for each in rounds if each.round == shared.noted.round), None),
                "routing": config.routing,
                "blocks": config.blocks,
            },
            exhibits=Memory({}, {"usage": [asdict(each) for each in rounds], "exchanged": exchanged}),
        )

    def _exchanged(self, pool: State) -> dict[str, int]:
        """Bytes that a site sends in a round for its pool, and would for all of the backbone's weights."""
        full = outline(self.network.name, **self.network.arguments).state_dict()
        floats = [tensor for tensor in full.values() if tensor.is_floating_point()]
        return {
            "pool": _FLOAT_BYTES * sum(tensor.numel() for tensor in pool.values()),
            "full_fine_tuning": _FLOAT_BYTES * sum(tensor.numel() for tensor in floats),
        }


def pool_of(network: InstanceAdaptive) -> State:
    """What is averaged, on the CPU: all but the centre."""
    state = network.pool.state_dict()
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items() if name != "centre"}
