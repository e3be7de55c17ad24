"""nnU-Net's networks as Locum's: the arguments that plans.json has, and the names of the weights.

- `PlainConvUNet` is MONAI's `DynUNet` with biases in its transposed convolutions. A block of the decoder has
  its level's kernel in nnU-Net, the next deeper level's in DynUNet: a smaller kernel is the larger one with
  zeros around.
- `ResidualEncoderUNet` (the ResEnc presets) is `resenc`.
- A network of slices is one of volumes with kernels and strides of 1 along the first axis.

Biases of convolutions before an instance norm are left out: the norm subtracts them.

Isensee et al., "nnU-Net: a self-configuring method for deep learning-based biomedical image segmentation",
Nature Methods 18, 2021. Read in nnunetv2 2.8.1 and dynamic_network_architectures 0.4.4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn
from torch.nn import functional

from training.errors import ImportRefused

DIMENSIONS: Final = 3
PLAIN: Final = "PlainConvUNet"
RESIDUAL: Final = "ResidualEncoderUNet"
DYNUNET, RESENC = "monai.dynunet", "resenc"
# nnU-Net's class -> Locum's network, and a tensor near its image, by which a prefix is found.
_NETWORKS: Final = {
    PLAIN: (DYNUNET, "encoder.stages.0.0.convs.0.conv.weight"),
    RESIDUAL: (RESENC, "encoder.stem.convs.0.conv.weight"),
}
_LAST: Final = "decoder.seg_layers.0.weight"
_EPS: Final = 1e-5

# Numbers along each axis of slices or volumes.
Sides: TypeAlias = Annotated[tuple[int, ...], Field(min_length=2, max_length=DIMENSIONS)]


class _Arguments(BaseModel):
    """Arguments of both classes; others are left alone."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    features_per_stage: tuple[int, ...] = Field(min_length=2, max_length=12)
    kernel_sizes: tuple[Sides, ...]
    strides: tuple[Sides, ...]
    n_conv_per_stage: tuple[int, ...] | int = ()
    n_blocks_per_stage: tuple[int, ...] | int = ()
    n_conv_per_stage_decoder: tuple[int, ...] | int
    conv_bias: bool
    norm_op: str
    norm_op_kwargs: dict[str, Any] = {}
    dropout_op: str | None = None
    nonlin: str
    nonlin_kwargs: dict[str, Any] | None = None
    nonlin_first: bool = False
    stem_channels: int | None = None
    bottleneck_channels: Any = None
    block: str | None = None


