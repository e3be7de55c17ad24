"""Adaptation, its gate and practice, joining and picking on CUDA: see `conftest` for the devices."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from personalization.cancellation import never_cancelled
from personalization.dose import Practice, by_shift, practise
from personalization.export import to_onnx
from personalization.fedbicross.picking import costs, observe, stability
from personalization.fedoap.joining import JoiningCheckpoint, JoiningConfig, join, predict
from personalization.gate import consensus, shift_of_statistics
from personalization.iop_fl.batch_norm import profile
from personalization.iop_fl.export import to_dynamic_onnx
from personalization.iop_fl.network import coefficients, routed_layers
from personalization.iop_fl.space import RoutingSpace
from personalization.iop_fl.spread import Spread, sent_by
from personalization.labelled_slices import LabelledSlices
from personalization.masks import MasksConfig, fit
from personalization.networks import build, initialise
from personalization.options.picking import CRITERIA
from personalization.options.presets import PRESETS
from personalization.test_time.checkpoint import AdaptationCheckpoint
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.recipe import Adapted, Routing, recipe_of
from service.worker.routing_adapt import class_maps
from tests.helpers.gpu import Cuda
from tests.helpers.personalization.discs import discs, headed
from tests.helpers.personalization.discs import space as disc_space
from tests.helpers.personalization.routing_cases import images, space_of
from tests.helpers.personalization.scored_slices import Practised, practised, score_of

# Median difference on a real device, where sums have another order. Adam's steps have the size of the rate
# for any gradient, so a few weights part.
CLOSE = 1e-3
# Their sums have another order on any GPU, for fewer calls: pooled routers.
OTHER_SUMS = ("as-published", "paper pooled")


def config_of(preset: str) -> AdaptationConfig:
    name, *router = preset.split()
    if not PRESETS[name].learns:
        return AdaptationConfig(preset=name)
    batch = {} if PRESETS[name].batch_size else {"batch_size": 2}
    return AdaptationConfig.model_validate(
        {"preset": name, "epochs": 2, **batch, **({"router": router[0]} if router else {})}
    )


def vector(network: nn.Module) -> Tensor:
    """All its numbers, on the CPU."""
    return flat(network.state_dict().values())


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().cpu().double().flatten() for tensor in tensors])


def check_close(found: Tensor, expected: Tensor, cuda: Cuda, what: str) -> None:
    assert found.isfinite().all()
    if not cuda.real:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 if what in OTHER_SUMS else 0)
        return
    difference = (found - expected).abs()
    print(f"{what}: from the CPU by {difference.median():.2g} (median), {difference.max():.2g} (most)")
    assert difference.median() < CLOSE


@pytest.mark.parametrize(
    "preset", [*(name for name in PRESETS if PRESETS[name].norm != "instance"), "paper pooled"]
)
def test_preset_adapts_repeats_and_resumes(preset: str, cuda: Cuda) -> None:
    space, x, config = space_of(2, torch.float32), images(4, 32, 32, torch.float32), config_of(preset)
    space = headed(space) if preset == "ttt" else space
    recipe = recipe_of(config.preset)
    expected = recipe.adapt(space, x, config, torch.device("cpu"))
    with cuda.present() as device:
        saved: list[bytes] = []

        def adapted(resume: bytes | None = None) -> Adapted:
            def after_epoch(network: nn.Module, checkpoint: AdaptationCheckpoint) -> None:
                saved.append(checkpoint.to_bytes())
                if routed_layers(network):
                    coefficients(network, x.to(device)).mean(dim=0).tolist()
                class_maps(network, x, device, never_cancelled)

            checkpoint = None if resume is None else AdaptationCheckpoint.from_bytes(resume)
            return recipe.adapt(space, x, config, device, resume=checkpoint, after_epoch=after_epoch)

        first = adapted()
        found = vector(first.merged)
        if len(saved) > 1:
            assert torch.equal(found, vector(adapted(saved[1]).merged))
        if cuda.real:
            assert torch.equal(found, vector(adapted().merged))
        class_maps(first.merged, x, device, never_cancelled)
        # Its network is of another kind than the models', and the gate does not compare them.
        if preset != "intent":
            shift_of_statistics(space.plain().state_dict(), first.merged, x.to(device))
        assert to_onnx(first.merged, 2, (32, 32))
        if first.learned is not None and isinstance(recipe, Routing) and config.router != "pooled":
            assert to_dynamic_onnx(first.space, first.learned, x.to(device))
    check_close(found, vector(expected.merged), cuda, preset)


@pytest.mark.parametrize("preset", ["blend", "paper"])
def test_preset_adapts_a_network_of_volumes(preset: str, cuda: Cuda) -> None:
    sides = (8, 8, 4)
    arguments = {
        **{"in_channels": 1, "classes": 2, "spatial_dims": 3, "width": 2, "strides": [1, 2, [2, 2, 1]]},
        "norm_name": ["instance", {"track": True}],
    }
    own, shared = (
        initialise(build("monai.dynunet", **arguments), torch.Generator().manual_seed(seed)).state_dict()
        for seed in (0, 1)
    )
    space = RoutingSpace.of("monai.dynunet", arguments, {"a": own}, shared)
    x = torch.randn(3, 1, *sides, generator=torch.Generator().manual_seed(7))
    config = AdaptationConfig(preset=preset, epochs=1, batch_size=3)
    expected = recipe_of(preset).adapt(space, x, config, torch.device("cpu"))
    with cuda.present() as device:
        found = vector(recipe_of(preset).adapt(space, x, config, device).merged)
    check_close(found, vector(expected.merged), cuda, f"{preset} of volumes")


@pytest.mark.parametrize("trains", ["all", "ssf"])
def test_fine_tuning_by_masks(trains: str, cuda: Cuda) -> None:
    images, truth = discs(6, 0)
    examples = LabelledSlices(images, truth.to(torch.uint8), ("a", "a", "b", "b", "c", "c"))
    config = MasksConfig.model_validate({"trains": trains, "steps": 3, "batch_size": 4})

    def fitted(device: torch.device) -> Tensor:
        return vector(
            fit(disc_space().plain().eval().to(device), examples, config, score_of(examples)).network
        )

    expected = fitted(torch.device("cpu"))
    with cuda.present() as device:
        found = fitted(device)
    check_close(found, expected, cuda, f"masks, {trains}")


def test_dose_by_shift(cuda: Cuda) -> None:
    space, patients = disc_space(), [index // 2 for index in range(8)]
    members = [profile(space.plain(), discs(8, seed, contrast=2.0)[0], patients) for seed in (3, 4)]
    sent = [sent_by(each, (0.1, 0.2, 1.0)) for each in members]
    mean = {name: torch.stack([each[name] for each in sent]).mean(dim=0) for name in sent[0]}
    spread = Spread.of(members[0].layers, mean, len(sent))
    x = 3 * discs(8, 9)[0] + 5
    expected = by_shift(space, spread, None, x, patients, torch.device("cpu"))
    assert expected.dose.share
    with cuda.present() as device:
        found = vector(by_shift(space, spread, None, x, patients, device).adapted.merged)
    check_close(found, vector(expected.adapted.merged), cuda, "dose by shift")


def test_gate_of_consensus(cuda: Cuda) -> None:
    space, x = space_of(3, torch.float32), images(6, 32, 32, torch.float32)
    expected = consensus(space, x, device=torch.device("cpu"))
    with cuda.present() as device:
        found = consensus(space, x, device=device)
    check_close(flat(found), flat(expected), cuda, "consensus")


def test_dose_is_practised(cuda: Cuda) -> None:
    space, patients = disc_space(), [f"p{index // 2}" for index in range(8)]
    members = [profile(space.plain(), discs(8, seed)[0], patients) for seed in (3, 4)]
    sent = [sent_by(each, (0.1, 0.2, 1.0)) for each in members]
    mean = {name: torch.stack([each[name] for each in sent]).mean(dim=0) for name in sent[0]}
    spread = Spread.of(members[0].layers, mean, len(sent))
    x, masks = discs(8, 9)
    scans, practice = Practised.of(2 * x, masks, patients), Practice((0.0, 1.0))
    with cuda.present() as device:
        episodes = list(practise(space, spread, scans, practised, practice, 0, device))
    assert [each.severity for each in episodes] == [0.0, 1.0]
    assert all(math.isfinite(each.served) and each.shift > 0 for each in episodes)


def test_joining_repeats_and_resumes(cuda: Cuda) -> None:
    draw = torch.Generator().manual_seed(1)

    def examples(patients: tuple[str, ...]) -> LabelledSlices:
        pictures = torch.randn(len(patients), 1, 32, 32, generator=draw)
        masks = (torch.rand(len(patients), 32, 32, generator=draw) > 0.8).to(torch.uint8)
        return LabelledSlices(pictures, masks, patients)

    train, validation = examples(("p1", "p1", "p2", "p3")), examples(("p4", "p5"))
    config, saved = JoiningConfig(epochs=2, batch_size=2), list[bytes]()

    def joined(device: torch.device, resume: bytes | None = None) -> nn.Module:
        start = build("fedoap", in_channels=1, width=2, heads=4, sites=2, tokens=4)
        network = initialise(start, torch.Generator().manual_seed(0)).to(device)
        checkpoint = None if resume is None else JoiningCheckpoint.from_bytes(resume)
        join(
            network,
            train,
            validation,
            config,
            score_of(validation),
            resume=checkpoint,
            after_epoch=lambda found: saved.append(found.to_bytes()),
        )
        predict(network, train.images)
        return network

    expected = vector(joined(torch.device("cpu")))
    with cuda.present() as device:
        saved.clear()
        network = joined(device)
        found, checkpoint = vector(network), saved[1]
        assert torch.equal(found, vector(joined(device)))
        assert torch.equal(found, vector(joined(device, checkpoint)))
        assert to_onnx(network, 1, (32, 32))
    check_close(found, expected, cuda, "joining")


def test_picking_of_a_cluster(cuda: Cuda) -> None:
    draw = torch.Generator().manual_seed(2)
    pictures = torch.randn(5, 1, 16, 16, generator=draw)
    groups = torch.tensor([0, 0, 1, 2, 3])

    def picked(device: torch.device) -> Tensor:
        seen = {}
        for name in "12":
            network = build("resnet18", in_channels=1, classes=3, width=1)
            initialise(network, torch.Generator().manual_seed(int(name)))
            seen[name] = observe(network.to(device), pictures, 0)
        found = [torch.tensor([*costs(criterion, seen).values()]) for criterion in CRITERIA]
        stability(next(iter(CRITERIA)), seen, groups, torch.Generator().manual_seed(0))
        return flat(found)

    expected = picked(torch.device("cpu"))
    with cuda.present() as device:
        found = picked(device)
    check_close(found, expected, cuda, "picking")
