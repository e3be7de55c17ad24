"""Small arguments of MONAI's networks, by the name that Locum has for each."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, dict[str, Any]] = {
    "monai.dynunet": {"width": 4},
    "monai.segresnet": {"width": 8, "blocks_down": [1, 1, 1], "blocks_up": [1, 1]},
    "monai.basicunet": {"width": 2},
    "monai.unet": {"width": 4, "strides": [2, 2]},
    "monai.attentionunet": {"width": 4, "strides": [2, 2]},
    "monai.mednext": {"width": 4, "blocks_down": [1, 1], "blocks_up": [1, 1]},
    "monai.flexibleunet": {"backbone": "resnet10", "decoder_channels": [8, 8, 8, 4, 4]},
}


def small(name: str, dims: int, **own: Any) -> dict[str, Any]:
    """Small arguments of a network for images with so many axes."""
    return {"in_channels": 1, "classes": 2, "spatial_dims": dims, **SMALL[name], **own}
