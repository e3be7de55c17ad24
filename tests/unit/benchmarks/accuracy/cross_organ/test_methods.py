from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from benchmarks.accuracy.cross_organ.methods import (
    BODY,
    HEAD,
    FedBn,
    FedPer,
    FedRep,
    FirstStage,
    Sparing,
    TrainedIn,
)
from model_store.task import Task
from personalization.fedoap.losses import binary_loss
from personalization.networks import FedOapUNet, build
from training.algorithm import ClientResult, Memory, State
from training.data.segmentation.dataset import SiteData, SliceSet, batches
from training.engine.client import RunEnvironment
from training.methods.common.local_training import network_of, new_network, state_of
from training.methods.common.state_tree import part
from training.methods.fedavg import WEIGHTS
from training.methods.fedoap.client import JOINED
from training.methods.fedoap.config import FedOapConfig
from training.methods.fedoap.method import FedOap

TASK = Task(name="t", labels={"tumour": (255,)}, channels=1, size=(32, 32))
CONFIG = FedOapConfig(
    width=2,
    groups=4,
    attention=False,
    adapter=False,
    local_steps=4,
    batch_size=2,
    rounds=8,
    fine_tune_rounds=0,
)
AROUND = RunEnvironment(3)


@pytest.fixture
def data() -> SiteData:
    """Three images with a bright square, one of them to validate."""
    targets = np.zeros((3, 32, 32), np.uint8)
    for number, target in enumerate(targets):
        target[4 * number : 4 * number + 9, 6:16] = 1
    noise = np.random.default_rng(0).normal(size=(3, 1, 32, 32))
    images = (noise + 2 * targets[:, None]).astype(np.float32)

    def of(*chosen: int) -> SliceSet:
        names = tuple(map(str, chosen))
        return SliceSet(images[[*chosen]], targets[[*chosen]], names, names, (0,) * len(chosen))

    return SiteData("s", of(0, 1), of(2), of(), None)


def _start(method: FedOap) -> State:
    return part(method.initial(AROUND.context("initial", 0, 1)).tensors, "global")


def _trained(method: FedOap, data: SiteData, round_: int = 0, memory: Memory | None = None) -> ClientResult:
    context = AROUND.context("train", round_, method.config.rounds, "s")
    return method.client_step(context, {WEIGHTS.name: _start(method)}, memory or Memory(), data)


def _kept(result: ClientResult) -> State:
    assert result.memory is not None
    return part(result.memory.tensors, "kept")


@pytest.mark.parametrize("method", [FedPer, FedRep])
def test_what_comes_after_the_bottleneck_stays(method: type[FedPer], data: SiteData) -> None:
    result = _trained(method(CONFIG, TASK), data)
    shared, kept = result.uploads[WEIGHTS.name], _kept(result)
    assert {name.split(".")[0].rstrip("1234") for name in shared} == {"encoder", "bottleneck"}
    assert {name.split(".")[0].rstrip("1234") for name in kept} == {"upconv", "decoder", "head"}
    assert {*shared, *kept} == {*_start(Sparing(CONFIG, TASK))}


