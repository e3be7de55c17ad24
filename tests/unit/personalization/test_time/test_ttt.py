"""Test-time training by quarter turns, against the authors' update rule, in float64."""

from __future__ import annotations

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from personalization.errors import NetworkError
from personalization.export import to_onnx
from personalization.networks import build, initialise
from personalization.networks.capabilities import head_paths
from personalization.networks.rotation import RotationHead, every_turn_loss, turned, views
from personalization.seeds import seed_of
from personalization.test_time.adapt import learn
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.presets.ttt import RECIPE, STEPS
from personalization.test_time.recipe import Adapted
from tests.helpers.personalization.discs import UNGUARDED, discs, headed, space

CPU = torch.device("cpu")
IMAGES = discs(3, 3, contrast=1.5)[0].double()


def config(**options: object) -> AdaptationConfig:
    return AdaptationConfig(**{"preset": "ttt", **options})


def adapted(images: Tensor = IMAGES, **options: object) -> tuple[nn.Module, Adapted]:
    """The network after the last step, whether or not it is kept; and what is served."""
    over, chosen = headed(space(dtype=torch.float64)), config(**options)
    learning = RECIPE.learning(over, images, chosen, lambda: None)
    last: list[dict[str, Tensor]] = []

    def note(_: object) -> None:
        last.append({name: tensor.clone() for name, tensor in learning.network.state_dict().items()})

    learn(learning, images, chosen, after_epoch=note, limits=UNGUARDED)
    network = over.plain()
    network.load_state_dict(last[-1])
    return network, RECIPE.adapt(over, images, chosen, CPU)


def rotate_90(x: Tensor) -> Tensor:
    return x.flip(2).transpose(1, 2)


def rotate_180(x: Tensor) -> Tensor:
    return x.flip(2).flip(1)


