"""FedRep: Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021.

FedPer's parts, trained in turn (Alg. 1): a site i first takes steps on its head h_i alone, on the shared
representation phi, and then steps on the representation alone, with that head:

    h_i   <- head_epochs passes on f_i(h_i, phi), phi fixed
    phi_i <- local_epochs passes on f_i(h_i, phi), h_i fixed
    phi   <- sum_i (n_i / n) phi_i                              (the paper's mean is uniform)

Each turn begins with a fresh Adam. Batch norm uses the statistics of the batch in both turns, and its running
statistics follow both: fixed are the parameters. With `local_steps` each turn takes that many batches.

Shared:  the representation; the number of training slices; once, summary statistics of the training scans,
         and the scores of the site's model on test and validation patients. In the phase `export`, and only
         at sites that consent: the site's whole model and its score.
Stays:   the head until then; images, masks, and everything else.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field
from torch import nn
from typing_extensions import override

from model_store.task import Task
from training.choices.fedavg import FedAvgConfig
from training.local.loop import train_locally
from training.methods.fedper import FedPer
from training.methods.registry import register
from training.parts.train import SiteRound


class FedRepConfig(FedAvgConfig):
    """What FedRep takes beside FedAvg's."""

    head_epochs: int = Field(1, ge=1, description="passes for the head, before local_epochs for the rest")


@register("fedrep", FedRepConfig, kinds=("segmentation", "classification"))
class FedRep(FedPer):
    """FedPer that trains the head first and the body after it."""

    def __init__(self, config: FedRepConfig, task: Task) -> None:
        super().__init__(config, task)
        self.config: FedRepConfig = config

    @override
    def fit(self, network: nn.Module, here: SiteRound) -> float:
        """Both turns, in place; returns the mean loss of the second."""
        context, train = here.context, here.data.train
        schedule = self.schedule(context.round)
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(self.is_own(name))
        first = replace(schedule, epochs=self.config.head_epochs)
        train_locally(network, train, first, context.generator("head"))
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(not self.is_own(name))
        return train_locally(network, train, schedule, context.generator("train"))
