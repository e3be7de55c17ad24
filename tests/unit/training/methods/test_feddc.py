"""FedDC against a plain loop of the paper's algorithm, over rounds, sites and a site that is not drawn."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from model_store.task import Task
from personalization.networks import build
from tests.helpers.training.classified_sites import CORNERS, labelled_data
from tests.helpers.training.sites import EMPTY, TASK, client_step, context, phase_of, server_step, site_data
from training.algorithm import Memory, RoundResult, State
from training.config import RunPrivacy
from training.engine.egress import check_privacy
from training.errors import ConfigurationError
from training.local.networks import parameter_names
from training.local.schedule import task_loss
from training.local.site import SiteData
from training.methods.feddc import FedDc, FedDcConfig
from training.state_tree import part

SMALL: dict[str, Any] = {
    "recipe": "paper",
    "width": 2,
    "batch_size": 4,
    "local_epochs": 1,
    "augment": False,
    "weight_decay": 0.0,
    "learning_rate_decay": 1.0,
}
DRAWN = [("A", "B"), ("A",), ("A", "B")]
RATE, ALPHA = 0.05, 0.3


def round_of(
    algorithm: FedDc,
    round_: int,
    drawn: tuple[str, ...],
    server: Memory,
    memories: dict[str, Memory],
    data: Any,
) -> tuple[dict[str, Any], Memory]:
    """The sites' results, and the server's memory after them; means in float64."""
    train, found = phase_of(algorithm, "train"), {}
    for site in drawn:
        here = context("train", round_, site=site)
        received = train.broadcast(server, site)
        assert received.keys() == {group.name for group in train.downloads}
        found[site] = client_step(algorithm, here, received, memories[site], data[site])
        assert found[site].uploads.keys() == {group.name for group in train.uploads}
        memories[site] = found[site].memory
    total = sum(result.weight for result in found.values())
    groups = [group.name for group in train.uploads if group.reduction == "mean"]
    reduced = {
        group: {
            name: sum(r.uploads[group][name].double() * r.weight / total for r in found.values()).to(t.dtype)
            for name, t in found[drawn[0]].uploads[group].items()
        }
        for group in groups
    }
    scores = {site: dict(result.uploads["scores"]) for site, result in found.items()}
    result = RoundResult(reduced, {"scores": scores}, {site: r.weight for site, r in found.items()}, {})
    return found, server_step(algorithm, context("train", round_), server, result)


def begun(algorithm: FedDc, data: dict[str, SiteData]) -> Memory:
    weights = {site: float(len(own.train)) for site, own in data.items()}
    server = algorithm.initial(context("initial", 0))
    return server_step(algorithm, context("describe", 0), server, RoundResult({}, {}, weights, {}))


@pytest.mark.parametrize("shared", ["drift", "sum"])
@pytest.mark.parametrize(
    ("task", "data"),
    [
        (TASK, {"A": site_data("A", 8, 2, 0), "B": site_data("B", 4, 2, 5)}),
        (CORNERS, {"A": labelled_data("A", 8, 2, 0), "B": labelled_data("B", 4, 2, 5)}),
    ],
    ids=["segmentation", "classification"],
)
def test_rounds_are_those_of_a_plain_loop(task: Task, data: dict[str, SiteData], shared: Any) -> None:
    """Gradients of both terms by hand; a site with 8 images takes two steps, one with 4 one."""
    algorithm = FedDc(FedDcConfig(**SMALL, rounds=3, learning_rate=RATE, alpha=ALPHA, shared=shared), task)
    trained = parameter_names(algorithm.network)
    server, memories = begun(algorithm, data), dict.fromkeys(data, EMPTY)
    start = part(server.tensors, "train/w_g")
    none = {name: torch.zeros_like(start[name]) for name in trained}
    h, d_own, lengths, d = dict.fromkeys(data, none), {}, {}, none
    for round_, drawn in enumerate(DRAWN):
        w_g = part(server.tensors, "train/w_g")
        found, server = round_of(algorithm, round_, drawn, server, memories, data)
        sums = {name: torch.zeros_like(start[name]) for name in trained}
        changes = {name: torch.zeros_like(start[name]) for name in trained}
        share = {site: len(data[site].train) / sum(len(data[s].train) for s in drawn) for site in drawn}
        for site in drawn:
            network = build(algorithm.network.name, **algorithm.network.arguments)
            network.load_state_dict(w_g)
            network.to(memory_format=torch.channels_last).train()
            images = torch.from_numpy(data[site].train.images)
            targets = torch.from_numpy(data[site].train.targets)
            draw = context("train", round_, site=site).generator("train")
            steps = torch.randperm(len(images), generator=draw).split(4)
            for chosen in steps:
                network.zero_grad()
                task_loss(network(images[chosen]), targets[chosen].long()).backward()
                with torch.no_grad():
                    for name, weight in network.named_parameters():
                        gradient = weight.grad + ALPHA * (weight + h[site][name] - w_g[name])
                        if site in d_own and shared == "drift":
                            gradient += (d_own[site][name] - d[name]) / lengths[site]
                        weight -= RATE * gradient
            after = {name: weight.detach() for name, weight in network.named_parameters()}
            d_own[site] = {name: after[name] - w_g[name] for name in trained}
            lengths[site] = len(steps) * RATE
            h[site] = {name: h[site][name] + d_own[site][name] for name in trained}
            for name in trained:
                sums[name] += share[site] * (after[name] + h[site][name])
                changes[name] += share[site] * d_own[site][name]
            sent = found[site].uploads
            for name in trained:
                expected = after[name] + (h[site][name] if shared == "sum" else 0)
                torch.testing.assert_close(sent["weights"][name], expected, rtol=1e-3, atol=1e-4, msg=name)
                if shared == "drift":
                    torch.testing.assert_close(sent["drift"][name], h[site][name], rtol=1e-2, atol=1e-4)
        d = changes
        w_next = part(server.tensors, "train/w_g")
        for name in trained:
            torch.testing.assert_close(w_next[name], sums[name], rtol=1e-3, atol=2e-4, msg=name)
        # From what was compared, so that rounding does not grow.
        h = {site: part(memory.tensors, "drifts/drift") or none for site, memory in memories.items()}
        if shared == "drift":
            d_own = {s: part(m.tensors, "drifts/change") for s, m in memories.items() if m is not EMPTY}
            d = part(server.tensors, "drifts/change")
    assert max(float(t.abs().max()) for t in h["A"].values()) > 1e-3


def test_what_travels_is_twice_fedavgs_or_the_sum() -> None:
    def sizes(config: FedDcConfig) -> dict[str, int]:
        algorithm = FedDc(config, CORNERS)
        data = {"A": labelled_data("A", 8, 2, 0)}
        server = begun(algorithm, data)
        train = phase_of(algorithm, "train")
        assert {group.kind for group in (*train.downloads, *train.uploads[:-1])} == {"weights"}
        received = train.broadcast(server, "A")
        sent = client_step(algorithm, context("train", 0, site="A"), received, EMPTY, data["A"]).uploads
        count = {f"to {n}": sum(t.numel() for t in state.values()) for n, state in received.items()}
        return count | {
            f"from {n}": sum(t.numel() for t in s.values()) for n, s in sent.items() if n != "scores"
        }

    plain = sizes(FedDcConfig(**SMALL, shared="sum"))
    weights = plain["to weights"]
    assert plain == {"to weights": weights, "from weights": weights}
    both = sizes(FedDcConfig(**SMALL))
    code = sizes(FedDcConfig(**SMALL, reading="code"))
    assert both.keys() == {*plain, "to change", "from drift"}
    assert code.keys() == {*plain, "to gradient", "from gradient_change"}
    for found in (both, code):
        # Batch norm's statistics have no drift.
        assert all(0.9 * weights < count <= weights for count in found.values())


def test_only_the_sum_can_have_differential_privacy() -> None:
    privacy = RunPrivacy.model_validate({"groups": {"weights": {"clip": 1.0, "noise": 1.0}}})
    check_privacy(FedDc(FedDcConfig(shared="sum"), TASK).plan(), privacy)
    with pytest.raises(ConfigurationError, match="leaves beside 'drift', which may reveal it"):
        check_privacy(FedDc(FedDcConfig(), TASK).plan(), privacy)


def test_bad_settings_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"shared: expected 'drift' with reading: code"):
        FedDcConfig(reading="code", shared="sum")
    for field in ({"alpha": -1}, {"clip": 0}, {"optimiser": "adam"}, {"statistics": "averaged"}):
        with pytest.raises(ValueError, match=next(iter(field))):
            FedDcConfig(**field)


def test_gradients_are_clipped_with_both_terms() -> None:
    """A step of plain SGD with a clip is no longer than rate times clip."""
    task, data = CORNERS, {"A": labelled_data("A", 4, 2, 0)}
    algorithm = FedDc(FedDcConfig(**SMALL, learning_rate=RATE, clip=1e-3), task)
    memories: dict[str, Memory] = {"A": EMPTY}
    server = begun(algorithm, data)
    before: State = part(server.tensors, "train/w_g")
    found, _ = round_of(algorithm, 0, ("A",), server, memories, data)
    after = found["A"].uploads["weights"]
    square = sum(float((after[n] - before[n]).square().sum()) for n in parameter_names(algorithm.network))
    assert square**0.5 == pytest.approx(RATE * 1e-3, rel=1e-2)