@dataclass(frozen=True)
class Network:
    """A network of nnU-Net: its class there, and its name and arguments here, but for channels and classes.

    `first` and `last` are tensors by which a prefix of its weights is found.
    """

    kind: str
    name: str
    arguments: Mapping[str, Any]
    first: str
    last: str = _LAST

    def state(self, weights: Mapping[str, Tensor], outline: nn.Module, where: str) -> dict[str, Tensor]:
        """The weights by Locum's names, with zeros around kernels that are smaller than those of `outline`.

        Raises ImportRefused for a tensor that is missing or has other channels.
        """
        modules, found = modules_of(self.name, outline), dict[str, Tensor]()
        for own, expected in outline.state_dict().items():
            module, _, part = own.rpartition(".")
            name = f"{modules[module]}.{part}"
            if name not in weights:
                raise ImportRefused(f"{where}: expected the tensor {name} of a {self.kind}, found none")
            weight = weights[name].float()
            if weight.ndim == expected.ndim - 1 > 1:
                weight = weight.unsqueeze(2)
            margins = [
                side - own_side for side, own_side in zip(expected.shape[2:], weight.shape[2:], strict=False)
            ]
            if weight.ndim != expected.ndim or weight.shape[:2] != expected.shape[:2]:
                raise ImportRefused(
                    f"{where}: {name}: expected {list(expected.shape[:2])} channels by plans.json and "
                    f"dataset.json, found {list(weights[name].shape)}"
                )
            if any(margin < 0 or margin % 2 for margin in margins):
                raise ImportRefused(
                    f"{where}: {name}: expected a kernel of at most {list(expected.shape[2:])} by "
                    f"plans.json, found {list(weight.shape[2:])}"
                )
            found[own] = functional.pad(
                weight, [margin // 2 for margin in reversed(margins) for _ in range(2)]
            )
        return found


def read(raw: Mapping[str, Any], name: str, where: str) -> Network:
    """The network of the configuration `name`, of which the plans have `raw`.

    Raises ImportRefused for another architecture.
    """
    kind, given = _given(raw, name, where)
    if kind not in _NETWORKS:
        raise ImportRefused(
            f"{where}: {name} is a {kind[:64]}; expected {PLAIN} or {RESIDUAL}: export the network to onnx "
            "where nnU-Net is installed and use `import onnx`"
        )
    try:
        found = _Arguments.model_validate(given)
    except ValidationError as error:
        places = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:5])
        raise ImportRefused(
            f"{where}: plans.json: {name}: architecture: not as nnU-Net v2 writes it: {places}"
        ) from error
    stages = len(found.features_per_stage)
    kernels, strides = ([_lifted(each) for each in sides] for sides in (found.kernel_sizes, found.strides))
    decoder = _each(found.n_conv_per_stage_decoder, stages - 1)
    length = _each(found.n_conv_per_stage if kind == PLAIN else found.n_blocks_per_stage, stages)
    problems = {
        "biases": found.conv_bias,
        "instance norm with eps 1e-5 and affine": found.norm_op.endswith(("InstanceNorm3d", "InstanceNorm2d"))
        and found.norm_op_kwargs.get("affine") is True
        and found.norm_op_kwargs.get("eps", _EPS) == _EPS,
        "no dropout": found.dropout_op is None,
        "LeakyReLU of slope 0.01 after each norm": found.nonlin.endswith("LeakyReLU")
        and (found.nonlin_kwargs or {}).get("negative_slope", 0.01) == 0.01
        and not found.nonlin_first,
        "a kernel and a stride for each stage": len(kernels) == len(strides) == stages,
        "a number of convolutions for each stage": bool(length and (decoder or stages == 1)),
        **(_of_plain(kernels, length, decoder) if kind == PLAIN else _of_residual(found)),
    }
    for expected, holds in problems.items():
        if not holds:
            raise ImportRefused(
                f"{where}: plans.json: {name}: expected {expected}, found another architecture: export the "
                "network to onnx where nnU-Net is installed and use `import onnx`"
            )
    own: dict[str, Any] = {
        "spatial_dims": DIMENSIONS,
        "kernel_size": kernels,
        "strides": strides,
        "filters": list(found.features_per_stage),
    }
    own |= {"trans_bias": True} if kind == PLAIN else {"blocks": length, "decoder_convolutions": decoder}
    return Network(kind, _NETWORKS[kind][0], own, _NETWORKS[kind][1])


def _given(raw: Mapping[str, Any], name: str, where: str) -> tuple[str, Any]:
    """The class of the network, and its arguments."""
    if "architecture" in raw:
        found = raw["architecture"]
        if not isinstance(found, Mapping) or not {"network_class_name", "arch_kwargs"} <= found.keys():
            raise ImportRefused(
                f"{where}: plans.json: {name}: architecture: expected network_class_name and arch_kwargs, "
                "found another form"
            )
        return str(found["network_class_name"]).rpartition(".")[2], found["arch_kwargs"]
    # As nnU-Net wrote plans before 2.4.
    kernels = raw.get("conv_kernel_sizes")
    try:
        features = [
            min(int(raw["UNet_base_num_features"]) * 2**stage, int(raw["unet_max_num_features"]))
            for stage in range(min(len(kernels or ()), 12))
        ]
    except (KeyError, TypeError, ValueError):
        features = []
    lengths = raw.get("n_conv_per_stage_encoder")
    return str(raw.get("UNet_class_name")), {
        "features_per_stage": features,
        "kernel_sizes": kernels,
        "strides": raw.get("pool_op_kernel_sizes"),
        "n_conv_per_stage": lengths,
        "n_blocks_per_stage": lengths,
        "n_conv_per_stage_decoder": raw.get("n_conv_per_stage_decoder"),
        "conv_bias": True,
        "norm_op": "InstanceNorm3d",
        "norm_op_kwargs": {"eps": _EPS, "affine": True},
        "nonlin": "LeakyReLU",
    }


