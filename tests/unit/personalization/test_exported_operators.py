"""The list of operators that are served, against the graphs of Locum's exporters and of MONAI's networks."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator

import onnx
import torch
from onnx import GraphProto
from torch import nn

from model_store.graphs import EXPORTED, FURTHER, IMPORTED, check_graph
from personalization.export import OPSET, to_onnx
from personalization.iop_fl.batch_norm import profile
from personalization.iop_fl.export import to_dynamic_onnx
from personalization.iop_fl.network import route
from personalization.iop_fl.spread import Spread, sent_by
from personalization.networks import build, names
from personalization.test_time.presets.intent import scan_graph
from personalization.test_time.presets.ladder import shift_graph
from tests.helpers.personalization.monai_cases import SMALL, small
from tests.helpers.personalization.routing_cases import images, moved, space_of
from tests.unit.personalization.fedins.test_pool import BACKBONES, SIDE, adaptive

_SMALL = {"in_channels": 1, "classes": 2, "width": 8}
# Channels of the image, then the arguments of every registered network.
_NETWORKS = {
    "unet": (1, [_SMALL]),
    "resnet18": (3, [{"in_channels": 3, "classes": 3, "width": 8}]),
    "vit": (1, [BACKBONES["vit"]]),
    "fedoap": (
        1,
        [
            {"in_channels": 1, "width": 2, "heads": 4, "groups": 8, "sites": 2, "tokens": 4},
            {"in_channels": 1, "width": 2, "heads": 4, "groups": 8},
            {"in_channels": 1, "width": 2, "attention": False, "adapter": False},
        ],
    ),
    "averaged": (
        1,
        [{"in_channels": 1, "classes": 2, "network": "unet", "arguments": {"width": 8}, "members": 2}],
    ),
    "efficientnet_unet": (1, [{"in_channels": 1, "classes": 2, "width": 2}]),
    "resenc": (1, [{"in_channels": 1, "classes": 2, "spatial_dims": 2, "width": 4, "strides": [1, 2, 2]}]),
    "projected": (
        3,
        [{"network": "resnet18", "arguments": {"in_channels": 3, "classes": 3, "width": 8}, "projection": 4}],
    ),
}


def _operators(graph: GraphProto) -> Iterator[str]:
    for node in graph.node:
        yield f"{node.domain}:{node.op_type}" if node.domain else node.op_type
        for attribute in node.attribute:
            yield from _operators(attribute.g)


def _exported() -> Iterator[bytes]:
    for name, (channels, arguments) in _NETWORKS.items():
        for each in arguments:
            yield to_onnx(build(name, **each), channels, (SIDE, SIDE))
    for kind in BACKBONES:
        yield to_onnx(adaptive(kind), 1, (SIDE, SIDE))
    space, drawn = space_of(2, torch.float32), images(2, dtype=torch.float32)
    for router in ("direct", "pooled"):
        yield to_dynamic_onnx(space, moved(route(space, router)), drawn)
    network = build("unet", **_SMALL).eval()
    yield scan_graph(network, 1, (SIDE, SIDE))
    found = profile(network, torch.rand(4, 1, SIDE, SIDE), [0, 1, 2, 3])
    sent = sent_by(found, None)
    yield shift_graph(network, Spread.of(found.layers, sent, 2), 1, (SIDE, SIDE))


def _of_monai() -> Iterator[tuple[nn.Module, int]]:
    """Networks with their number of dimensions."""
    from monai.networks import nets

    for d in (2, 3):
        shared = {"spatial_dims": d, "in_channels": 1, "out_channels": 2}
        for upsample in ("deconv", "nontrainable"):
            yield nets.BasicUNet(**shared, features=(4,) * 6, upsample=upsample), d
        for norm in ("INSTANCE", "BATCH", ("GROUP", {"num_groups": 1})):
            yield nets.UNet(**shared, channels=(4, 8, 8), strides=(2, 2), num_res_units=1, norm=norm), d
        for mode in ("nontrainable", "deconv", "pixelshuffle"):
            yield (
                nets.SegResNet(
                    **shared, init_filters=8, blocks_down=(1, 1), blocks_up=(1,), upsample_mode=mode
                ),
                d,
            )
        kernels = {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2]}
        for residual in (False, True):
            yield nets.DynUNet(**shared, **kernels, filters=[4, 8, 8], res_block=residual), d
        yield nets.DenseNet(**shared, init_features=8, growth_rate=4, block_config=(1, 1)), d
        for name in SMALL:
            yield build(name, **small(name, d)), d
        tracked = small("monai.dynunet", d, norm_name=["instance", {"track": True}])
        yield build("blended", backbone="monai.dynunet", arguments=tracked, shares=[0.2] * 3), d
    yield nets.VNet(spatial_dims=2, in_channels=1, out_channels=2), 2


def _to_onnx(network: nn.Module, dimensions: int) -> bytes:
    """As an importer exports it: with the batch free."""
    served, buffer = nn.Sequential(network, nn.Softmax(dim=1)).eval(), io.BytesIO()
    torch.onnx.export(
        served,
        (torch.zeros(1, 1, 64, *(32,) * (dimensions - 1)),),
        buffer,  # type: ignore[arg-type]
        dynamo=False,
        input_names=["image"],
        output_names=["probabilities"],
        dynamic_axes={"image": {0: "B"}, "probabilities": {0: "B"}},
        opset_version=OPSET,
    )
    return buffer.getvalue()


def _checked(content: bytes) -> set[str]:
    check_graph(content, "graph")
    return {*_operators(onnx.load_from_string(content).graph)}


def test_list_has_exactly_the_operators_of_locum_s_own_graphs() -> None:
    # What is imported as a graph cannot be exported.
    assert {*_NETWORKS, "graph", "blended"} == {name for name in names() if not name.startswith("monai.")}
    assert set().union(*map(_checked, _exported())) == EXPORTED


def test_list_has_exactly_the_operators_of_monai_s_networks_besides() -> None:
    with warnings.catch_warnings(), torch.no_grad():
        # Of MONAI's import and of the exporter.
        warnings.simplefilter("ignore")
        found = set().union(*(_checked(_to_onnx(*each)) for each in _of_monai()))
    assert found - EXPORTED == IMPORTED


def test_parts_of_the_list_are_disjoint_and_have_no_subgraph() -> None:
    assert not EXPORTED & IMPORTED
    assert not (EXPORTED | IMPORTED) & FURTHER
    for name in EXPORTED | IMPORTED | FURTHER:
        schema = onnx.defs.get_schema(name, OPSET + 2)
        kinds = {attribute.type for attribute in schema.attributes.values()}
        assert onnx.defs.OpSchema.AttrType.GRAPH not in kinds, name