def rotate_270(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flip(2)


def test_turns_are_the_authors() -> None:
    """yueatsprograms/ttt_cifar_release, utils/rotation.py: a turn by a label of 0 to 3."""
    images = torch.randn(4, 2, 6, 6)
    found = turned(images, torch.arange(4))
    for image, turn, result in zip(
        images, (lambda x: x, rotate_90, rotate_180, rotate_270), found, strict=True
    ):
        assert torch.equal(turn(image), result)


def test_a_view_is_a_crop_of_the_padded_image_as_it_is_or_mirrored() -> None:
    """There RandomCrop(32, padding=4) and RandomHorizontalFlip; here the border is repeated."""
    image = torch.randn(1, 1, 32, 32)
    padded = functional.pad(image, (4, 4, 4, 4), mode="replicate")[0]
    crops = [padded[:, r : r + 32, c : c + 32] for r in range(9) for c in range(9)]
    draw = torch.Generator().manual_seed(0)
    found = views(image.expand(40, 1, 32, 32), draw)
    places = [
        next(
            (i, m)
            for i, crop in enumerate(crops)
            for m in (0, 1)
            if torch.equal(crop.flip(-1) if m else crop, v)
        )
        for v in found
    ]
    assert len({place for place, _ in places}) > 20
    assert {mirrored for _, mirrored in places} == {0, 1}


def test_steps_are_those_of_the_authors_loop_over_images() -> None:
    """test_calls/test_adapt.py with --online and --fix_bn: for each image, SGD of 1e-3 over extractor and
    head, on `batch_size` views with random turns. The weights are carried on."""
    chosen = config(batch_size=5, seed=3)
    network = headed(space(dtype=torch.float64)).plain().eval()
    extractor = [n for n, _ in network.named_parameters() if not n.startswith(head_paths(network))]
    optimiser = torch.optim.SGD([network.get_parameter(n) for n in extractor], lr=1e-3)
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    for step in range(12):
        draw = torch.Generator().manual_seed(seed_of(chosen.seed, "step", 1, step))
        inputs = views(IMAGES[step % 3][None].expand(5, 1, 32, 32), draw)
        labels = torch.randint(4, (5,), generator=draw)
        rotated = torch.stack(
            [
                (lambda x: x, rotate_90, rotate_180, rotate_270)[k](x)
                for x, k in zip(inputs, labels, strict=True)
            ]
        )
        optimiser.zero_grad()
        features = network._encode(rotated)[1].mean((2, 3))
        head = network.rotation
        normed = functional.group_norm(features, 8, head.norm.weight, head.norm.bias)
        functional.cross_entropy(functional.linear(normed, head.fc.weight, head.fc.bias), labels).backward()
        optimiser.step()
    found, _ = adapted(batch_size=5, seed=3)
    moved = 0
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(found.get_parameter(name), parameter.detach(), rtol=1e-9, atol=1e-12)
        moved += not torch.equal(parameter, before[name])
    assert moved == len(extractor)


def test_the_decoder_and_the_statistics_stay() -> None:
    network, served = adapted(batch_size=4)
    plain = headed(space(dtype=torch.float64)).plain()
    for name, buffer in plain.named_buffers():
        assert torch.equal(network.get_buffer(name), buffer)
    for path in head_paths(plain):
        for name, parameter in plain.get_submodule(path).named_parameters():
            assert torch.equal(network.get_submodule(path).get_parameter(name), parameter)
    assert not torch.equal(network.rotation.fc.weight, plain.rotation.fc.weight)
    if served.adaptation.best_epoch:
        assert torch.equal(served.merged.rotation.fc.weight, network.rotation.fc.weight)


@pytest.mark.parametrize(("count", "steps"), [(1, STEPS), (3, 12), (11, 11)])
def test_a_slice_is_a_step_and_few_slices_are_taken_again(count: int, steps: int) -> None:
    batches = RECIPE.learning(headed(space()), discs(1)[0], config(), lambda: None).objective.epoch_batches(
        count, config(), 1
    )
    assert [batch.tolist() for batch in batches] == [[step % count] for step in range(steps)]


def test_defaults_are_one_pass_of_32_views() -> None:
    assert (config().epochs, config().batch_size) == (1, 32)
    assert (config(epochs=3).epochs, AdaptationConfig().epochs) == (3, 10)


def test_a_network_without_a_head_and_oblong_images_are_refused() -> None:
    with pytest.raises(NetworkError, match=r"ttt learns from quarter turns.*--rotation-head"):
        RECIPE.adapt(space(), IMAGES.float(), config(), CPU)
    with pytest.raises(NetworkError, match="as many rows as columns, found 32x48"):
        RECIPE.adapt(headed(space()), torch.zeros(1, 1, 32, 48), config(), CPU)
    with pytest.raises(NetworkError, match="without one"):
        build("unet", in_channels=1, classes=2, width=2).turns(torch.zeros(1, 1, 16, 16))


def test_the_head_is_the_last_to_be_drawn_and_is_in_no_graph() -> None:
    arguments = {"in_channels": 1, "classes": 2, "width": 2}
    plain, with_head = (
        initialise(build("unet", **arguments, **more), torch.Generator().manual_seed(4)).eval()
        for more in ({}, {"rotation_head": True})
    )
    kept = {name: t for name, t in with_head.state_dict().items() if not name.startswith("rotation.")}
    assert {name for name in with_head.state_dict() if name not in kept} == {
        "rotation.norm.weight",
        "rotation.norm.bias",
        "rotation.fc.weight",
        "rotation.fc.bias",
    }
    assert all(torch.equal(kept[name], tensor) for name, tensor in plain.state_dict().items())
    weights = [
        sorted(
            tensor.raw_data
            for tensor in onnx.load_from_string(to_onnx(network, 1, (32, 32))).graph.initializer
        )
        for network in (plain, with_head)
    ]
    assert weights[0] == weights[1]


def test_every_turn_counts_alike() -> None:
    network = headed(space(dtype=torch.float64)).plain().eval()
    parts = [
        functional.cross_entropy(network.turns(turn(IMAGES)), torch.full((3,), k))
        for k, turn in enumerate(
            (lambda x: x, lambda x: x.rot90(1, (2, 3)), lambda x: x.flip(2, 3), lambda x: x.rot90(3, (2, 3)))
        )
    ]
    torch.testing.assert_close(every_turn_loss(network, IMAGES), torch.stack(parts).mean())


def test_the_answer_of_the_head_does_not_depend_on_other_images() -> None:
    head, features = RotationHead(16), torch.randn(3, 16, 2, 2)
    torch.testing.assert_close(head(features)[:1], head(features[:1]))