def _of_plain(kernels: list[list[int]], length: list[int], decoder: list[int]) -> dict[str, bool]:
    deeper = [*kernels[1:], [99] * DIMENSIONS]
    return {
        "two convolutions per stage": {*length, *decoder} == {2},
        "odd kernels that do not shrink": all(
            own % 2 and own <= below
            for kernel, next_kernel in zip(kernels, deeper, strict=True)
            for own, below in zip(kernel, next_kernel, strict=True)
        ),
    }


def _of_residual(found: _Arguments) -> dict[str, bool]:
    return {
        "blocks of two convolutions": found.block is None or found.block.endswith("BasicBlockD"),
        "a stem of the first stage's channels": found.stem_channels in (None, found.features_per_stage[0]),
        "no bottlenecks": found.bottleneck_channels is None,
    }


def modules_of(name: str, network: nn.Module) -> dict[str, str]:
    """The path of each layer of a network in nnU-Net's, by its path here."""
    return _MODULES[name](network)


def _of_dynunet(network: Any) -> dict[str, str]:
    last = len(network.upsamples)
    stages = ["input_block", *(f"downsamples.{index}" for index in range(last - 1)), "bottleneck"]
    blocks = {own: f"encoder.stages.{index}.0" for index, own in enumerate(stages)}
    blocks |= {f"upsamples.{index}.conv_block": f"decoder.stages.{index}" for index in range(last)}
    found = {"output_block.conv.conv": f"decoder.seg_layers.{last - 1}"}
    for index in range(last):
        found[f"upsamples.{index}.transp_conv.conv"] = f"decoder.transpconvs.{index}"
    for own, theirs in blocks.items():
        for index in range(2):
            found[f"{own}.conv{index + 1}.conv"] = f"{theirs}.convs.{index}.conv"
            found[f"{own}.norm{index + 1}"] = f"{theirs}.convs.{index}.norm"
    return found


def _of_resenc(network: Any) -> dict[str, str]:
    last = len(network.ups)
    blocks, found = {"stem": "encoder.stem.convs.0"}, {"output": f"decoder.seg_layers.{last - 1}"}
    for index, stage in enumerate(network.stages):
        for place, block in enumerate(stage):
            own, theirs = f"stages.{index}.{place}", f"encoder.stages.{index}.blocks.{place}"
            blocks |= {f"{own}.{part}": f"{theirs}.{part}" for part in ("conv1", "conv2")}
            if block.skip is not None:
                blocks[f"{own}.skip"] = f"{theirs}.skip.{0 if block.stride is None else 1}"
    for index, up in enumerate(network.ups):
        found[f"ups.{index}.up"] = f"decoder.transpconvs.{index}"
        for place in range(len(up.convs)):
            blocks[f"ups.{index}.convs.{place}"] = f"decoder.stages.{index}.convs.{place}"
    for own, theirs in blocks.items():
        found |= {f"{own}.{part}": f"{theirs}.{part}" for part in ("conv", "norm")}
    return found


_MODULES: Mapping[str, Callable[[Any], dict[str, str]]] = {DYNUNET: _of_dynunet, RESENC: _of_resenc}


def _lifted(sides: tuple[int, ...]) -> list[int]:
    return [1] * (DIMENSIONS - len(sides)) + [*sides]


def _each(counts: tuple[int, ...] | int, stages: int) -> list[int]:
    """The number of each stage; none where there is not one for each."""
    found = [counts] * stages if isinstance(counts, int) else [*counts]
    return found if len(found) == stages else []
