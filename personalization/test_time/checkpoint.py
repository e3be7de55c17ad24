"""Checkpoints of an adaptation: all that another process needs to continue bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from safetensors import SafetensorError

from personalization.checkpoint import from_bytes, to_bytes
from personalization.errors import CheckpointError
from personalization.state import State

FORMAT = "locum-adaptation/1"
_PARTS = ("state", "optimiser", "best", "initial")


@dataclass(frozen=True)
class EpochRecord:
    """One epoch as measured after it, over all images, with the noise that is the same for every epoch.

    `loss` is what the epochs are compared by: the preset's objective. `consistency`, `shape` and `entropy`
    are those of its terms that it records. `foreground` is the share of all pixels that are no background,
    `agreement` the Dice with step 0's masks. `reason` says why an epoch is not `safe`. Numbers that are not
    finite, or were not measured, are None.
    """

    epoch: int
    loss: float | None
    consistency: float | None
    shape: float | None
    entropy: float | None
    foreground: float | None
    agreement: float | None
    safe: bool
    reason: str | None


@dataclass(frozen=True)
class Fingerprint:
    """The identity of an adaptation: its configuration, and digests of experts and images."""

    config: Mapping[str, Any]
    experts: str
    images: str

    def check(self, found: Fingerprint) -> None:
        """Raise CheckpointError with the difference unless `found`, of a checkpoint, equals this one."""
        for name in sorted({*self.config, *found.config}):
            expected, other = self.config.get(name), found.config.get(name)
            if expected != other:
                raise CheckpointError(
                    f"checkpoint of another configuration: {name}: expected {expected!r}, found {other!r}; "
                    "start again, or resume with the configuration it was made with"
                )
        for what, expected, other in (
            ("experts", self.experts, found.experts),
            ("images", self.images, found.images),
        ):
            if expected != other:
                raise CheckpointError(
                    f"checkpoint of other {what}: expected digest {expected[:12]}, found {other[:12]}; "
                    f"start again, or resume with the {what} it was made with"
                )


@dataclass(frozen=True)
class AdaptationCheckpoint:
    """An adaptation after epoch `epoch` (0: before the first step).

    `state`, `best` and `initial` hold the trainable parameters by name: now, at the best safe epoch
    `best_epoch`, and at step 0. `optimiser` holds Adam's moments as "<parameter>/<moment>".
    """

    fingerprint: Fingerprint
    epoch: int
    state: State
    optimiser: State
    best_epoch: int
    best: State
    initial: State
    history: tuple[EpochRecord, ...]

    def to_bytes(self) -> bytes:
        """One safetensors file. Equal checkpoints give equal bytes."""
        facts = {
            "format": FORMAT,
            "fingerprint": asdict(self.fingerprint),
            "epoch": self.epoch,
            "best_epoch": self.best_epoch,
            "history": [asdict(record) for record in self.history],
        }
        return to_bytes({part: getattr(self, part) for part in _PARTS}, facts)

    @classmethod
    def from_bytes(cls, data: bytes) -> AdaptationCheckpoint:
        """Read a checkpoint from bytes. Raises CheckpointError for other content."""
        try:
            parts, facts = from_bytes(data, _PARTS, FORMAT)
            return cls(
                fingerprint=Fingerprint(**facts["fingerprint"]),
                epoch=facts["epoch"],
                best_epoch=facts["best_epoch"],
                history=tuple(EpochRecord(**record) for record in facts["history"]),
                **parts,
            )
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"not the checkpoint of an adaptation ({len(data)} bytes): {error!r}; start again"
            ) from error
