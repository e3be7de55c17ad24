"""Checkpoint of a joining after an epoch: all state for a bit-identical resume in another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from personalization.adamw import Optimiser
from personalization.checkpoint import digest, from_bytes, to_bytes
from personalization.errors import CheckpointError
from personalization.state import State

FORMAT = "locum-joining/2"
_PARTS = ("state", "best", "moments")


@dataclass(frozen=True)
class JoiningEpoch:
    """One epoch, measured on the validation patients after it.

    `loss` is the mean over the training batches, None for step 0 or if it is not finite. `dice` is the mean
    over patients with a tumour, with all slices of a patient as one volume. `false_positives` is the share of
    slices without a tumour in which the prediction is larger than a speck, None without such slices. An epoch
    that is not `safe` has a `reason`.
    """

    epoch: int
    loss: float | None
    dice: float
    false_positives: float | None
    safe: bool = True
    reason: str | None = None


@dataclass(frozen=True)
class JoiningCheckpoint:
    """Joining after `history[-1].epoch` epochs.

    `about` identifies the joining. `state` and `best` have the trained tensors by name: the current ones, and
    those of `best_epoch`.
    """

    about: Mapping[str, Any]
    state: State
    best: State
    optimiser: Optimiser
    best_epoch: int
    history: tuple[JoiningEpoch, ...]

    def to_bytes(self) -> bytes:
        """Serialise to one safetensors file. Equal checkpoints give equal bytes."""
        parts = dict(zip(_PARTS, (self.state, self.best, self.optimiser.moments), strict=True))
        facts = {
            "format": FORMAT,
            "about": self.about,
            "weight_decay": self.optimiser.weight_decay,
            "taken": self.optimiser.taken,
            "best_epoch": self.best_epoch,
            "history": [asdict(epoch) for epoch in self.history],
        }
        return to_bytes(parts, facts)

    @classmethod
    def from_bytes(cls, data: bytes) -> JoiningCheckpoint:
        """Read a checkpoint from bytes. Raises CheckpointError if they are not one."""
        try:
            parts, facts = from_bytes(data, _PARTS, FORMAT)
            return cls(
                about=facts["about"],
                state=parts["state"],
                best=parts["best"],
                optimiser=Optimiser(facts["weight_decay"], parts["moments"], facts["taken"]),
                best_epoch=facts["best_epoch"],
                history=tuple(JoiningEpoch(**epoch) for epoch in facts["history"]),
            )
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"not the checkpoint of a joining ({len(data)} bytes): {error!r}; start again"
            ) from error

    def check(self, about: Mapping[str, Any]) -> None:
        """Raise CheckpointError, naming what differs, unless this is a checkpoint of that joining."""
        for name in sorted({*about, *self.about}):
            if about.get(name) != self.about.get(name):
                raise CheckpointError(
                    f"checkpoint of another joining: {name}: expected {about.get(name)!r}, found "
                    f"{self.about.get(name)!r}; start again"
                )


def about(config: Mapping[str, Any], began: State, **examples: Mapping[str, Tensor]) -> dict[str, Any]:
    """Identify a joining by its configuration, and digests of its initial weights and of its examples."""
    digests = {name: digest(tensors) for name, tensors in examples.items()}
    return {**config, "weights": digest(began), **digests}
