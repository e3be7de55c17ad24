"""The U-Net of FedOAP (Tashdeed et al., 2025) with decoupled cross-attention and a spatial adapter.

A binary segmentation network. At its bottleneck two stages process the same features: the *query* stage,
which is personal, and the *key/value* stage, which is shared. Own queries attend to own tokens and to a bank
of the other sites' mean tokens. The plain backbone (`attention=False, adapter=False`) is that of the paper's
appendix E: 31,030,593 parameters at width 64.

Choices that the paper leaves open are arguments; the defaults are Locum's recommendation.

Legend: B batch, C channels, H and W height and width (multiples of 16, at least 32), S sites in the bank,
N = (H/16)(W/16) tokens, D = 16 width features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from personalization.errors import NetworkError
from personalization.networks.attention import cross_attention

DEPTH = 4
SIZE_MULTIPLE = 2**DEPTH
# Instance norm cannot normalise a bottleneck of one pixel.
LEAST_SIDE = 2 * SIZE_MULTIPLE
ATTENTION = "attention"
BANK = ("bank_key", "bank_value", "bank_present")


class FedOapUNet(nn.Module):
    """U-Net with instance normalisation and logits of two classes; the background's logit is 0.

    Args:
        width: number of channels at full resolution; 64 in the paper.
        attention: False gives the plain bottleneck.
        adapter: False leaves out the personal spatial adapter.
        heads: number of attention heads (Eq. 3 suggests one, appendix E says several).
        groups: number of groups of the group norm after the attention.
        residual: whether to add the query features to the attended values.
        norm: normalise the `sum` of both, or the attended `output` alone.
        convolutions: number of convolutions in the query stage and in the key/value stage, 2 or 1.
        sites, tokens: size of the bank, S and N; with 0 sites, attention is to own tokens alone.
    """

    bank_key: Tensor
    bank_value: Tensor
    bank_present: Tensor

    def __init__(
        self,
        in_channels: int,
        width: int = 64,
        *,
        attention: bool = True,
        adapter: bool = True,
        heads: int = 8,
        groups: int = 32,
        residual: bool = True,
        norm: str = "sum",
        convolutions: int = 2,
        sites: int = 0,
        tokens: int = 0,
    ) -> None:
        super().__init__()
        features = width * 2**DEPTH
        divisors = {"heads": heads, "groups": groups} if attention else {}
        _check_arguments(in_channels, width, divisors, norm, convolutions, features)
        self.in_channels = in_channels
        self.heads, self.residual, self.norm_at = heads, residual, norm
        self.extra_outputs = (ATTENTION,) if attention else ()
        widths = [width * 2**level for level in range(DEPTH)]
        for level, (source, channels) in enumerate(zip([in_channels, *widths[:-1]], widths, strict=True), 1):
            self.add_module(f"encoder{level}", _convolutions(source, channels, 2))
        self.pool = nn.MaxPool2d(2)
        if attention:
            self.query_stage = _convolutions(widths[-1], features, convolutions)
            self.keyvalue_stage = _convolutions(widths[-1], features, convolutions)
            self.to_query, self.to_key, self.to_value, self.to_output = (
                nn.Conv2d(features, features, kernel_size=1) for _ in range(4)
            )
            self.norm = nn.GroupNorm(groups, features)
            self.register_buffer("bank_key", torch.zeros(sites, tokens, features))
            self.register_buffer("bank_value", torch.zeros(sites, tokens, features))
            self.register_buffer("bank_present", torch.zeros(sites, dtype=torch.bool))
        else:
            self.bottleneck = _convolutions(widths[-1], features, 2)
        for level in range(DEPTH, 0, -1):
            here = widths[level - 1]
            self.add_module(f"upconv{level}", nn.ConvTranspose2d(2 * here, here, kernel_size=2, stride=2))
            self.add_module(f"decoder{level}", _convolutions(2 * here, here, 2))
        self.adapter = SpatialAdapter(width) if adapter else None
        self.head = nn.Conv2d(width, 1, kernel_size=1)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Compute logits [B, 2, H, W] of background (0) and tumour (z), so that their softmax is 1 - p and p.

        Raises NetworkError for a wrong channel count or size.
        """
        return two_classes(self.segment(image_BCHW)[0])

    def forward_with_extras(self, image_BCHW: Tensor) -> tuple[Tensor, ...]:
        """Compute `forward`, and the attention [B, 1 + S] if `extra_outputs` names it."""
        logits, mass = self.segment(image_BCHW)
        return (two_classes(logits), mass)[: 1 + len(self.extra_outputs)]

    def segment(self, image_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Compute logits z [B, 1, H, W] of tumour, and the attention's share on each source [B, 1 + S].

        The sources are the image's own tokens, then the bank's sites. Absent sites have share 0; without
        attention the share is [B, 1], all own. Raises as `forward`.
        """
        skips, features = self._encode(image_BCHW)
        features, mass = self._bottleneck(features)
        for level in range(DEPTH, 0, -1):
            features = self.get_submodule(f"upconv{level}")(features)
            features = torch.cat((features, skips.pop()), dim=1)
            features = self.get_submodule(f"decoder{level}")(features)
        if self.adapter is not None:
            features = self.adapter(features)
        return self.head(features), mass

    def keys_and_values(self, image_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Compute keys and values [B, N, D] of images. A site's entry in the bank is their mean."""
        if not self.extra_outputs:
            raise NetworkError("fedoap: a network without attention has no keys and values")
        return self._keys_and_values(self._encode(image_BCHW)[1])

    def _encode(self, image: Tensor) -> tuple[list[Tensor], Tensor]:
        self._check(image)
        skips: list[Tensor] = []
        features = image
        for level in range(1, DEPTH + 1):
            features = self.get_submodule(f"encoder{level}")(features)
            skips.append(features)
            features = self.pool(features)
        return skips, features

    def _keys_and_values(self, pooled: Tensor) -> tuple[Tensor, Tensor]:
        shared = self.keyvalue_stage(pooled)
        return _tokens(self.to_key(shared)), _tokens(self.to_value(shared))

    def _bottleneck(self, pooled: Tensor) -> tuple[Tensor, Tensor]:
        """Compute GroupNorm(z_q + W_o attention(W_q z_q, cat(own, bank))), and the attention's shares."""
        if not self.extra_outputs:
            features = self.bottleneck(pooled)
            return features, torch.ones_like(features[:, :1, 0, 0])
        query = self.query_stage(pooled)
        key, value = self._keys_and_values(pooled)
        present = [index for index, there in enumerate(self.bank_present.tolist()) if there]
        attended, mass = cross_attention(
            _tokens(self.to_query(query)), key, value, *self._entries(present), self.heads
        )
        attended = self.to_output(attended.transpose(1, 2).reshape(query.shape))
        residual = query if self.residual else torch.zeros_like(query)
        mixed = self.norm(residual + attended) if self.norm_at == "sum" else residual + self.norm(attended)
        return mixed, _spread(mass, present, self.bank_present.shape[0])

    def _entries(self, present: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Select the bank's entries of the present sites; without a copy if all are present."""
        if len(present) == self.bank_present.shape[0]:
            return self.bank_key, self.bank_value
        return self.bank_key[present], self.bank_value[present]

    def _check(self, image: Tensor) -> None:
        shape = tuple(image.shape)
        if len(shape) != 4 or shape[1] != self.in_channels:
            raise NetworkError(f"fedoap: expected images [B, {self.in_channels}, H, W], found {list(shape)}")
        if any(side % SIZE_MULTIPLE or side < LEAST_SIDE for side in shape[2:]):
            raise NetworkError(
                f"fedoap: height and width must be multiples of {SIZE_MULTIPLE}, at least {LEAST_SIDE}, "
                f"found {shape[2]}x{shape[3]}; set such a `size` in the task"
            )


class SpatialAdapter(nn.Module):
    """x + Conv3x3(ReLU(IN(Conv3x3(x)))): personal, and the identity while its last convolution is zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(width, width, kernel_size=3, padding=1), nn.InstanceNorm2d(width), nn.ReLU()
        )
        self.outer = nn.Conv2d(width, width, kernel_size=3, padding=1)

    def forward(self, features_BCHW: Tensor) -> Tensor:
        """Compute features of the same shape."""
        adapted: Tensor = features_BCHW + self.outer(self.inner(features_BCHW))
        return adapted


def two_classes(logits_B1HW: Tensor) -> Tensor:
    """Extend foreground logits to two classes: softmax(0, z) = (1 - sigmoid(z), sigmoid(z))."""
    return torch.cat((torch.zeros_like(logits_B1HW), logits_B1HW), dim=1)


def _convolutions(channels: int, features: int, count: int) -> nn.Sequential:
    """Build (3x3 convolution, instance norm without affine part, ReLU), `count` times."""
    layers: list[nn.Module] = []
    for source in (channels, features)[:count]:
        convolution = nn.Conv2d(source, features, kernel_size=3, padding=1)
        layers += [convolution, nn.InstanceNorm2d(features), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def _tokens(features_BCHW: Tensor) -> Tensor:
    """Flatten [B, D, h, w] to tokens [B, N, D], row by row."""
    return features_BCHW.flatten(2).transpose(1, 2)


def _spread(mass: Tensor, present: Sequence[int], sites: int) -> Tensor:
    """Extend the shares of own tokens and present sites to all sites, with 0 for absent ones."""
    own, *shares = torch.split(mass, 1, dim=1)
    column = dict(zip(present, shares, strict=True))
    return torch.cat((own, *(column.get(site, torch.zeros_like(own)) for site in range(sites))), dim=1)


def _check_arguments(
    in_channels: int, width: int, divisors: Mapping[str, int], norm: str, convolutions: int, features: int
) -> None:
    if in_channels < 1 or width < 1:
        raise NetworkError(f"fedoap: in_channels and width must be positive, found {in_channels} and {width}")
    for name, value in divisors.items():
        if value < 1 or features % value:
            raise NetworkError(f"fedoap: {name} must divide {features} (16 x width), found {value}")
    if norm not in ("sum", "output") or convolutions not in (1, 2):
        raise NetworkError(
            f"fedoap: expected norm 'sum' or 'output' and 1 or 2 convolutions, found '{norm}', {convolutions}"
        )
