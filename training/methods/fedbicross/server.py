"""FedBiCross on the server: clusters from the uploads, then their models by synthesis and distillation.

What the server remembers, by prefix of its tensors:

    model/SITE/…       the uploads, until the last step of Stage 2
    seeds              [epochs] int64, one per trajectory
    stage/…            a trajectory under way (see `Trajectory.tensors`), students and w among it
    cluster/NAME/…     the finished models
    mixing             w, [K, K] float64
    exhibit/NAME       a few of the last images
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch

from model_store.manifest import NetworkSpec
from personalization.fedbicross.clustering import Clustering, answers_to_noise, cluster, mixing_of
from personalization.fedbicross.synthesis import Trajectory, recalibrate
from training.algorithm import Memory, State, StepContext
from training.local.networks import network_of, state_of
from training.methods.fedbicross.config import FedBiCrossConfig
from training.methods.one_shot import check_student, first_student
from training.state_tree import join, part

EXHIBITED = 12


def chunks(config: FedBiCrossConfig) -> int:
    """Checkpointed steps of one trajectory."""
    return math.ceil(config.steps / config.checkpoint_every)


def cluster_models(
    config: FedBiCrossConfig,
    network: NetworkSpec,
    shape: tuple[int, int, int],
    context: StepContext,
    server: Memory,
) -> Memory:
    """Stage 1, and each cluster's student as it begins."""
    sites = list(server.facts["sites"])
    states = [part(server.tensors, f"model/{site}") for site in sites]
    draw = context.generator("probes")
    probes = torch.randn(config.probes, *shape, generator=draw)
    networks = (network_of(network, state, context.device) for state in states)
    answers = torch.cat([answers_to_noise([each], probes, config.probe_output) for each in networks])
    found = cluster(
        answers, context.generator("k-means"), least_silhouette=config.min_silhouette, count=config.clusters
    )
    students = {
        f"stage/student/{index}": _student(config, network, states, found, index, context, server)
        for index in range(found.count)
    }
    tensors = {
        **server.tensors,
        **join(students),
        "stage/mixing": mixing_of(answers, found, config.mixing),
        "seeds": torch.randint(2**62, (config.epochs,), generator=context.generator("trajectories")),
    }
    facts = {
        **server.facts,
        "assignment": {site: str(k + 1) for site, k in zip(sites, found.assignment, strict=True)},
        "silhouettes": {str(tried): value for tried, value in found.silhouettes.items()},
        "log": [],
    }
    return Memory(tensors, facts)


def _student(
    config: FedBiCrossConfig,
    network: NetworkSpec,
    states: Sequence[State],
    found: Clustering,
    index: int,
    context: StepContext,
    server: Memory,
) -> State:
    sizes = list(server.facts["sites"].values())
    members = found.members(index)
    return first_student(
        "average" if config.init == "cluster_average" else config.init,
        network,
        [states[member] for member in members],
        [sizes[member] for member in members],
        context.generator(f"student {index}"),
    )


def synthesise(
    config: FedBiCrossConfig,
    network: NetworkSpec,
    shape: tuple[int, int, int],
    classes: int,
    context: StepContext,
    server: Memory,
) -> Memory:
    """Stage 2: the next few steps of a trajectory; after the last one, the finished models."""
    epoch, chunk = divmod(context.round, chunks(config))
    clusters = _clusters(server.facts)
    members = [
        [network_of(network, part(server.tensors, f"model/{site}"), context.device) for site in sites]
        for sites in clusters.values()
    ]
    stage = part(server.tensors, "stage")
    students = [
        network_of(network, part(stage, f"student/{index}"), context.device) for index in range(len(clusters))
    ]
    trajectory = Trajectory(
        members,
        students,
        stage["mixing"],
        shape,
        classes,
        config.synthesis(),
        int(server.tensors["seeds"][epoch]),
    )
    if chunk:
        trajectory.restore(stage)
    first = chunk * config.checkpoint_every
    steps = range(first + 1, min(first + config.checkpoint_every, config.steps) + 1)
    notes = [trajectory.step(step) for step in steps]
    for name, student in zip(clusters, trajectory.students, strict=True):
        check_student(f"the model of cluster {name}", student, "inner_rate")
    entry = {
        "step": epoch * config.steps + steps[-1],
        **_means(notes),
        "mixing": trajectory.mixing.tolist(),
    }
    facts = {**server.facts, "log": [*server.facts["log"], entry]}
    if context.round < context.rounds - 1:
        kept = {name: tensor for name, tensor in server.tensors.items() if not name.startswith("stage/")}
        return Memory({**kept, **join({"stage": trajectory.tensors()})}, facts)
    return Memory(_finished(trajectory, tuple(clusters)), facts)


def _finished(trajectory: Trajectory, names: Sequence[str]) -> State:
    """The cluster models, with statistics of their own. The uploads have done their work and are dropped."""
    images = trajectory.images()
    tensors: State = {"mixing": trajectory.mixing}
    for index, (name, student) in enumerate(zip(names, trajectory.students, strict=True)):
        recalibrate(student, images, trajectory.mixing[index])
        tensors |= join({f"cluster/{name}": state_of(student)})
        tensors[f"exhibit/{name}"] = images[index][:EXHIBITED].cpu().clone()
    return tensors


def _clusters(facts: Mapping[str, Any]) -> dict[str, list[str]]:
    """The sites of every cluster, by the cluster's name, in order."""
    names = sorted(set(facts["assignment"].values()), key=int)
    return {name: [site for site, found in facts["assignment"].items() if found == name] for name in names}


def _means(notes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of every loss over the steps that have it."""
    names = dict.fromkeys(name for note in notes for name in note)
    return {name: fmean(note[name] for note in notes if name in note) for name in names}
