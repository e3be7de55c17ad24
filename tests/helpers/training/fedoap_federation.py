"""FedOAP over a few sites in memory, phase by phase in a plain loop."""

from __future__ import annotations

import torch

from tests.helpers.training.sites import EMPTY, TASK, client_step, context, result_of, server_step, site_data
from training.algorithm import Phase, RoundResult, State
from training.methods.fedoap.config import FedOapConfig
from training.methods.fedoap.method import FedOap
from training.methods.fedoap.stages import Own

CONFIG = FedOapConfig(
    width=2, heads=4, batch_size=4, rounds=2, local_steps=2, bank_minimum=4, learning_rate=0.01
)
DATA = {name: site_data(name, 5, 4, seed) for seed, name in enumerate("ABC")}
ALONE = {"A": DATA["A"]}


class Federation:
    """An algorithm, its server and its sites, run phase by phase in a plain loop."""

    def __init__(self, config=CONFIG, data=DATA):
        self.algorithm = FedOap(config, TASK)
        self.server = self.algorithm.initial(context("initial", 0))
        self.data = data
        self.memories = dict.fromkeys(data, EMPTY)
        self.results = {}

    def phase(self, name: str) -> Phase:
        return next(phase for phase in self.algorithm.plan() if phase.name == name)

    def round(self, name: str, round_: int = 0, sites=None, withheld=()):
        phase = self.phase(name)
        self.results = {}
        for site in sites or self.data:
            received = phase.broadcast(self.server, site)
            where = context(name, round_, phase.rounds, site=site)
            result = client_step(self.algorithm, where, received, self.memories[site], self.data[site])
            assert result.uploads.keys() == {group.name for group in phase.uploads}
            self.memories[site] = result.memory or self.memories[site]
            self.results[site] = result
        groups = tuple(g.name for g in phase.uploads if g.reduction == "collect" and g.name not in withheld)
        mean = "weights" if name == "train" else None
        result = result_of(self.results, mean=mean, collect=groups)
        self.server = server_step(self.algorithm, context(name, round_), self.server, result)

    def run(self, *names: str) -> Federation:
        for name in names:
            for round_ in range(self.phase(name).rounds):
                self.round(name, round_)
        return self

    @property
    def gamma(self) -> State:
        """What all sites share."""
        return self.algorithm.first.slot.read(self.server).gamma

    def rho(self, site: str) -> State:
        """A site's personal part in stage 1."""
        return self.algorithm.first.own.read(self.memories[site]).rho

    def own(self, site: str) -> Own:
        """What a site has from the end of stage 1 on."""
        return self.algorithm.second.slot.read(self.memories[site])

    def bank(self, site: str) -> dict[str, torch.Tensor]:
        return dict(self.phase("train").broadcast(self.server, site)["bank"])


def export(federation: Federation, *sites: str) -> None:
    results = {
        site: client_step(
            federation.algorithm,
            context("export", 0, 1, site=site),
            {},
            federation.memories[site],
            federation.data[site],
        )
        for site in sites
    }
    groups = {
        name: {site: r.uploads[name] for site, r in results.items()}
        for name in ("personal", "personal_score")
    }
    result = RoundResult({}, groups, dict.fromkeys(sites, 1.0), {})
    federation.server = server_step(federation.algorithm, context("export", 0), federation.server, result)
