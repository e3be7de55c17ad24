"""Export a routed network with its routers as an onnx graph."""

from __future__ import annotations

from torch import Tensor, nn

from personalization.cancellation import CancelCheck, never_cancelled
from personalization.errors import ExportError
from personalization.export import to_onnx
from personalization.iop_fl.batch_norm import recalibrate_statistics
from personalization.iop_fl.network import routed_layers
from personalization.iop_fl.routers import PooledRouter
from personalization.iop_fl.space import RoutingSpace

# An onnx file is one protobuf message of less than 2 GiB; 16 MiB are reserved for the graph
LARGEST_BYTES = 2**31 - 2**24


def to_dynamic_onnx(
    space: RoutingSpace,
    network: nn.Module,
    images_NCHW: Tensor,
    *,
    check_cancelled: CancelCheck = never_cancelled,
) -> bytes:
    """Export a routed network, with batch norm recalibrated on these images. The graph takes their size.

    The interface is that of `personalization.export.to_onnx`, but a graph with pooled routers takes one image
    at a time (B = 1): each image has its own weights, and onnx fixes the number of groups of a convolution.
    The file contains all experts, so it is E times as large as a plain network's. `check_cancelled` is called
    before every batch of a pass, and may raise.

    Raises ExportError if the experts do not fit into one onnx file, or a weight is not finite.
    """
    weight = sum(layer.experts.numel() * 4 for layer in routed_layers(network).values())
    if weight > LARGEST_BYTES:
        raise ExportError(
            f"expected at most {LARGEST_BYTES} bytes for one onnx file, found {weight} of the "
            f"{len(space.names)} experts: "
            "serve the merged network, or route over fewer models"
        )
    baked = recalibrate_statistics(space, network, images_NCHW, check_cancelled=check_cancelled)
    single = any(isinstance(module, PooledRouter) for module in baked.modules())
    _, channels, *size = images_NCHW.shape
    return to_onnx(baked, channels, size, any_batch=not single)
