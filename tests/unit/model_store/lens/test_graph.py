"""A lens as onnx nodes gives what `Lens.apply` gives, in front of any graph of slices."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper
from scipy import ndimage

from model_store.errors import GraphRefused
from model_store.graphs import check_graph
from model_store.lens import STEPS, Lens, Step
from model_store.lens.features import CENTRES, LEVELS, standardised
from model_store.lens.graph import with_lens
from model_store.lens.lens import Curve

Images = NDArray[np.float32]
SUBSETS = [steps for count in range(1, 5) for steps in itertools.combinations(STEPS, count)]
# Images, channels and sides.
SHAPES = [(1, 1, 48, 33), (3, 2, 31, 64), (2, 7, 17, 16), (1, 1, 128, 128)]


def drawn(seed: int, channels: int, steps: Collection[Step]) -> Lens:
    """A lens of these steps, stronger than fitted ones are."""
    rng = np.random.default_rng(seed)
    found: dict[str, Any] = {}
    for name, scale in (("upright", 1.0), ("field", 0.5)):
        found[name] = [rng.normal(scale=scale, size=36).tolist() for _ in range(channels)]
    found["spectrum"] = (-np.sort(rng.uniform(0, 1.38, len(CENTRES)))).tolist()
    rising = (np.cumsum(rng.uniform(0.05, 0.25, (2 * channels, len(LEVELS))), axis=1) - 2).tolist()
    found["curve"] = [
        Curve(source=one, target=other) for one, other in zip(rising[::2], rising[1::2], strict=True)
    ]
    names = {"polarity": "upright", "quantiles": "curve"}
    kept = {names.get(step, step) for step in steps}
    return Lens(axes=2, channels=channels, **{name: step for name, step in found.items() if name in kept})


def textures(seed: int, *shape: int) -> Images:
    """Smooth images with a mean and a deviation of their own."""
    rng = np.random.default_rng(seed)
    x = ndimage.gaussian_filter(rng.normal(size=shape), (0, 0, 2, 2))
    x = x / x.std() * rng.uniform(0.2, 30, (*shape[:2], 1, 1)) + rng.normal(size=(*shape[:2], 1, 1))
    return x.astype(np.float32)


def model(
    nodes: list[onnx.NodeProto], opset: int = 18, shape: tuple[Any, ...] = ("B", "C", "H", "W")
) -> bytes:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("image", "seen")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    content: bytes = made.SerializeToString()
    return content


def bare(opset: int = 18, shape: tuple[Any, ...] = ("B", "C", "H", "W")) -> bytes:
    """A graph that answers what it sees."""
    return model([helper.make_node("Identity", ["image"], ["seen"])], opset, shape)


def run(content: bytes, images: Images) -> Images:
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    found: Images = session.run(None, {"image": images})[0]
    return found


def behind(lens: Lens, images: Images, graph: bytes | None = None) -> Images:
    content = with_lens(graph or bare(), lens, images.shape[2:], "g")
    check_graph(content, "g")
    onnx.checker.check_model(content)
    return run(content, images)


def away(found: Images, expected: Images, images: Images) -> float:
    """The largest difference, in standard deviations of the images."""
    deviation = standardised(images)[2]
    return float((np.abs(found - expected) / np.where(deviation > 0, deviation, 1)).max())


@pytest.mark.parametrize("steps", SUBSETS, ids="+".join)
def test_the_network_sees_what_it_sees_behind_the_lens(steps: tuple[Step, ...]) -> None:
    for seed, shape in enumerate(SHAPES):
        lens, images = drawn(seed, shape[1], steps), textures(seed, *shape)
        if shape[1] > 1:
            # A constant channel stays as it is.
            images[0, 1] = 3.3
        found = behind(lens, images)
        assert away(found, lens.apply(images), images) < 1e-5, shape
        assert not np.allclose(found, images, atol=1e-2) or steps == ("polarity",)


def test_probabilities_are_those_of_the_graph_behind_the_lens(threshold_graph: Callable[..., bytes]) -> None:
    lens, images, graph = drawn(4, 1, STEPS), textures(4, 2, 1, 64, 48), threshold_graph(0.5)
    found = behind(lens, images, graph)
    np.testing.assert_allclose(found, run(graph, lens.apply(images)), atol=1e-5 * 8 * images.std())


def test_the_batch_is_one_scan_of_which_all_or_no_images_are_negated() -> None:
    lens, seen = drawn(0, 2, ("polarity",)), textures(1, 3, 2, 32, 32)
    upright = np.kron(np.array(lens.upright).reshape(2, 6, 6), np.ones((6, 6)))[:, :32, :32]
    usual = (upright + 0.1 * seen[:1]).astype(np.float32)
    negative = np.concatenate([-usual, -usual, usual])
    flat = np.full_like(usual, 2)
    one_flat = -usual
    one_flat[:, 0] = 1
    for images in (usual, -usual, negative, -negative, flat, one_flat, np.concatenate([-usual, flat])):
        assert away(behind(lens, images), lens.apply(images), images) < 1e-5
    found = standardised(behind(lens, negative)[2:])[0]
    np.testing.assert_allclose(found, -standardised(usual)[0], atol=1e-4)
    np.testing.assert_allclose(behind(lens, one_flat), one_flat, atol=1e-5)


def test_a_curve_with_a_jump_is_finite() -> None:
    source = np.arange(len(LEVELS)) * 1e-12
    target = np.linspace(-2, 2, len(LEVELS))
    lens = Lens(axes=2, channels=1, curve=(Curve(source=tuple(source), target=tuple(target)),))
    images = textures(3, 1, 1, 16, 16)
    assert away(behind(lens, images), lens.apply(images), images) < 1e-3


@pytest.mark.parametrize("opset", [9, 13, 21])
def test_graphs_of_other_opsets_are_taken(opset: int) -> None:
    lens, images = drawn(1, 2, STEPS), textures(1, 2, 2, 24, 32)
    found = behind(lens, images, bare(opset))
    assert away(found, lens.apply(images), images) < 1e-5


def test_the_nodes_of_the_graph_stay_and_read_the_image_through_the_lens() -> None:
    graph = model(
        [
            helper.make_node("Neg", ["image"], ["lens/0"], name="inner"),
            helper.make_node("Add", ["image", "lens/0"], ["none"]),
            helper.make_node("Sub", ["image", "none"], ["seen"]),
        ]
    )
    lens, images = drawn(2, 1, STEPS), textures(2, 1, 1, 32, 16)
    assert away(behind(lens, images, graph), lens.apply(images), images) < 1e-5
    made = onnx.load_from_string(with_lens(graph, lens, (32, 16), "g"))
    before = onnx.load_from_string(graph)
    assert [node.op_type for node in made.graph.node[-3:]] == ["Neg", "Add", "Sub"]
    assert [[*node.output] for node in made.graph.node[-3:]] == [["lens/0"], ["none"], ["seen"]]
    assert made.graph.output == before.graph.output
    assert made.opset_import == before.opset_import


def test_a_subgraph_reads_the_image_through_the_lens() -> None:
    value = [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)]
    branch = helper.make_graph([helper.make_node("Identity", ["image"], ["x"])], "branch", [], value)
    yes = helper.make_tensor("v", TensorProto.BOOL, [], [1])
    graph = model(
        [
            helper.make_node("Constant", [], ["yes"], value=yes),
            helper.make_node("If", ["yes"], ["seen"], then_branch=branch, else_branch=branch),
        ]
    )
    lens, images = drawn(2, 1, ("field",)), textures(2, 1, 1, 16, 16)
    found = run(with_lens(graph, lens, (16, 16), "g"), images)
    assert away(found, lens.apply(images), images) < 1e-5


def test_a_lens_without_steps_is_the_graph() -> None:
    assert with_lens(bare(), Lens(axes=2, channels=1), (16, 16), "g") == bare()


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        (bare(opset=8), "expected a graph of opset 9 or later, found 8"),
        (bare(shape=("B", 1, 32, 16)), r"float32 \[N, 1, 16, 16\], found float \[\?, 1, 32, 16\]"),
        (bare(shape=("B", 1, 16)), r"float32 \[N, 1, 16, 16\], found float \[\?, 1, 16\]"),
        (bare().replace(b"image", b"imago"), r"an input 'image' float32 .*, found none of that name"),
    ],
)
def test_graphs_that_a_lens_does_not_fit_are_refused(graph: bytes, said: str) -> None:
    with pytest.raises(GraphRefused, match=said):
        with_lens(graph, drawn(0, 1, STEPS), (16, 16), "g")


def test_a_lens_of_volumes_is_refused_since_the_graph_sees_windows() -> None:
    lens = Lens(axes=3, channels=1, field=((0.1,) * 216,))
    with pytest.raises(
        GraphRefused, match=r"sees a volume as a whole and its graph sees windows.*Lens.apply"
    ):
        with_lens(bare(), lens, (16, 16, 16), "g")
