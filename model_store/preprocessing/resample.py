"""Sample a volume at the points of a grid that is oblique to its axes."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray


def sample(
    volume: NDArray[Any],
    to_volume: NDArray[np.float64],
    output: NDArray[Any],
    start: tuple[int, int, int] = (0, 0, 0),
    *,
    order: Literal[0, 1],
    outside: Literal["nearest", "zero"],
) -> None:
    """Fill `output` with the values of `volume` at the grid points start, start + 1, ….

    Args:
        volume: [I, J, K].
        to_volume: [4, 4], grid index -> index in the volume.
        output: [S, R, C], the part of the grid that begins at `start`.
        start: grid index of the output's first point, so that a grid can be filled part by part.
        order: 0 for the nearest value (labels), 1 for trilinear interpolation.
        outside: the value outside the volume: its nearest value, or zero.
    """
    # The import takes half a second and only tilted volumes need it, so it is not done at start-up.
    from scipy import ndimage

    ndimage.affine_transform(
        volume,
        to_volume[:3, :3],
        to_volume[:3, 3] + to_volume[:3, :3] @ np.array(start, np.float64),
        output_shape=output.shape,
        output=output,
        order=order,
        mode="nearest" if outside == "nearest" else "grid-constant",
        cval=0,
    )
