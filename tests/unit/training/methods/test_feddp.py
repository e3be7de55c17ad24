"""FedDP: what leaves by consent; stages against plain loops, losses against the authors' in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from model_store.task import Task
from personalization.adamw import cosine
from personalization.feddp import calibration_loss, dice_loss, inconsistency
from personalization.fedoap.parts import split
from personalization.networks import FedOapUNet
from tests.helpers.training.sites import (
    EMPTY,
    TASK,
    client_step,
    context,
    phase_of,
    result_of,
    server_step,
    site_data,
)
from training.algorithm import Memory, State, StepContext
from training.errors import ConfigurationError
from training.local.schedule import Batch
from training.methods.feddp import FedDp, FedDpConfig
from training.methods.fedoap import models
from training.methods.fedoap.config import FedOapConfig
from training.methods.fedoap.method import FedOap

CONFIG = FedDpConfig(
    **{"width": 2, "heads": 4, "batch_size": 4, "rounds": 1, "local_steps": 2, "learning_rate": 0.01},
    **{"fine_tune_rounds": 1, "augment": False, "selection": "last"},
)
DATA = {name: site_data(name, 4, 4, seed) for seed, name in enumerate("ABC")}
CPU = torch.device("cpu")


class Federation:
    """Stage 1 and 2 over three sites, by a plain loop."""

    def __init__(self, config: FedDpConfig = CONFIG) -> None:
        self.algorithm = FedDp(config, TASK)
        self.server = self.algorithm.initial(context("initial", 0))
        self.memories: dict[str, Memory] = dict.fromkeys(DATA, EMPTY)
        self.sent: Mapping[str, Mapping[str, Mapping[str, Tensor]]] = {}

    def model(self, site: str) -> State:
        """A site's model, as it is now."""
        return self.algorithm.second.slot.read(self.memories[site]).model

    def run(self, name: str, sites: str = "ABC") -> Federation:
        phase, results = phase_of(self.algorithm, name), {}
        for site in sites:
            received = phase.broadcast(self.server, site)
            results[site] = client_step(
                self.algorithm, context(name, 0, 1, site), received, self.memories[site], DATA[site]
            )
            self.memories[site] = results[site].memory or self.memories[site]
        self.sent = {site: result.uploads for site, result in results.items()}
        collect = ("members",) if name == "collect" else ()
        reduced = result_of(results, mean="weights" if name == "train" else None, collect=collect)
        self.server = server_step(self.algorithm, context(name, 0, 1), self.server, reduced)
        return self


@pytest.fixture(scope="module")
def first_stage() -> Federation:
    return Federation().run("train").run("validate")


# ---------------------------------------------------------------------- what leaves


def test_the_phases_and_what_they_send() -> None:
    plan = FedDp(CONFIG, TASK).plan()
    names = [phase.name for phase in plan]
    assert names == ["describe", "train", "validate", "collect", "calibrate", "test", "export"]
    assert {phase.name for phase in plan if phase.consent} == {"collect", "calibrate", "export"}
    kinds = {group.kind for phase in plan for group in (*phase.uploads, *phase.downloads)}
    assert kinds == {"weights", "statistics"}
    without = FedDp(CONFIG.model_copy(update={"fine_tune_rounds": 0}), TASK).plan()
    assert not {"collect", "calibrate", "finetune"} & {phase.name for phase in without}


def test_queries_stay_in_stage_1_and_meet_in_the_collection() -> None:
    federation = Federation().run("train")
    for uploads in federation.sent.values():
        assert not any(
            name.startswith(("query_stage.", "to_query.", "adapter.")) for name in uploads["weights"]
        )
        assert "to_key.weight" in uploads["weights"]
    federation.run("validate").run("collect", "AC")
    names = {name for uploads in federation.sent.values() for name in uploads["members"]}
    assert names
    assert all(name.startswith(("query_stage.", "to_query.")) for name in names)
    received = phase_of(federation.algorithm, "calibrate").broadcast(federation.server, "A")
    assert {name.partition("/")[0] for name in received["members"]} == {"A", "C"}
    own = federation.model("C")
    for name, tensor in models.by_site(received["members"])["C"].items():
        assert torch.equal(tensor, own[name])


def test_a_lone_model_is_not_calibrated() -> None:
    federation = Federation().run("train").run("validate").run("collect", "A")
    before = federation.memories["A"]
    assert federation.run("calibrate", "A").memories["A"] is before


