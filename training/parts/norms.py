"""The batch-norm statistics of the published model, which every site estimates on its slices as they are.

Sites average running statistics of their own weights, and of drawn scanners. After the last round they
therefore measure the moments of the selected w_g, which takes

    mean <- sum_k (n_k / n) mean_k     var <- sum_k (n_k / n) (var_k + mean_k^2) - mean^2

and score it with these.

Shared:  mean and mean square of every batch-norm channel over the training slices; the score on validation
         patients; what `spread` shares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from typing_extensions import override

from training.algorithm import ClientResult, Group, Memory, Phase, Plan, RoundResult, State, StepContext
from training.errors import TrainingError
from training.local.networks import network_of
from training.local.norms import batch_moments, moments_of, with_moments
from training.local.scores import weight_of
from training.local.site import SiteData
from training.parts.part import Part
from training.parts.spread import Spread
from training.parts.train import SCORES, WEIGHTS, Train

MOMENTS = Group("moments", "statistics", "mean", essential=False)


class EstimateNorms(Part):
    """Two phases after training; none of a network without batch norm.

    `spread` measures in the second one. A model that is `bare` has no statistics from its training.
    """

    def __init__(self, train: Train, spread: Spread, *, bare: bool = False) -> None:
        self.train = train
        self.spread = spread
        self.bare = bare
        self.config = train.learner.config
        self.moments = moments_of(train.learner.network)

    @override
    def plan(self) -> Plan:
        if self.config.statistics != "estimated" or not self.moments:
            return ()
        send = self.train.send_selected
        estimate = Phase(
            "estimate",
            1,
            (WEIGHTS,),
            (MOMENTS,),
            self.estimate_step,
            self.take_moments,
            send,
            self.expect_moments,
            everyone=True,
        )
        uploads = (SCORES, *self.spread.groups)
        revalidate = Phase(
            "revalidate", 1, (WEIGHTS,), uploads, self.score_step, self.note, send, everyone=True
        )
        return estimate, revalidate

    def expect_moments(self, server: Memory) -> Mapping[str, State]:
        """Moments of every batch norm."""
        return {MOMENTS.name: self.moments}

    def estimate_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """Moments of the model that was sent, over the site's slices as they are."""
        network = network_of(self.train.learner.network, received[WEIGHTS.name], context.device)
        moments = batch_moments(network, data.all_train, self.config.batch_size)
        return ClientResult({MOMENTS.name: moments}, weight_of(data, self.config.aggregation))

    def take_moments(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Put the sites' statistics into the selected w_g.

        Raises TrainingError when no site lets those of a `bare` model out.
        """
        moments = result.reduced.get(MOMENTS.name, {})
        if self.bare and not moments:
            raise TrainingError(
                "phase 'estimate': no site sent batch-norm statistics, and the trained model has none: let "
                "`statistics` leave one site (egress) and resume, or use fedavg"
            )
        shared = self.train.slot.read(server)
        return self.train.slot.write(server, shared.with_selected(with_moments(shared.selected, moments)))

    def score_step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """Score the selected w_g, and measure how far the site is from it. Hospitals count alike, whatever
        their size."""
        network = network_of(self.train.learner.network, received[WEIGHTS.name], context.device)
        scored = self.train.scored(network, data)
        return replace(scored, uploads={**scored.uploads, **self.spread.measure(network, data)}, weight=1.0)

    def note(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Note the scores of the selected w_g, and how far the sites are apart."""
        shared = self.train.slot.read(server)
        after = shared.noting(result, self.train.learner.metric, shared.noted.round)
        # It stays selected, whatever its score is now.
        kept = replace(after, chosen=after.latest if shared.chosen else None)
        return self.spread.note(self.train.slot.write(server, kept), result)
