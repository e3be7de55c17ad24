"""Where joining stands after an epoch: all that a later process needs to go on bit for bit."""

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

FORMAT = "locum-joining/1"
_PARTS = ("state", "best", "moments")


@dataclass(frozen=True)
class JoiningEpoch:
    """One epoch as measured after it, on the validation patients.

    `loss` is the mean of the training batches, None for step 0 and where it is not finite; `dice` the mean
    over patients with a tumour, all slices of one as a volume; `false_positives` the share of slices without
    a tumour in which more than specks is found, None without such slices. An epoch that is not `safe` has its
    `reason`.
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

    `about` says which joining it is of. `state` and `best` hold what is trained, by name: now, and at
    `best_epoch`.
    """

    about: Mapping[str, Any]
    state: State
    best: State
    optimiser: Optimiser
    best_epoch: int
    history: tuple[JoiningEpoch, ...]

    def to_bytes(self) -> bytes:
        """One safetensors file. Equal checkpoints give equal bytes."""
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
        """The checkpoint in these bytes. Raises CheckpointError when they are not one."""
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
                f"not the checkpoint of a joining ({len(data)} bytes): {error!r}; start anew"
            ) from error

    def check(self, about: Mapping[str, Any]) -> None:
        """Raise CheckpointError unless this is the checkpoint of that joining, saying what differs."""
        for name in sorted({*about, *self.about}):
            if about.get(name) != self.about.get(name):
                raise CheckpointError(
                    f"checkpoint of another joining: {name}: expected {about.get(name)!r}, found "
                    f"{self.about.get(name)!r}; start anew"
                )


def about(config: Mapping[str, Any], began: State, **examples: Mapping[str, Tensor]) -> dict[str, Any]:
    """What a joining is: its configuration, and digests of where it began and of its examples."""
    digests = {name: digest(tensors) for name, tensors in examples.items()}
    return {**config, "weights": digest(began), **digests}
