"""The shift of an answer: equal to what a job measures with torch, beside an answer that stays the same."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import save
from torch import nn

from personalization.export import to_onnx
from personalization.iop_fl.batch_norm import profile
from personalization.networks import build
from personalization.networks.capabilities import moving_norms
from personalization.test_time.ladder import _ratios
from service.inference.sessions import GraphSession
from service.inference.shift import MOMENTS, MomentSums, Norms, Reference

NETWORKS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "unet": ({"in_channels": 1, "classes": 3, "width": 4}, (32, 32)),
    "monai.basicunet": (
        {"in_channels": 2, "classes": 2, "spatial_dims": 2, "features": [4, 4, 8, 8, 16, 4], "norm": "batch"},
        (32, 32),
    ),
    "monai.unet": (
        {"in_channels": 1, "classes": 2, "channels": [4, 8, 16, 16], "norm": "batch"},
        (16, 16, 16),
    ),
}


def drawn(network: nn.Module, seed: int = 0) -> nn.Module:
    """The network with statistics, scales and shifts drawn at random, as training leaves them."""
    draw = torch.Generator().manual_seed(seed)
    for norm in moving_norms(network).values():
        for each, low, high in (
            (norm.running_mean, -0.5, 0.5),
            (norm.running_var, 0.5, 2.0),
            (norm.weight.data, 0.5, 1.5),
            (norm.bias.data, -0.5, 0.5),
        ):
            each.uniform_(low, high, generator=draw)
    return network.eval()


def spread_of(network: nn.Module) -> dict[str, Any]:
    layers = list(moving_norms(network))
    draw = np.random.default_rng(1)
    pairs = {name: draw.uniform(0.1, 1, (len(layers), 2)) for name in ("natural", "logarithm", "patient")}
    return {
        "format": "locum-spread/1",
        "members": 4,
        "layers": layers,
        **{name: each.tolist() for name, each in pairs.items()},
    }


def of(network: nn.Module, spread: dict[str, Any]) -> Norms:
    found = Norms.of(json.dumps(spread).encode(), save(network.state_dict()))
    assert found is not None
    return found


def by_job(network: nn.Module, spread: dict[str, Any], images: torch.Tensor) -> float:
    """R of the first third of the batch norms, as the job's own code has it for a scan."""
    from personalization.iop_fl.spread import Spread

    first = -(-len(spread["layers"]) // 3)
    found = profile(network, images, [0] * len(images), first=first)
    said = Spread(**spread)
    usual = (said.tau() + said.sampling(1))[:first]
    return float(_ratios(found.shift, usual).log().mean().exp())


@pytest.mark.parametrize("name", NETWORKS)
def test_shift_is_the_job_s_and_the_answer_stays_to_the_bit(name: str) -> None:
    arguments, size = NETWORKS[name]
    network = drawn(build(name, **arguments))
    spread = spread_of(network)
    graph = to_onnx(network, arguments["in_channels"], size)
    images = torch.randn(5, arguments["in_channels"], *size, generator=torch.Generator().manual_seed(2)) * 2
    plain = GraphSession("sha256:plain", graph, threads=1, device="cpu")
    measuring = GraphSession(
        "sha256:measuring", graph, threads=1, device="cpu", reference=Reference(of(network, spread))
    )
    moments = MomentSums()
    for part in (images[:2], images[2:]):
        outputs = measuring.run(part.numpy())
        np.testing.assert_array_equal(outputs.probabilities, plain.run(part.numpy()).probabilities)
        moments.add(outputs.moments)
    prepared: Any = None
    found = measuring.reference.shift_of(moments, prepared)
    assert found is not None
    shift, at = found
    assert at == "norms"
    assert shift == pytest.approx(by_job(network, spread, images), rel=1e-4)


def test_graph_of_other_weights_is_left_as_it_is() -> None:
    arguments, size = NETWORKS["unet"]
    network, other = (drawn(build("unet", **arguments), seed) for seed in (0, 1))
    model = onnx.load_from_string(to_onnx(other, 1, size))
    before = model.SerializeToString()
    assert not of(network, spread_of(network)).add_to(model)
    assert model.SerializeToString() == before
    assert of(other, spread_of(other)).add_to(model)
    assert [output.name for output in model.graph.output] == ["probabilities", MOMENTS]


def test_network_without_the_spread_s_norms_has_none() -> None:
    arguments, _ = NETWORKS["unet"]
    network = build("unet", **arguments)
    spread = spread_of(network) | {"layers": ["elsewhere"] * 18}
    assert Norms.of(json.dumps(spread).encode(), save(network.state_dict())) is None


class _Read:
    """An artefact with these files."""

    def __init__(self, **files: bytes) -> None:
        self.files = {name.replace("_", "."): content for name, content in files.items()}
        self.manifest = SimpleNamespace(files=self.files, precision=None)

    def read(self, name: str) -> bytes:
        return self.files[name]


@pytest.mark.parametrize("spread", [b"", b"[]", b"{}", b'{"members": 1, "layers": ["a"]}', b"\xff"])
def test_files_that_are_no_spread_or_no_weights_leave_it_unmeasured(spread: bytes) -> None:
    network: Any = _Read(weights_safetensors=b"none")
    assert Reference.of(cast(Any, _Read(spread_json=spread)), network) == Reference()
    arguments, _ = NETWORKS["unet"]
    weights = save(build("unet", **arguments).state_dict())
    assert (
        Reference.of(cast(Any, _Read(spread_json=spread)), cast(Any, _Read(weights_safetensors=weights)))
        == Reference()
    )
