"""Preset `tent` beside Tent as a plain loop, on the global model with the statistics of each batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from personalization.iop_fl.merge import merge
from personalization.iop_fl.network import route
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.objective import Batch
from personalization.test_time.recipe import adapt, objective_of, space_for
from tests.helpers.personalization.discs import UNGUARDED, discs, space

CONFIG = AdaptationConfig(preset="tent", epochs=3, batch_size=3, bn_rate=0.01)
IMAGES = discs(7, 7, contrast=1.2)[0].double()
# As batches are made: even, and each from all over
BATCHES = [IMAGES[0::3], IMAGES[1::3], IMAGES[2::3]]


def norms(network: nn.Module) -> dict[str, Tensor]:
    """Scale and shift of every batch norm, by name."""
    return {name: value.detach() for name, value in network.named_parameters() if "bn" in name}


def adapted() -> tuple[nn.Module, nn.Module, list[float]]:
    """The routed network, the merged one, and the entropies of the epochs."""
    over = space_for(CONFIG, space(dtype=torch.float64))
    network = route(over, CONFIG.router)
    result = adapt(network, IMAGES, CONFIG, limits=UNGUARDED)
    assert result.best_epoch == CONFIG.epochs, "the entropy rose"
    return network, merge(over, network, IMAGES), [record.entropy or 0.0 for record in result.history]


def by_hand() -> tuple[nn.Module, list[float]]:
    network = space(dtype=torch.float64).plain().train()
    learned = []
    for name, parameter in network.named_parameters():
        parameter.requires_grad_("bn" in name)
        learned += [parameter] if "bn" in name else []
    optimiser = torch.optim.Adam(learned, lr=0.01)

    def entropy(batch: Tensor) -> Tensor:
        p = torch.softmax(network(batch), dim=1)
        return -(p * torch.log(p + 1e-6)).sum(dim=1).mean() / math.log(2)

    entropies = []
    for epoch in range(CONFIG.epochs + 1):
        for batch in BATCHES if epoch else []:
            optimiser.zero_grad()
            entropy(batch).backward()
            optimiser.step()
        with torch.no_grad():
            entropies.append(float(sum(entropy(batch) * len(batch) for batch in BATCHES)) / len(IMAGES))
    return network, entropies


def test_it_is_entropy_minimisation_of_the_global_models_batch_norm() -> None:
    network, merged, found = adapted()
    expected, entropies = by_hand()
    torch.testing.assert_close(torch.tensor(found), torch.tensor(entropies), rtol=1e-6, atol=1e-9)
    assert entropies[-1] < entropies[0]
    before = norms(space(dtype=torch.float64).plain())
    for name, value in norms(expected).items():
        torch.testing.assert_close(norms(network)[name], value, rtol=1e-7, atol=1e-9)
        assert not torch.equal(value, before[name])
    # What is served has the convolutions of the global model, and these scales and shifts.
    plain = dict(space(dtype=torch.float64).plain().named_parameters())
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(parameter, norms(network).get(name, plain[name]), rtol=1e-12, atol=1e-12)


def test_a_step_is_one_forward_and_consistency_is_not_measured() -> None:
    network = route(space(0)).train()
    forwards: list[None] = []
    network.register_forward_hook(lambda *_: forwards.append(None))
    optimiser = torch.optim.Adam([parameter for parameter in network.parameters() if parameter.requires_grad])
    batch = Batch(IMAGES[:3].float(), torch.arange(3))
    loss = objective_of("tent").step(network, batch, CONFIG, optimiser, seed=0)
    assert math.isfinite(loss)
    assert len(forwards) == 1
    record = adapt(network, IMAGES.float(), CONFIG).history[0]
    assert (record.consistency, record.loss) == (None, record.entropy)


def test_the_seed_and_the_noise_change_nothing() -> None:
    found = []
    for change in ({}, {"seed": 9}, {"noise": 2.0}, {"router": "pooled"}):
        config = CONFIG.model_copy(update=change)
        network = route(space_for(config, space()), config.router)
        adapt(network, IMAGES.float(), config)
        found.append(norms(network))
    assert all(torch.equal(value, other[name]) for other in found[1:] for name, value in found[0].items())
