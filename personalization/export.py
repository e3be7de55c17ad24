"""Export a network as the onnx graph that is served."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from personalization.errors import ExportError, StateError
from personalization.state import check_finite

INPUT = "image"
OUTPUT = "probabilities"
LOGITS = "logits"
OPSET = 18


def to_onnx(
    network: nn.Module,
    in_channels: int,
    size: Sequence[int],
    *,
    any_batch: bool = True,
    regions: bool = False,
    logits: bool = False,
) -> bytes:
    """Export `network` with a softmax appended, as the bytes of an onnx file.

    With `regions` it is a sigmoid: the outputs are labels, which may overlap. With `logits` there is a second
    output of that name, for tasks that average logits over windows.

    Input "image" float32 [B, in_channels, *size], such as [B, C, H, W], with B free (1 without `any_batch`),
    output "probabilities" float32 [B, K, *size].
    The `extra_outputs` of a network are added under their names, from its `forward_with_extras`.
    Batch norm is folded in (running statistics). The network's mode, device and gradients are not changed.
    Equal weights give equal bytes in every process, because an artefact's digest depends on them.

    Raises ExportError for weights that are not finite, NetworkError for a size that does not fit.
    """
    try:
        check_finite(network.state_dict(), "network")
    except StateError as error:
        raise ExportError(f"not exported: {error}") from error
    served = _Served(copy.deepcopy(network).cpu().float(), regions, logits).eval()
    example = torch.zeros(1, in_channels, *size)
    outputs = [OUTPUT, *([LOGITS] if logits else ()), *served.extra_outputs]
    buffer = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        # The deprecated TorchScript exporter is used on purpose. The newer one takes 3-6 s per graph instead
        # of 0.2 s (a routing space has K+1 graphs) and logs about an absent torchvision. Both fold batch norm
        # and agree to rounding.
        warnings.simplefilter("ignore", DeprecationWarning)
        # Tracing warns that checks of the input's shape become constants, but the size is fixed here.
        warnings.filterwarnings("ignore", message="Converting a tensor to a Python")
        # Instance norm uses an image's own statistics in eval mode too, and is exported like that.
        warnings.filterwarnings("ignore", message=".*operator 'instance_norm' is set to train=True")
        # Slices with steps, as in a deconvolution's padding, are computed when the graph runs.
        warnings.filterwarnings("ignore", message="Constant folding")
        torch.onnx.export(
            served,
            (example,),
            buffer,  # type: ignore[arg-type]  # declared for paths only, but file objects work
            dynamo=False,
            input_names=[INPUT],
            output_names=outputs,
            dynamic_axes={name: {0: "B"} for name in (INPUT, *outputs)} if any_batch else {},
            opset_version=OPSET,
        )
    return buffer.getvalue()


class _Served(nn.Module):
    """Appends the softmax, or the sigmoid, so that every graph gives probabilities."""

    def __init__(self, network: nn.Module, regions: bool, logits: bool) -> None:
        super().__init__()
        self.network, self.regions, self.logits = network, regions, logits
        self.extra_outputs: tuple[str, ...] = getattr(network, "extra_outputs", ())

    def forward(self, image_BCHW: Tensor) -> Tensor | tuple[Tensor, ...]:
        if not (self.extra_outputs or self.logits):
            return self._probabilities(self.network(image_BCHW))
        extras: list[Tensor] = []
        if self.extra_outputs:
            logits, *extras = self.network.forward_with_extras(image_BCHW)  # type: ignore[operator]
        else:
            logits = self.network(image_BCHW)
        return self._probabilities(logits), *([logits] if self.logits else ()), *extras

    def _probabilities(self, logits_BK: Tensor) -> Tensor:
        return torch.sigmoid(logits_BK) if self.regions else torch.softmax(logits_BK, dim=1)