def test_what_it_has_not_and_what_it_is_not_for_is_rejected() -> None:
    for wrong in ({"adapter": True}, {"kv": "token-bank"}, {"attention": False}):
        with pytest.raises(ValueError, match="Input should be"):
            FedDpConfig(**wrong)
    two = Task(name="two", labels={"a": (1,), "b": (2,)}, channels=1, size=(32, 32))
    with pytest.raises(ConfigurationError, match="method feddp does not fit the task 'two'"):
        FedDp(CONFIG, two)


# ---------------------------------------------------------------------- losses, against the authors' code


def authors_map(predictions: Tensor) -> Tensor:
    """jcwang123/FedDP, scripts/trainer_utils.py, compute_pred_uncertainty."""
    found = torch.std(predictions, dim=0)
    return found / found.max() if found.max() > 0 else found


def authors_loss(score: Tensor, target: Tensor, weight: Tensor, lamb: float) -> Tensor:
    """scripts/train_ft.py and utils/losses.py: dice_loss + lamb weighted_bce_loss, of probabilities."""
    target = target.double()
    dice = 1 - (2 * (score * target).sum() + 1e-5) / (score.sum() + target.sum() + 1e-5)
    clamped = score.clamp(1e-5, 1 - 1e-5)
    entropy = -(target * clamped.log() + (1 - target) * (1 - clamped).log()) * weight
    return dice + lamb * entropy.mean()


def drawn(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    predictions = torch.rand(3, 2, 1, 8, 8, generator=draw, dtype=torch.float64)
    logits = torch.randn(2, 1, 8, 8, generator=draw, dtype=torch.float64, requires_grad=True)
    return predictions, logits, torch.randint(2, (2, 8, 8), generator=draw)


def test_calibration_is_that_of_the_authors_code() -> None:
    predictions, logits, targets = drawn()
    ours = calibration_loss(logits, targets, inconsistency(predictions, "batch"), 0.7)
    theirs = authors_loss(logits.sigmoid(), targets[:, None], authors_map(predictions), 0.7)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=0)
    slopes = [torch.autograd.grad(loss, logits)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*slopes, rtol=1e-9, atol=1e-12)


def test_by_default_every_image_has_a_maximum_of_its_own() -> None:
    predictions, _, _ = drawn()
    predictions[:, 1] *= 0.1
    found = inconsistency(predictions)
    for image in range(2):
        alone = authors_map(predictions[:, image : image + 1])
        torch.testing.assert_close(found[image : image + 1], alone)
    assert inconsistency(predictions, "batch")[1].max() < 0.5
    assert inconsistency(predictions[:1].repeat(3, 1, 1, 1, 1)).abs().max() == 0


def test_the_gradient_is_that_of_finite_differences() -> None:
    predictions, logits, targets = drawn(1)
    differ = inconsistency(predictions)
    assert torch.autograd.gradcheck(lambda z: calibration_loss(z, targets, differ, 2.0), (logits,))


# ---------------------------------------------------------------------- both stages


def network_of(algorithm: FedDp, state: Mapping[str, Tensor]) -> FedOapUNet:
    return models.on_device(algorithm.network, dict(state), {}, CPU)


def shuffled(where: StepContext, steps: int, site: str) -> list[Batch]:
    """The batches of the steps: every pass is one batch, in a drawn order."""
    draw, train = where.generator("train"), DATA[site].train
    images, targets = torch.from_numpy(train.images), torch.from_numpy(train.targets)
    orders = [torch.randperm(len(train), generator=draw) for _ in range(steps)]
    return [Batch(images[order], targets[order]) for order in orders]


