"""What the federation as a whole says of a hospital's scans: references that need no label.

There are two, since batch norm can be right in two ways: with the statistics of training, or with those of
the hospital's images. Which is better cannot be known beforehand. With three phantom federations, the same
outside hospital gained 22 points of Dice by the second, lost 18, or had no difference, and how much the
experts agree with each other did not tell. So a candidate is held against both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from personalization.networks import build
from personalization.routing.layers import use_batch_statistics
from personalization.routing.network import mixed_batches
from personalization.routing.space import RoutingSpace
from personalization.tick import Tick, no_tick


@torch.no_grad()
def consensus(
    space: RoutingSpace,
    images_NCHW: Tensor,
    *,
    device: torch.device | None = None,
    batch_size: int = 16,
    tick: Tick = no_tick,
) -> tuple[Tensor, Tensor]:
    """Class indices [N, H, W], uint8, of the experts' mean probabilities; two forwards of each expert.

    The first by the statistics each expert was published with, the second by those of each batch. Batches
    are drawn from all over the images, so that their statistics are the hospital's and not one scan's.
    Experts are taken one after another: one network more in memory, whatever K is. They work on `device`,
    by default where the images are. `tick` is called before every batch, and may raise.
    Raises RoutingError for no images.
    """
    device = device or images_NCHW.device
    mixed = mixed_batches(images_NCHW, batch_size)
    order = torch.cat([torch.arange(first, len(images_NCHW), len(mixed)) for first in range(len(mixed))])
    running: list[Tensor] = []
    batchwise: list[Tensor] = []
    for state in space.experts.values():
        with torch.device("meta"):
            network = build(space.network, **space.arguments)
        # Copied: the space's own tensors belong to every network that is routed over it
        network.load_state_dict({name: tensor.clone() for name, tensor in state.items()}, assign=True)
        network.to(device).eval()
        for sums in (running, batchwise):
            for number, batch in enumerate(mixed):
                tick()
                found = torch.softmax(network(batch.to(device)), dim=1).cpu()
                if number < len(sums):
                    sums[number] += found
                else:
                    sums.append(found)
            use_batch_statistics(network)
    return _maps(running, order), _maps(batchwise, order)


def _maps(sums: list[Tensor], order: Tensor) -> Tensor:
    """The likeliest classes, back in the order of the images."""
    found = torch.cat([total.argmax(dim=1).to(torch.uint8) for total in sums])
    maps = torch.empty_like(found)
    maps[order] = found
    return maps
