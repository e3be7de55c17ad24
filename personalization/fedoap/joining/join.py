"""The second stage of FedOAP for an outside hospital: fine-tune, validate, keep the best epoch.

Legend: N slices, C channels, H rows, W columns, S sites in the bank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from typing_extensions import override

from personalization.adamw import Optimiser, cosine, train_adamw
from personalization.cancellation import CancelCheck, never_cancelled
from personalization.errors import AdaptationError
from personalization.fedoap.joining.checkpoint import JoiningCheckpoint, JoiningEpoch, about
from personalization.fedoap.joining.config import JoiningConfig
from personalization.fedoap.losses import second_stage_loss
from personalization.fedoap.parts import split
from personalization.gate.masks import MIN_COMPONENT
from personalization.keep_best import KeepBest
from personalization.labelled_slices import LabelledSlices, Score
from personalization.networks import FedOapUNet
from personalization.seeds import seed_of
from personalization.state import clone

# Images per forward pass in validation. It bounds the memory and does not change the result.
_BATCH = 16


@dataclass(frozen=True)
class Joining:
    """The result of a joining: step 0, then every epoch. `stopped` is the reason if it ended early."""

    history: tuple[JoiningEpoch, ...]
    best_epoch: int
    stopped: str | None = None

    @property
    def start(self) -> JoiningEpoch:
        """Step 0, the zero-shot network."""
        return self.history[0]

    @property
    def best(self) -> JoiningEpoch:
        """The epoch that was kept."""
        return self.history[self.best_epoch]


def join(
    network: FedOapUNet,
    train: LabelledSlices,
    validation: LabelledSlices,
    config: JoiningConfig,
    score: Score,
    *,
    resume: JoiningCheckpoint | None = None,
    after_epoch: Callable[[JoiningCheckpoint], None] | None = None,
    check_cancelled: CancelCheck = never_cancelled,
) -> Joining:
    """Fine-tune a network in place on `train`. The result is deterministic, also after a resume.

    Args:
        network: has the shared part, the bank and an initial personal part.
        train: the hospital's slices with masks.
        validation: slices of other patients; the best epoch is the one with the highest Dice on them, the
            earliest of equals.
        config: the settings.
        score: the Dice of validation patients.
        resume: checkpoint of an earlier process; all other arguments must be the same as then.
        after_epoch: called with a checkpoint after step 0 and after every epoch. A resume calls it with the
            resumed checkpoint again, because a killed process may not have reported it.
        check_cancelled: called before every step; it may raise, to stop.

    Raises:
        AdaptationError: a patient is in both sets, or a set has no tumour.
        CheckpointError: `resume` belongs to another joining.
    """
    run = _Run(network, train, validation, config, score, check_cancelled)
    run.run(resume, after_epoch)
    network.requires_grad_(True)
    return Joining(tuple(run.history), run.best_epoch, run.history[-1].reason)


@torch.no_grad()
def predict(
    network: FedOapUNet, images_NCHW: Tensor, check_cancelled: CancelCheck = never_cancelled
) -> tuple[Tensor, Tensor]:
    """Predict class indices uint8 [N, H, W] and attention [N, 1 + S] as the graph does, on the CPU."""
    network.eval()
    device = next(network.parameters()).device
    classes, attention = [], []
    for batch in torch.split(images_NCHW, _BATCH):
        check_cancelled()
        logits, mass = network.segment(batch.to(device))
        # Of equal classes the first is taken, as argmax does.
        classes.append((logits[:, 0] > 0).to(torch.uint8).cpu())
        attention.append(mass.cpu())
    return torch.cat(classes), torch.cat(attention)


class _Run(KeepBest[JoiningEpoch, JoiningCheckpoint]):
    """A running joining."""

    def __init__(
        self,
        network: FedOapUNet,
        train: LabelledSlices,
        validation: LabelledSlices,
        config: JoiningConfig,
        score: Score,
        check_cancelled: CancelCheck,
    ) -> None:
        _check(train, validation)
        super().__init__(network, _learned(network, config), config.epochs)
        self.network: FedOapUNet = network
        self._train, self._validation = train, validation
        self._config, self._score, self._check_cancelled = config, score, check_cancelled
        self._about = about(
            config.facts(),
            network.state_dict(),
            train={"images": train.images, "targets": train.targets},
            validation={"images": validation.images, "targets": validation.targets},
        )
        self._optimiser = Optimiser(config.weight_decay)

    @override
    def start(self) -> JoiningEpoch:
        return self._measured(0, None)

    @override
    def restore(self, checkpoint: JoiningCheckpoint) -> None:
        checkpoint.check(self._about)
        self.load(checkpoint.state)
        self.best, self._optimiser = checkpoint.best, checkpoint.optimiser
        self.best_epoch, self.history = checkpoint.best_epoch, list(checkpoint.history)

    @override
    def learn(self, epoch: int) -> JoiningEpoch:
        config = self._config
        steps = math.ceil(len(self._train) / config.batch_size)
        rates = cosine(
            config.learning_rate,
            config.least_rate,
            steps * config.epochs,
            range(steps * (epoch - 1), steps * epoch),
        )
        batches = self._train.batches(
            config.batch_size,
            seed_of(config.seed, "examples", epoch),
            config.augment,
            next(self.network.parameters()).device,
        )
        loss, self._optimiser = train_adamw(self.network, batches, self._loss(epoch), rates, self._optimiser)
        record = self._measured(epoch, loss if math.isfinite(loss) else None)
        if math.isfinite(loss):
            return record
        reason = f"the loss of epoch {epoch} is not a finite number; lower learning_rate"
        return replace(record, safe=False, reason=reason)

    @override
    def improves(self, record: JoiningEpoch, best: JoiningEpoch) -> bool:
        return record.dice > best.dice

    @override
    def checkpoint(self) -> JoiningCheckpoint:
        return JoiningCheckpoint(
            self._about,
            clone(self.learned),
            self.best,
            self._optimiser,
            self.best_epoch,
            tuple(self.history),
        )

    def _loss(self, epoch: int) -> Callable[[Tensor, Tensor], Tensor]:
        """Make the loss of an epoch: one forward pass for both terms, and noise from the epoch's own seed."""
        config = self._config
        draw = torch.Generator().manual_seed(seed_of(config.seed, "perturbation", epoch))

        def loss(images: Tensor, targets: Tensor) -> Tensor:
            self._check_cancelled()
            return second_stage_loss(
                self.network.segment(images)[0],
                targets,
                draw,
                perturbed=config.loss == "perturbed",
                variance=config.variance,
                threshold=config.threshold,
                trade_off=config.trade_off,
            )

        return loss

    def _measured(self, epoch: int, loss: float | None) -> JoiningEpoch:
        found, _ = predict(self.network, self._validation.images, self._check_cancelled)
        truth, ill = self._validation.targets, self._validation.ill
        by_patient = self._score(self.network, ill)
        dice = math.fsum(by_patient[patient] for patient in sorted(ill)) / len(ill)
        tumour = (truth > 0).flatten(1).any(1)
        alarms = ((found[~tumour] > 0).flatten(1).double().mean(1) >= MIN_COMPONENT).double()
        return JoiningEpoch(epoch, loss, dice, float(alarms.mean()) if len(alarms) else None)


def _learned(network: FedOapUNet, config: JoiningConfig) -> dict[str, nn.Parameter]:
    """Return the trained parameters by name, and freeze all others."""
    parameters = dict(network.named_parameters())
    if config.trains == "personal":
        _, personal = split(parameters)
        if not personal:
            raise AdaptationError(
                "joining: trains=personal, but the network has no personal part (trained without attention "
                "and adapter); expected trains=all"
            )
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in personal)
    return {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}


def _check(train: LabelledSlices, validation: LabelledSlices) -> None:
    both = sorted({*train.patients} & {*validation.patients})
    if both:
        raise AdaptationError(
            f"joining: expected different patients for training and validation, found {len(both)} in both, "
            f"first '{both[0]}'"
        )
    if not train.ill:
        raise AdaptationError("joining: no training slice shows a tumour, so nothing can be learned")
    if not validation.ill:
        raise AdaptationError("joining: no validation slice shows a tumour, so no epoch can be chosen")
