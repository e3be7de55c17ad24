"""A lens of slices as onnx nodes in front of a graph: one file that sees scans as the version does.

Every step is linear, piecewise linear or a moment, so that its nodes compute what `Lens.apply` computes:

    mean       a product with a vector on either side
    polarity   the sign of the product of the batch's mean field and the members'
    field      cells between two constant matrices
    spectrum   y = B' (G . (B x B')) B, with the real Fourier basis B of each axis: the gain G is the same for
               the sine and the cosine of a frequency, so that no complex numbers are needed
    curve      a sum of ramps, each clipped to its own interval

Images are in float32. Means and the spectrum are in float64, since a curve may be steep, and products have
more rounding than numpy's pairwise sums and transforms. The operators are on the list of
`model_store.graphs`, and as they were from opset 9 on.

Shape suffixes: N images, C channels, H, W the sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from model_store.errors import GraphRefused
from model_store.graphs import parse_graph
from model_store.lens.features import CELLS, FLAT, Feature, pooling, upsampling
from model_store.lens.lens import Curve, Lens, Row, gain_of

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto

IMAGE: Final = "image"
# `Where` and comparisons of numbers came with it.
_LEAST_OPSET: Final = 9
_OWN_DOMAINS = ("", "ai.onnx")


def with_lens(graph: bytes, lens: Lens, sides: Sequence[int], where: str) -> bytes:
    """The graph of a network behind the lens, as the bytes of an onnx file.

    Args:
        graph: an onnx file with the input `image` float32 [N, C, H, W]. Its nodes stay as they are, but that
            they read the image through the lens.
        lens: of slices. A batch is one scan, as for `Lens.apply` without `scans`. Without steps, the graph is
            returned as it is.
        sides: H and W, which are fixed.
        where: names the graph in errors.

    Raises GraphRefused for a lens of volumes, and for a graph with another input or before opset 9.
    """
    if not lens.steps:
        return graph
    if lens.axes != 2:
        raise GraphRefused(
            f"{where}: its lens sees a volume as a whole and its graph sees windows of it, so that no nodes "
            "before the graph do what the lens does: export its parent, and put each prepared volume through "
            "model_store.lens.Lens.apply before windows are cut"
        )
    model = parse_graph(graph, where)
    _check_opset(model, where)
    _fix_input(model, (lens.channels, *sides), where)
    nodes = _Nodes(_unused(model.graph))
    seen = nodes.lens(IMAGE, lens, sides)
    _read_instead(model.graph.node, seen)
    behind = [*model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend([*nodes.made, *behind])
    model.graph.initializer.extend(nodes.tensors)
    serialised: bytes = model.SerializeToString(deterministic=True)
    return serialised


def _check_opset(model: ModelProto, where: str) -> None:
    found = max((each.version for each in model.opset_import if each.domain in _OWN_DOMAINS), default=0)
    if found < _LEAST_OPSET:
        raise GraphRefused(
            f"{where}: expected a graph of opset {_LEAST_OPSET} or later, found {found}: convert it with "
            "onnx.version_converter.convert_version and import it again"
        )


def _fix_input(model: ModelProto, shape: tuple[int, ...], where: str) -> None:
    """Fix the input's channels and sides, which the lens has matrices of."""
    from onnx import TensorProto

    wanted = f"an input '{IMAGE}' float32 [N, {', '.join(map(str, shape))}]"
    found = [each for each in model.graph.input if each.name == IMAGE]
    if not found:
        raise GraphRefused(f"{where}: expected {wanted}, found none of that name: import it again")
    kind = found[0].type.tensor_type
    sides = [side.dim_value if side.HasField("dim_value") else None for side in kind.shape.dim]
    fits = len(sides) == 1 + len(shape) and all(
        side in (None, own) for side, own in zip(sides[1:], shape, strict=True)
    )
    if kind.elem_type != TensorProto.FLOAT or not fits:
        text = ", ".join("?" if side is None else str(side) for side in sides)
        name = TensorProto.DataType.Name(kind.elem_type).lower()
        raise GraphRefused(f"{where}: expected {wanted}, found {name} [{text}]: import it again")
    for dimension, own in zip(kind.shape.dim[1:], shape, strict=True):
        dimension.dim_value = own


