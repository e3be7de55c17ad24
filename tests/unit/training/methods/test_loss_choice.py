"""A loss is named in the configuration, and one line makes another one known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from model_store.task import Task
from personalization.losses import LOSSES, NamedLoss, soft_dice_loss
from personalization.networks import build
from tests.helpers.training.sites import EMPTY, TASK, client_step, context, phase_of, site_data
from training.choices.fedavg import FedAvgConfig
from training.config import MethodConfig
from training.errors import ConfigurationError
from training.local.networks import network_of
from training.methods.fedavg import FedAvg
from training.methods.fedins.config import FedInsConfig
from training.methods.iop_fl import IopFl, IopFlConfig

PICTURES = Task(name="pictures", kind="classification", class_names=("a", "b"), size=(16, 16))
PLAIN: dict[str, Any] = {
    "width": 2,
    "rounds": 1,
    "local_steps": 1,
    "batch_size": 8,
    "optimiser": "sgd",
    "learning_rate": 0.1,
    "augment": False,
    "intensity": 0,
}
DATA = site_data("A", 8, 2, 0)


def trained(algorithm: FedAvg) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """The weights that site A receives and sends in the first round, and its loss."""
    server = algorithm.initial(context("initial", 0))
    received = phase_of(algorithm, "train").broadcast(server, "A")
    result = client_step(algorithm, context("train", 0, 1, "A"), received, EMPTY, DATA)
    return dict(received["weights"]), dict(result.uploads["weights"]), result.metrics["loss"]


def constant(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.sum() * 0 + 7


@pytest.mark.parametrize(("method", "config"), [(FedAvg, FedAvgConfig), (IopFl, IopFlConfig)])
def test_one_line_makes_a_loss_known_to_every_method(
    method: type[FedAvg], config: type[FedAvgConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOSSES, "constant", NamedLoss(constant, ("segmentation",)))  # type: ignore[arg-type]
    before, after, loss = trained(method(config(**PLAIN, loss="constant"), TASK))
    assert loss == 7
    learned = [name for name, _ in build("unet", in_channels=1, classes=2, width=2).named_parameters()]
    for name in learned:
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=0)


def test_cross_entropy_of_a_segmentation_is_a_plain_step_on_it() -> None:
    algorithm = FedAvg(FedAvgConfig(**PLAIN, loss="cross-entropy"), TASK)
    before, after, loss = trained(algorithm)
    network = network_of(algorithm.network, before, torch.device("cpu")).train()
    logits = network(torch.from_numpy(DATA.train.images))
    targets = torch.from_numpy(DATA.train.targets).long()
    expected = -torch.log_softmax(logits, 1).gather(1, targets[:, None]).mean()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    for name, weight in network.named_parameters():
        torch.testing.assert_close(after[name], before[name] - 0.1 * weight.grad, rtol=1e-4, atol=1e-6)


def test_default_loss_is_soft_dice_and_leaves_the_configuration_as_it_was() -> None:
    config = FedAvgConfig(**PLAIN)
    assert config.loss_for(TASK) is soft_dice_loss
    assert "loss" not in config.model_dump(mode="json")
    assert FedAvgConfig(**PLAIN, loss="dice").model_dump(mode="json")["loss"] == "dice"
    assert FedAvgConfig.model_validate(config.model_dump(mode="json")) == config


def test_loss_of_another_kind_of_task_is_rejected() -> None:
    with pytest.raises(ConfigurationError, match=r"one for a classification \(cross-entropy\), found 'dice'"):
        FedAvg(FedAvgConfig(**PLAIN, loss="dice"), PICTURES)


@pytest.mark.parametrize("config", [FedAvgConfig, FedInsConfig])
def test_unknown_loss_is_rejected_with_the_known_ones(config: type[MethodConfig]) -> None:
    with pytest.raises(
        ValidationError,
        match="expected one of dice, cross-entropy, dice_ce, dice_focal, tversky, found 'focal'",
    ):
        config.model_validate({"loss": "focal"})
