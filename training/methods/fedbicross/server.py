"""FedBiCross on the server: clusters from the uploads, then their models by synthesis and distillation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from personalization.fedbicross.clustering import answers_to_noise, cluster, mixing_of
from personalization.fedbicross.synthesis import Trajectory, recalibrate
from training.algorithm import Memory, Plan, ServerStage, State, StepContext
from training.local.networks import network_of, state_of
from training.methods.fedbicross.config import FedBiCrossConfig
from training.methods.one_shot import OneShot, check_student
from training.parts.part import Part, Slot

SYNTHESIS = "synthesise+bilevel"
EXHIBITED = 12


@dataclass(frozen=True)
class Clusters:
    """Which site is in which cluster, and what becomes of the clusters' models, by the clusters' names.

    The models G_k are students until the last step of Stage 2. `mixing` has w, row by row; `seeds` one for
    each trajectory; `trajectory` what goes on of one that is under way; `exhibits` a few of the last images.
    """

    assignment: Mapping[str, str] = field(default_factory=dict)
    silhouettes: Mapping[str, float] = field(default_factory=dict)
    models: Mapping[str, State] = field(default_factory=dict)
    mixing: tuple[tuple[float, ...], ...] = ()
    seeds: tuple[int, ...] = ()
    trajectory: State = field(default_factory=dict)
    exhibits: State = field(default_factory=dict)
    log: tuple[Mapping[str, Any], ...] = ()

    def members(self, name: str) -> list[str]:
        """The sites of a cluster, in order."""
        return [site for site, own in self.assignment.items() if own == name]


class CrossDistil(Part):
    """Stage 1, and Stage 2 a few steps at a time."""

    def __init__(self, method: OneShot, config: FedBiCrossConfig) -> None:
        self.method = method
        self.config = config
        self.chunks = math.ceil(config.steps / config.checkpoint_every)  # of one trajectory
        self.slot = Slot("clusters", Clusters())

    @override
    def plan(self) -> Plan:
        steps = self.config.epochs * self.chunks
        return ServerStage("cluster", 1, self.cluster), ServerStage(SYNTHESIS, steps, self.synthesise)

    def cluster(self, context: StepContext, server: Memory) -> Memory:
        """Stage 1, and each cluster's student as it begins."""
        method, config = self.method, self.config
        uploads, draw = method.upload.slot.read(server), context.generator("probes")
        probes = torch.randn(config.probes, *method.shape, generator=draw)
        networks = (network_of(method.network, model, context.device) for model in uploads.models.values())
        answers = torch.cat([answers_to_noise([each], probes, config.probe_output) for each in networks])
        draw, least = context.generator("k-means"), config.min_silhouette
        found = cluster(answers, draw, least_silhouette=least, count=config.clusters)
        sites, start = list(uploads.models), "average" if config.init == "cluster_average" else config.init
        seeds = torch.randint(2**62, (config.epochs,), generator=context.generator("trajectories"))
        clusters = Clusters(
            {site: str(k + 1) for site, k in zip(sites, found.assignment, strict=True)},
            {str(tried): value for tried, value in found.silhouettes.items()},
            {
                str(k + 1): uploads.student(
                    start,
                    method.network,
                    context.generator(f"student {k}"),
                    [sites[member] for member in found.members(k)],
                )
                for k in range(found.count)
            },
            _rows(mixing_of(answers, found, config.mixing)),
            tuple(seeds.tolist()),
        )
        return self.slot.write(server, clusters)

    def synthesise(self, context: StepContext, server: Memory) -> Memory:
        """Stage 2: the next few steps of a trajectory; after the last one, the finished models."""
        config, before = self.config, self.slot.read(server)
        epoch, chunk = divmod(context.round, self.chunks)
        trajectory = self._trajectory(context, server, epoch)
        if chunk:
            trajectory.restore(before.trajectory)
        first = chunk * config.checkpoint_every
        steps = range(first + 1, min(first + config.checkpoint_every, config.steps) + 1)
        notes = _means([trajectory.step(step) for step in steps])
        students = dict(zip(before.models, trajectory.students, strict=True))
        for name, student in students.items():
            check_student(f"the model of cluster {name}", student, "inner_rate")
        rows = _rows(trajectory.mixing)
        entry = {"step": epoch * config.steps + steps[-1], **notes, "mixing": rows}
        after = replace(before, mixing=rows, log=(*before.log, entry))
        if context.round < context.rounds - 1:
            models = {name: state_of(student) for name, student in students.items()}
            after = replace(after, models=models, trajectory=trajectory.tensors())
            return self.slot.write(server, after)
        # The uploads have done their work and are dropped.
        return self.slot.write(self.method.upload.slot.clear(server), _finished(after, trajectory, students))

    def _trajectory(self, context: StepContext, server: Memory, epoch: int) -> Trajectory:
        """A trajectory as it begins, from the students and w as they are."""
        method, clusters = self.method, self.slot.read(server)
        uploads = method.upload.slot.read(server).models

        def network(state: State) -> nn.Module:
            return network_of(method.network, state, context.device)

        return Trajectory(
            [[network(uploads[site]) for site in clusters.members(name)] for name in clusters.models],
            [network(model) for model in clusters.models.values()],
            torch.tensor(clusters.mixing, dtype=torch.float64),
            method.shape,
            method.classes,
            self.config.synthesis(),
            clusters.seeds[epoch],
        )


def _finished(clusters: Clusters, trajectory: Trajectory, students: Mapping[str, nn.Module]) -> Clusters:
    """With the models that are published, which have statistics of their own."""
    images = trajectory.images()
    for student, row in zip(students.values(), trajectory.mixing, strict=True):
        recalibrate(student, images, row)
    return replace(
        clusters,
        models={name: state_of(student) for name, student in students.items()},
        seeds=(),
        trajectory={},
        exhibits={name: own[:EXHIBITED].cpu().clone() for name, own in zip(students, images, strict=True)},
    )


def _rows(mixing: torch.Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, mixing.tolist()))


def _means(notes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of every loss over the steps that have it."""
    names = dict.fromkeys(name for note in notes for name in note)
    return {name: fmean(note[name] for note in notes if name in note) for name in names}