def _unused(graph: GraphProto) -> str:
    """A beginning of names that no name of the graph has."""
    taken = {name for node in _all(graph.node) for name in (*node.input, *node.output, node.name)}
    taken |= {each.name for each in (*graph.initializer, *graph.input, *graph.output)}
    prefix = "lens/"
    while any(name.startswith(prefix) for name in taken):
        prefix = f"of_{prefix}"
    return prefix


def _read_instead(nodes: Iterable[NodeProto], seen: str) -> None:
    """Let nodes, those of subgraphs too, read `seen` in place of the image."""
    for node in _all(nodes):
        if IMAGE in node.input:
            node.input[:] = [seen if name == IMAGE else name for name in node.input]


def _all(nodes: Iterable[NodeProto]) -> Iterable[NodeProto]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
                yield from _all(inner.node)


class _Nodes:
    """Nodes of a lens, in their order, and their constants. Methods take and return names of tensors."""

    def __init__(self, prefix: str) -> None:
        self.made: list[NodeProto] = []
        self.tensors: list[TensorProto] = []
        self._prefix = prefix

    def lens(self, image: str, lens: Lens, sides: Sequence[int]) -> str:
        """All of `Lens.apply`."""
        varies = self._varies(image)
        mean, deviation, x = self._standardised(image, sides)
        if lens.upright is not None:
            x = self._of("Mul", x, self._sign(x, varies, np.array(lens.upright), sides))
        if lens.field is not None:
            x = self._of("Sub", x, self._field(np.array(lens.field), sides))
            x = self._standardised(x, sides)[-1]
        if lens.spectrum is not None:
            x = self._filtered(x, lens.spectrum, sides)
            x = self._standardised(x, sides)[-1]
        if lens.curve is not None:
            x = self._bent(x, lens.curve)
            x = self._standardised(x, sides)[-1]
        whole = self._of("Add", self._of("Mul", x, deviation), mean)
        return self._of("Where", varies, whole, image)

    def _of(self, operator: str, *inputs: str, **attributes: Any) -> str:
        from onnx import helper

        name = f"{self._prefix}{len(self.made)}"
        self.made.append(helper.make_node(operator, [*inputs], [name], name=name, **attributes))
        return name

    def _constant(self, values: NDArray[Any] | float, kind: type[np.floating[Any]] = np.float32) -> str:
        from onnx import numpy_helper

        name = f"{self._prefix}constant_{len(self.tensors)}"
        self.tensors.append(numpy_helper.from_array(np.array(values, kind), name))
        return name

    def _double(self, x: str) -> str:
        from onnx import TensorProto

        return self._of("Cast", x, to=TensorProto.DOUBLE)

    def _single(self, x: str) -> str:
        from onnx import TensorProto

        return self._of("Cast", x, to=TensorProto.FLOAT)

    def _product(self, left: str, x: str, right: str) -> str:
        return self._of("MatMul", self._of("MatMul", left, x), right)

    def _between(self, left: Feature, x: str, right: Feature) -> str:
        """`left @ x @ right` of each channel."""
        return self._product(self._constant(left), x, self._constant(right))

    def _varies(self, image: str) -> str:
        """Whether a channel is not constant [N, C, 1, 1]: by its ends, which have no rounding."""
        most = self._of("GlobalMaxPool", image)
        least = self._of("Neg", self._of("GlobalMaxPool", self._of("Neg", image)))
        return self._of("Less", least, most)

    def _mean(self, x: str, sides: Sequence[int]) -> str:
        """Means of channels [N, C, 1, 1]."""
        height, width = sides
        row = self._constant(np.full((1, height), 1 / height), np.float64)
        column = self._constant(np.full((width, 1), 1 / width), np.float64)
        return self._single(self._product(row, self._double(x), column))

    def _standardised(self, x: str, sides: Sequence[int]) -> tuple[str, str, str]:
        """The mean and the deviation of each channel, and the channels without them."""
        mean = self._mean(x, sides)
        centred = self._of("Sub", x, mean)
        deviation = self._of("Sqrt", self._mean(self._of("Mul", centred, centred), sides))
        divisor = self._of("Max", deviation, self._constant(FLAT))
        return mean, deviation, self._of("Div", centred, divisor)

    def _sign(self, x: str, varies: str, upright: Feature, sides: Sequence[int]) -> str:
        """-1 where the batch's mean field correlates negatively with the members', else 1 [1, 1, 1, 1].

        The members' field without its mean makes a product of the correlation's sign. An image with a
        constant channel is not asked. A correlation of fields that are as good as flat counts as none.
        """
        channels, (height, width) = len(upright), sides
        cells = (upright - upright.mean()).reshape(1, channels, CELLS, CELLS)
        ones = self._constant(np.ones((1, channels, 1, 1)))
        count = self._of("Conv", self._single(varies), ones)
        asked = self._single(self._of("Greater", count, self._constant(channels - 0.5)))
        field = self._of("Mul", self._between(pooling(height), x, pooling(width).T), asked)
        alike = self._of("ReduceSum", self._of("Mul", field, self._constant(cells)))
        inverted = self._of("Less", alike, self._constant(-FLAT))
        return self._of("Where", inverted, self._constant(-1.0), self._constant(1.0))

    def _field(self, cells: Feature, sides: Sequence[int]) -> str:
        height, width = sides
        grid = self._constant(cells.reshape(1, len(cells), CELLS, CELLS))
        return self._between(upsampling(height), grid, upsampling(width).T)

    def _filtered(self, x: str, spectrum: Row, sides: Sequence[int]) -> str:
        (rows, by_row), (columns, by_column) = (_basis(side) for side in sides)
        radii = np.sqrt(np.add.outer(np.square(by_row), np.square(by_column)))
        gain = self._double(self._constant(gain_of(radii, spectrum, first=True)))
        down = self._constant(rows, np.float64)
        across = down if sides[0] == sides[1] else self._constant(columns, np.float64)
        up, back = (self._of("Transpose", each, perm=[1, 0]) for each in (down, across))
        seen = self._product(down, self._double(x), back)
        return self._single(self._product(up, self._of("Mul", seen, gain), across))

    def _bent(self, x: str, curves: Sequence[Curve]) -> str:
        source, target = (
            np.array([getattr(curve, name) for curve in curves]).T[..., None, None]
            for name in ("source", "target")
        )
        # In the precision of the image, so that a ramp ends where the next one begins.
        source = source.astype(np.float32)
        for index in range(1, len(source)):
            source[index] = np.maximum(source[index], np.nextafter(source[index - 1], np.float32(np.inf)))
        zero, first = self._constant(0.0), self._constant(source[:1])
        # Outside, values are shifted.
        below = self._of("Min", self._of("Sub", x, first), zero)
        above = self._of("Relu", self._of("Sub", x, self._constant(source[-1:])))
        found = self._of("Add", self._of("Add", below, above), self._constant(target[:1]))
        for index in range(len(source) - 1):
            width = source[index + 1] - source[index]
            slope = (target[index + 1] - target[index]) / width.astype(np.float64)
            along = self._of("Relu", self._of("Sub", x, self._constant(source[index : index + 1])))
            along = self._of("Min", along, self._constant(width[np.newaxis]))
            found = self._of("Add", found, self._of("Mul", along, self._constant(slope[np.newaxis])))
        return found


def _basis(side: int) -> tuple[Feature, Feature]:
    """The orthonormal real Fourier basis [side, side], a function in each row, and their cycles per pixel."""
    orders = np.arange(side)
    # 0, 1, 1, 2, 2 ...: a cosine and a sine of each; of an even side the last has a cosine alone.
    numbers = (orders + 1) // 2
    turns = 2 * np.pi * (numbers[:, None] * orders % side) / side
    found = np.where((orders % 2 == 1)[:, None], np.cos(turns), np.sin(turns))
    found[0] = 1
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    return found, numbers / side
