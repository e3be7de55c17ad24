"""FedBN: Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021.

FedAvg of all layers but batch normalisation (Alg. 1): for site k and layer l,

    w_k^l <- (n_k / n)-weighted mean over the sites     l no batch norm (the paper's mean is uniform)
    w_k^l <- w_k^l                                      l batch norm

so that each site keeps the scale, shift and running statistics of its own scanner. A site begins with those
of a fresh network.

Shared:  all weights but batch norm's; the number of training slices; once, summary statistics of the training
         scans, and the scores of the site's model on test and validation patients. In the phase `export`, and
         only at sites that consent: the site's whole model and its score.
Stays:   batch norm's weights, biases and running statistics until then; images, masks, and everything else.
"""

from __future__ import annotations

from typing_extensions import override

from model_store.manifest import NetworkSpec
from model_store.task import Task
from personalization.networks import outline
from personalization.networks.capabilities import norms
from training.choices.fedavg import FedAvgConfig
from training.errors import ConfigurationError
from training.methods.partly_shared import PersonalFedAvg
from training.methods.registry import register


@register("fedbn", FedAvgConfig, kinds=("segmentation", "classification"))
class FedBn(PersonalFedAvg):
    """FedAvg of everything but batch norm."""

    def __init__(self, config: FedAvgConfig, task: Task) -> None:
        super().__init__(config, task)
        self._norms = norm_tensors(self.network)
        if not self._norms:
            raise ConfigurationError(
                f"network '{self.network.name}' cannot be trained by fedbn",
                ["it has no layer that normalises, so nothing would stay at the sites: use fedavg"],
            )

    @override
    def is_own(self, name: str) -> bool:
        return name in self._norms


def norm_tensors(spec: NetworkSpec) -> frozenset[str]:
    """Names of the parameters and buffers of the layers that normalise, of any kind."""
    network = outline(spec.name, **spec.arguments)
    return frozenset(f"{path}.{name}" for path, norm in norms(network).items() for name in norm.state_dict())