def test_batch_norm_stays(data: SiteData) -> None:
    method = FedBn(CONFIG, TASK)
    network = build(method.network.name, **method.network.arguments)
    norms = [module for module in network.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    assert len(norms) == 18  # two in each of nine blocks
    assert not any(isinstance(module, torch.nn.InstanceNorm2d) for module in network.modules())
    result = _trained(method, data)
    assert len(_kept(result)) == 18 * 5  # weight, bias, mean, variance, count
    assert {*result.uploads[WEIGHTS.name]} == {*_start(Sparing(CONFIG, TASK))}


@pytest.mark.parametrize("method", [FedPer, FedRep, FedBn])
def test_what_stays_is_what_a_site_goes_on_with(method: type[FedPer], data: SiteData) -> None:
    ours = method(CONFIG, TASK)
    first = _trained(ours, data)
    context = AROUND.context("validate", 0, 1, "s")
    # The server has what others sent too, and nothing that stays.
    sent = {name: tensor + 0.5 for name, tensor in first.uploads[WEIGHTS.name].items()}
    assert first.memory is not None
    joined = ours.client_step(context, {WEIGHTS.name: sent}, first.memory, data)
    assert joined.memory is not None
    model = part(joined.memory.tensors, "model")
    assert model.keys() == {*sent, *_kept(first)}
    for name, tensor in {**sent, **_kept(first)}.items():
        assert torch.equal(model[name], tensor), name


def test_fedrep_trains_the_head_and_then_the_body(data: SiteData) -> None:
    method = FedRep(CONFIG, TASK)
    results = [_trained(method, data)]
    results.append(_trained(method, data, 1, results[0].memory))

    network = network_of(method.network, _start(method), torch.device("cpu"))
    assert isinstance(network, FedOapUNet)
    optimisers = {
        turn: torch.optim.AdamW(
            [p for name, p in network.named_parameters() if name.startswith(own)], weight_decay=1e-5
        )
        for turn, own in (("head", HEAD), ("body", BODY))
    }
    # Two steps of each in a round, each along a cosine over its own sixteen steps.
    half = FedOap(CONFIG.model_copy(update={"local_steps": 2}), TASK)
    for round_, result in enumerate(results):
        if round_:
            # No other site sent it to the server.
            own = {name: tensor for name, tensor in state_of(network).items() if name.startswith(HEAD)}
            network.load_state_dict({**_start(method), **own})
        for turn, optimiser in optimisers.items():
            context = AROUND.context("train", round_, CONFIG.rounds, "s")
            draw = context.generator(f"{turn} train")
            batched = [batch for _ in range(2) for batch in batches(data.train, 2, draw, augment=True)]
            network.train()
            for rate, (images, targets) in zip(half.rates(round_), batched, strict=True):
                optimiser.param_groups[0]["lr"] = rate
                network.zero_grad()
                binary_loss(network.segment(images)[0], targets).backward()
                optimiser.step()
        for name, tensor in {**result.uploads[WEIGHTS.name], **_kept(result)}.items():
            assert torch.allclose(tensor, state_of(network)[name], rtol=0, atol=1e-6), name


def test_a_round_that_cannot_be_halved_is_refused() -> None:
    with pytest.raises(ValueError, match="expected an even number, found 5"):
        FedRep(CONFIG.model_copy(update={"local_steps": 5}), TASK)


def test_one_round_in_four_is_validated_and_trains_alike(data: SiteData) -> None:
    method = Sparing(CONFIG, TASK)
    validated = [round_ for round_ in range(8) if JOINED in _trained(method, data, round_).metrics]
    assert validated == [0, 4]
    for round_ in (0, 1):
        theirs = _trained(FedOap(CONFIG, TASK), data, round_).uploads[WEIGHTS.name]
        ours = _trained(method, data, round_).uploads[WEIGHTS.name]
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    context = AROUND.context("validate", 0, 1, "s")
    result = method.client_step(context, {WEIGHTS.name: _start(method)}, Memory(), data)
    assert JOINED in result.metrics


def test_a_first_stage_ends_where_a_second_begins() -> None:
    whole = FedOap(CONFIG.model_copy(update={"fine_tune_rounds": 2}), TASK).plan()
    first = FirstStage(CONFIG.model_copy(update={"fine_tune_rounds": 2}), TASK).plan()
    assert [step.name for step in first] == ["describe", "train", "validate"]
    assert whole[:3] == first
    assert [step.name for step in whole[3:]] == ["finetune", "export"]


def test_joining_is_trained_in_its_precision_and_tested_in_float32(data: SiteData) -> None:
    attentive = CONFIG.model_copy(update={"attention": True, "adapter": True, "kv": "averaged", "heads": 2})
    spec = FedOap(attentive, TASK).network
    state = state_of(new_network(spec, torch.Generator().manual_seed(0)))
    plain = network_of(spec, state, torch.device("cpu"))
    assert isinstance(plain, FedOapUNet)
    images = torch.from_numpy(data.train.images)
    for precision in ("float32", "bfloat16"):
        network = TrainedIn.of(spec, state, torch.device("cpu"), precision)
        assert torch.equal(network.eval().segment(images)[0], plain.eval().segment(images)[0])
        trained, reference = network.train().segment(images)[0], plain.train().segment(images)[0]
        assert trained.dtype == torch.float32
        assert torch.equal(trained, reference) == (precision == "float32")
        assert torch.allclose(trained, reference, atol=0.1)
        # A copy: training it leaves the weights that others begin with.
        with torch.no_grad():
            next(network.parameters()).add_(1)
    assert torch.equal(state_of(plain)["encoder1.0.weight"], state["encoder1.0.weight"])


@pytest.mark.process
def test_importing_a_benchmark_registers_no_network() -> None:
    code = (
        "from personalization.networks.registry import names\n"
        "import benchmarks.accuracy.cross_organ.experiment\n"
        "assert not [name for name in names() if name.startswith('benchmark')], names()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_data_without_validation_are_left_as_they_were(data: SiteData) -> None:
    images, targets = data.val.images.copy(), data.val.targets.copy()
    _trained(Sparing(CONFIG, TASK), data, 1)
    assert np.array_equal(data.val.images, images)
    assert np.array_equal(data.val.targets, targets)
