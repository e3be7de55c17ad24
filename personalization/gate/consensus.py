"""Reference masks of a hospital's scans from all models of the federation together, without labels.

There are two references: with batch norm's statistics of training, and with those of the hospital's images.
Which is better cannot be known beforehand. With three phantom federations, the same outside hospital gained
22 points of Dice by the second, lost 18, or had no difference, and the experts' agreement with each other did
not predict it. So a candidate is compared with both.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor, nn

from personalization.cancellation import CancelCheck, never_cancelled
from personalization.iop_fl.layers import use_batch_statistics
from personalization.iop_fl.network import mixed_batches
from personalization.iop_fl.space import RoutingSpace
from personalization.networks import build
from personalization.state import State
from personalization.transfer import sent


@torch.no_grad()
def consensus(
    space: RoutingSpace,
    images_NCHW: Tensor,
    *,
    device: torch.device | None = None,
    batch_size: int = 16,
    check_cancelled: CancelCheck = never_cancelled,
) -> tuple[Tensor, Tensor]:
    """Class indices [N, H, W], uint8, of the experts' mean probabilities; two forwards of each expert.

    The first by the statistics each expert was published with, the second by those of each batch. Batches
    are drawn from all over the images, so that their statistics are the hospital's and not one scan's.
    The probabilities of only one batch are in memory at a time. The experts work on `device`, by
    default where the images are. `check_cancelled` is called before every batch of an expert, and may raise.
    Raises RoutingError for no images.
    """
    device = device or images_NCHW.device
    mixed = mixed_batches(images_NCHW, batch_size)
    order = torch.cat([torch.arange(first, len(images_NCHW), len(mixed)) for first in range(len(mixed))])
    networks = [_network(space, state).to(device) for state in space.experts.values()]

    def probabilities(network: nn.Module, batch: Tensor) -> Tensor:
        check_cancelled()
        return torch.softmax(network(batch), dim=1)

    def maps() -> Tensor:
        here = (sent(batch, device) for batch in mixed)
        sums = (reduce(torch.add, (probabilities(one, batch) for one in networks)) for batch in here)
        found = torch.cat([total.argmax(dim=1).to(torch.uint8).cpu() for total in sums])
        # Back in the order of the images.
        return torch.empty_like(found).index_copy_(0, order, found)

    running = maps()
    for network in networks:
        use_batch_statistics(network)
    return running, maps()


def _network(space: RoutingSpace, state: State) -> nn.Module:
    with torch.device("meta"):
        network = build(space.network, **space.arguments)
    # The space's own tensors: nothing here writes to them.
    network.load_state_dict(state, assign=True)
    return network.eval()