def fedoaps_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Half the cross-entropy and a Dice with 1 for smoothing, of each image, in words of its paper."""
    losses = []
    for logit, target in zip(logits, targets[:, None].float(), strict=True):
        p = logit.sigmoid()
        entropy = -(target * p.log() + (1 - target) * (1 - p).log()).mean()
        losses.append(entropy / 2 + 1 - (2 * (p * target).sum() + 1) / (p.sum() + target.sum() + 1))
    return sum(losses, torch.zeros(())) / len(losses)


@pytest.mark.parametrize(("first_loss", "loss"), [("dice", dice_loss), ("fedoap", fedoaps_loss)])
def test_stage_1_is_a_plain_loop_with_clipped_gradients(
    first_loss: str, loss: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """trainer_utils.py, clip_gradient: each value, here of 1e-3, so that it binds."""
    settings = {"gradient_clip": 1e-3, "first_loss": first_loss}
    algorithm = FedDp(CONFIG.model_copy(update=settings), TASK)
    server = algorithm.initial(context("initial", 0))
    where = context("train", 0, 1, "A")
    received = phase_of(algorithm, "train").broadcast(server, "A")
    result = client_step(algorithm, where, received, EMPTY, DATA["A"])
    network = network_of(algorithm, algorithm.first.joined(where, received, EMPTY)).train()
    adamw = torch.optim.AdamW(network.parameters(), weight_decay=CONFIG.weight_decay)
    clipped = 0
    for rate, batch in zip(algorithm.first.rates(0), shuffled(where, 2, "A"), strict=True):
        adamw.zero_grad()
        loss(network.segment(batch.images)[0], batch.targets).backward()
        for parameter in network.parameters():
            clipped += int((parameter.grad.abs() > 1e-3).sum())
            parameter.grad.clamp_(-1e-3, 1e-3)
        adamw.param_groups[0]["lr"] = rate
        adamw.step()
    assert clipped > 10
    shared, personal = split(dict(network.state_dict()))
    for found, expected in (
        (result.uploads["weights"], shared),
        (algorithm.first.own.read(result.memory).rho, personal),
    ):
        for name, tensor in found.items():
            # Before an instance norm a bias has a gradient of rounding. Adam divides that of a weight by its
            # own size, however small: room is a hundredth of a step of 0.01. Without the clip 3e-3 differ.
            if tensor.ndim == 4:
                torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-4)


def test_stage_1_of_fedoaps_loss_is_fedoaps_own_without_a_clip() -> None:
    """What its models share then starts as FedOAP's, so that the second stages are compared alone."""
    fields = CONFIG.model_dump(exclude={"calibration_weight", "first_loss", "inconsistency", "gradient_clip"})
    methods = (
        FedDp(CONFIG.model_copy(update={"first_loss": "fedoap", "gradient_clip": None}), TASK),
        FedOap(FedOapConfig(**fields), TASK),
    )
    found = []
    for algorithm in methods:
        server = algorithm.initial(context("initial", 0))
        received = phase_of(algorithm, "train").broadcast(server, "A")
        found.append(client_step(algorithm, context("train", 0, 1, "A"), received, EMPTY, DATA["A"]))
    ours, theirs = (result.uploads["weights"] for result in found)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_stage_2_is_a_plain_loop_over_the_models_of_stage_1(first_stage: Federation) -> None:
    """With FedOAP's AdamW; U by every model of stage 1 in turn, the site's own among them."""
    federation = first_stage.run("collect")
    algorithm = federation.algorithm
    begun = {site: federation.model(site) for site in federation.memories}
    networks = [network_of(algorithm, state).eval() for state in begun.values()]
    where, network = context("calibrate", 0, 1, "B"), network_of(algorithm, begun["B"]).train()
    adamw = torch.optim.AdamW(network.parameters(), weight_decay=CONFIG.weight_decay)
    rates = cosine(CONFIG.learning_rate, CONFIG.least_rate, 2, range(2))
    for rate, batch in zip(rates, shuffled(where, 2, "B"), strict=True):
        with torch.no_grad():
            answers = torch.stack([n.segment(batch.images)[0].sigmoid() for n in networks])
        deviation = answers.std(0)
        weight = deviation / deviation.flatten(1).max(1).values.view(-1, 1, 1, 1)
        logits = network.segment(batch.images)[0]
        entropy = functional.binary_cross_entropy(
            logits.sigmoid(), batch.targets[:, None].float(), reduction="none"
        )
        adamw.zero_grad()
        (dice_loss(logits, batch.targets) + (weight * entropy).mean()).backward()
        adamw.param_groups[0]["lr"] = rate
        adamw.step()
    federation.run("calibrate")
    found = federation.model("B")
    moved = 0.0
    for name, tensor in network.state_dict().items():
        if tensor.ndim == 4:
            torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4)
            moved = max(moved, float((tensor - begun["B"][name]).abs().max()))
    assert moved > 1e-3
