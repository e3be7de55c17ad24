"""The loop of a learning that keeps its best epoch and can be resumed: test-time adaptation and joining.

    step 0: measure
    for each epoch:
        learn, then measure; stop if that is not safe
    leave the network at the best safe epoch, step 0 among them

A checkpoint after every epoch has all that another process needs to continue bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

import torch
from torch import nn

from personalization.state import State, clone


class Epoch(Protocol):
    """A measured epoch; step 0 is the first. The learning ends with one that is not safe."""

    @property
    def epoch(self) -> int:
        """The number of the epoch."""

    @property
    def safe(self) -> bool:
        """Whether the network of this epoch may be kept."""


Record = TypeVar("Record", bound=Epoch)
Checkpoint = TypeVar("Checkpoint")


class KeepBest(ABC, Generic[Record, Checkpoint]):
    """One learning: the learned parameters by name, its epochs, and the best state so far."""

    def __init__(self, network: nn.Module, learned: Mapping[str, nn.Parameter], epochs: int) -> None:
        self.network, self.learned, self.epochs = network, learned, epochs
        self.history: list[Record] = []
        self.best_epoch = 0
        self.best = clone(learned)

    @abstractmethod
    def start(self) -> Record:
        """Measure step 0."""

    @abstractmethod
    def restore(self, checkpoint: Checkpoint) -> None:
        """Take history, states and optimiser from a checkpoint. Raises CheckpointError for another's."""

    @abstractmethod
    def learn(self, epoch: int) -> Record:
        """Learn for one epoch, then measure."""

    @abstractmethod
    def improves(self, record: Record, best: Record) -> bool:
        """Whether a safe epoch is better than the best one so far."""

    @abstractmethod
    def checkpoint(self) -> Checkpoint:
        """Make a checkpoint of the present state; it shares no memory with the learning."""

    @property
    def over(self) -> bool:
        """Whether the learning has ended: all epochs are done, or the last one was not safe."""
        last = self.history[-1]
        return not last.safe or last.epoch == self.epochs

    def run(self, resume: Checkpoint | None, after_epoch: Callable[[Checkpoint], None] | None) -> None:
        """Learn from step 0, or from `resume`, to the end.

        `after_epoch` gets a checkpoint after every epoch, step 0 included. A resume passes the checkpoint
        that it begins with again: a killed process may not have handled it. An exception of a step or of
        `after_epoch` ends the learning and is raised, with the network at the best safe state so far.
        """
        try:
            if resume is None:
                self.history = [self.start()]
            else:
                self.restore(resume)
            self._report(after_epoch)
            while not self.over:
                record = self.learn(len(self.history))
                if record.safe and self.improves(record, self.history[self.best_epoch]):
                    self.best_epoch, self.best = len(self.history), clone(self.learned)
                self.history.append(record)
                self._report(after_epoch)
        finally:
            self.load(self.best)
            self.network.zero_grad()
            self.network.eval()

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Set the learned parameters."""
        for name, parameter in self.learned.items():
            parameter.copy_(state[name])

    def _report(self, after_epoch: Callable[[Checkpoint], None] | None) -> None:
        if after_epoch is not None:
            after_epoch(self.checkpoint())
