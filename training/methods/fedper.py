"""FedPer: Arivazhagan et al., Federated Learning with Personalization Layers, 2019.

The network is a body W_B and a head W_P (the personalization layers). In a round every site j trains both
from the shared body and its own head, and the server averages the bodies (Alg. 1 and 2):

    (W_B,j, W_P,j) <- SGD on L_j from (W_B, W_P,j)         W_B <- sum_j (n_j / n) W_B,j

Here Adam takes the steps, as in FedAvg. The network declares its head: of a U-Net it is all that comes after
the bottleneck, of a ResNet-18 the last layer. A site draws its first head itself.

Shared:  the body; the number of training slices; once, summary statistics of the training scans, and the
         scores of the site's model on test and validation patients. In the phase `export`, and only at sites
         that consent: the site's whole model and its score.
Stays:   the head until then; images, masks, and everything else.
"""

from __future__ import annotations

from typing_extensions import override

from model_store.task import Task
from personalization.networks import outline
from personalization.networks.capabilities import head_paths
from training.choices.fedavg import FedAvgConfig
from training.methods.partly_shared import PersonalFedAvg
from training.methods.registry import register


@register("fedper", FedAvgConfig, kinds=("segmentation", "classification"))
class FedPer(PersonalFedAvg):
    """FedAvg of the body, with a head at every site."""

    def __init__(self, config: FedAvgConfig, task: Task) -> None:
        super().__init__(config, task)
        network = outline(self.network.name, **self.network.arguments)
        self._head = tuple(f"{path}." for path in head_paths(network))

    @override
    def is_own(self, name: str) -> bool:
        return name.startswith(self._head)
