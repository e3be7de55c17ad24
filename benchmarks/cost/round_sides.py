"""The two sides of a measured round: the plain loop and the method that only echoes, with synthetic data."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np
import torch
from torch import nn

from personalization.losses import soft_dice_loss
from personalization.networks import build, initialise
from personalization.state import to_safetensors
from personalization.transfer import CPU
from training.algorithm import ClientResult, Memory, State, StepContext
from training.engine.client import RunEnvironment
from training.engine.worker import keep_freed_memory
from training.local.data import slices_of
from training.local.scores import dice_per_patient
from training.local.site import SiteData
from training.local.slices import Slices
from training.methods.fedavg import FedAvg
from training.parts.train import SCORES, WEIGHTS, Train

SITES = ("CS", "DU", "FG", "HT")
SEED = 0
BATCH = 16
RATE = 1e-3
TAU = 0.9


class _EchoTrain(Train):
    """Rounds in which every site returns the weights it received, and scores nothing."""

    def step(
        self,
        context: StepContext,  # noqa: ARG002
        received: Mapping[str, State],
        memory: Memory,  # noqa: ARG002
        data: SiteData,
    ) -> ClientResult:
        """Return the received weights."""
        scored = self.scored(nn.Identity(), data)
        return replace(scored, uploads={**scored.uploads, WEIGHTS.name: received[WEIGHTS.name]})

    def scored(self, network: nn.Module, data: SiteData) -> ClientResult:  # noqa: ARG002
        """Score nothing."""
        return ClientResult({SCORES.name: {"score": torch.zeros(2, dtype=torch.float64)}}, 1.0)


class Echo(FedAvg):
    """FedAvg without training."""

    def training(self) -> Train:
        """Rounds of nothing."""
        return _EchoTrain(self)

    def network_here(
        self,
        context: StepContext,  # noqa: ARG002
        w_g: State,  # noqa: ARG002
        data: SiteData,  # noqa: ARG002
    ) -> nn.Module:
        """None: it would only take time."""
        return nn.Identity()


def site_data(site: str, slices: int, size: int) -> SiteData:
    """Noise with a disc in it: the cost of a step does not depend on the pixels."""
    generator = np.random.default_rng(list(site.encode()))
    radius = np.hypot(*np.mgrid[-1 : 1 : size * 1j, -1 : 1 : size * 1j])

    def drawn(count: int) -> Slices:
        targets = np.repeat((radius < 0.5).astype(np.uint8)[None], count, axis=0)
        noise = generator.normal(size=(count, 1, size, size)).astype(np.float32)
        names = tuple(f"{site}-{i // 8}" for i in range(count))
        return Slices(noise + targets[:, None], targets, names, names, tuple(range(count)))

    return SiteData(site, drawn(slices), drawn(slices // 4), drawn(0), None)


def plain_rounds(
    pipe: Connection, width: int, slices: int, size: int, rounds: int, personal: bool, device: str
) -> None:
    """The plain loop: one round per message, answered by its wall and processor seconds; then weights."""
    # As in the engine's workers; otherwise the ratio would compare two allocators.
    keep_freed_memory()
    torch.set_num_threads(1)
    environment = RunEnvironment(SEED, device)
    environment.apply()
    sites = {site: site_data(site, slices, size) for site in SITES}
    network = build("unet", in_channels=1, classes=2, width=width)
    initialise(network, environment.context("initial", 0, 1).generator("weights"))
    network.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]  # absent from torch's stubs
    shared = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    followers = {site: {name: tensor.clone() for name, tensor in shared.items()} for site in SITES}
    for round_ in range(rounds):
        pipe.recv()
        began, used = time.perf_counter(), time.process_time()
        sums = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in shared.items()}
        for site, data in sites.items():
            network.load_state_dict(shared)
            dice_per_patient(network, data.val, 2, BATCH)
            network.train()
            optimiser = torch.optim.Adam(network.parameters(), lr=RATE)
            generator = environment.context("train", round_, rounds, site).generator("train")
            for images, targets in slices_of(data.train).epoch(BATCH, generator, True, 1, CPU):
                optimiser.zero_grad(set_to_none=True)
                loss = soft_dice_loss(network(images.to(device)), targets.to(device))
                torch.autograd.backward(loss)
                optimiser.step()
                loss.item()
            trained = network.state_dict()
            for name, total in sums.items():
                total.add_(trained[name].double(), alpha=len(data.train))
            if personal:
                for name, follower in followers[site].items():
                    follower.copy_((1 - TAU) * follower.double() + TAU * trained[name].double())
                network.load_state_dict(followers[site])
                dice_per_patient(network, data.val, 2, BATCH)
        weight = sum(len(data.train) for data in sites.values())
        shared = {name: (total / weight).to(shared[name].dtype) for name, total in sums.items()}
        pipe.send((time.perf_counter() - began, time.process_time() - used))
    # Sent as bytes: tensors in a pipe would share memory with this process, which is about to end.
    pipe.send(to_safetensors(shared))
