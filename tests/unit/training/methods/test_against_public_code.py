"""Methods against the update rules of public code, in float64.

Every rule here is written again from the repository, file and commit that its docstring names. The network is
a linear classifier with a gradient in closed form, and a batch is a site's whole data, so that neither
torch's autograd nor the order of the images has a part in what is expected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from model_store.task import Task
from personalization import co_boosting, dafl
from personalization.dense import generator_loss
from personalization.fedbicross.distillation import distillation_loss, divergence
from personalization.fedbicross.teachers import Teacher
from personalization.networks import registry
from personalization.networks.capabilities import Traits
from tests.helpers.training.sites import EMPTY, client_step, context, server_step
from training.algorithm import ClientResult, Memory, Phase, RoundResult, State
from training.local.images import Images
from training.local.schedule import Schedule
from training.local.site import SiteData
from training.methods.ditto import Ditto, DittoConfig
from training.methods.fedavg import FedAvg
from training.methods.feddc import FedDc, FedDcConfig
from training.methods.fedsoup import FedSoup, FedSoupConfig
from training.methods.moon import Moon, MoonConfig
from training.methods.pfedme import PFedMe, PFedMeConfig
from training.methods.registry import method
from training.methods.scaffold import Scaffold, ScaffoldConfig
from training.state_tree import part

CLASSES = 3
TASK = Task(name="points", kind="classification", class_names=("a", "b", "c"), size=(8, 8))
RATE = 0.1
# One batch is a whole site; a pass of `local_epochs` is a step.
PLAIN = {
    "recipe": "paper",
    "batch_size": 64,
    "augment": False,
    "optimiser": "sgd",
    "learning_rate": RATE,
    "selection": "last",
}


class Linear(nn.Module):
    """Logits of images of 2 x 2 values, with weights in float64."""

    traits = Traits("classification", head=("layer",))

    def __init__(self, **_: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, CLASSES, dtype=torch.float64)

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(images.flatten(1))


@pytest.fixture(autouse=True)
def linear_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._NETWORKS, registry.DEFAULTS["classification", 2], Linear)


def points(count: int, seed: int) -> Images:
    """Images with a class that a linear network finds for the most part."""
    draw = np.random.default_rng(seed)
    images = draw.normal(size=(count, 1, 2, 2))
    labels = (images.reshape(count, 4)[:, :CLASSES] + 0.5 * draw.normal(size=(count, CLASSES))).argmax(1)
    names = tuple(map(str, range(count)))
    return Images(images, labels, names, names, (0,) * count)


SITES = {
    name: SiteData(name, points(count, seed), points(40, seed + 10), points(0, 0), None)
    for seed, (name, count) in enumerate({"A": 12, "B": 7, "C": 9}.items())
}


def matrix(state: Mapping[str, Tensor]) -> Tensor:
    """Weights and biases as one tensor [classes, 5]."""
    return torch.cat([state["layer.weight"], state["layer.bias"][:, None]], dim=1)


def state_of(weights: Tensor) -> State:
    return {"layer.weight": weights[:, :4].clone(), "layer.bias": weights[:, 4].clone()}


def rows(data: Images) -> Tensor:
    images = torch.from_numpy(data.images).flatten(1)
    return torch.cat([images, torch.ones(len(images), 1, dtype=torch.float64)], dim=1)


def gradient(weights: Tensor, data: Images) -> Tensor:
    """Gradient of the mean cross-entropy: (softmax - one-hot)^T x / n."""
    x = rows(data)
    errors = torch.softmax(x @ weights.T, dim=1)
    errors[range(len(x)), torch.from_numpy(data.targets)] -= 1
    return errors.T @ x / len(x)


def accuracy(weights: Tensor, data: Images) -> float:
    return float(((rows(data) @ weights.T).argmax(1) == torch.from_numpy(data.targets)).double().mean())


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


def reduced(results: Mapping[str, ClientResult], *groups: str) -> RoundResult:
    """What the engine gives to the server: means with the sites' weights, in float64."""
    total = sum(result.weight for result in results.values())
    means = {
        group: {
            name: sum(result.uploads[group][name] * (result.weight / total) for result in results.values())
            for name in next(iter(results.values())).uploads[group]
        }
        for group in groups
    }
    scores = {"scores": {site: dict(result.uploads["scores"]) for site, result in results.items()}}
    return RoundResult(means, scores, {site: result.weight for site, result in results.items()}, {})


def rounds(
    algorithm: FedAvg, drawn: Sequence[Sequence[str]], *groups: str
) -> Iterator[tuple[Tensor, dict[str, ClientResult], Memory]]:
    """For every round: the w_g that it began with, the sites' results, and the server's memory after it."""
    train = next(step for step in algorithm.plan() if isinstance(step, Phase) and step.name == "train")
    weights = {site: float(len(data.train)) for site, data in SITES.items()}
    if algorithm.config.aggregation == "uniform":
        weights = dict.fromkeys(SITES, 1.0)
    server = algorithm.initial(context("initial", 0))
    server = server_step(algorithm, context("describe", 0), server, RoundResult({}, {}, weights, {}))
    memories = dict.fromkeys(SITES, EMPTY)
    for round_, names in enumerate(drawn):
        w_g = matrix(part(server.tensors, "train/w_g"))
        results = {}
        for site in names:
            received = train.broadcast(server, site)
            here = context("train", round_, len(drawn), site)
            results[site] = client_step(algorithm, here, received, memories[site], SITES[site])
            memories[site] = results[site].memory or EMPTY
        after = context("train", round_, len(drawn))
        server = server_step(algorithm, after, server, reduced(results, "weights", *groups))
        yield w_g, results, server


def without_momentum(base: type[Any]) -> type[Any]:
    """The method with plain SGD. Locum's `sgd` has momentum 0.9, also in Ditto and FedSoup."""

    class Plain(base):
        def schedule(self, round_: int) -> Schedule:
            return replace(super().schedule(round_), momentum=0.0)

    return Plain


# SCAFFOLD.

DRAWN = (("A", "B", "C"), ("A", "C"), ("B",), ("A", "B"))


@pytest.mark.parametrize("code", ["ki-ljl", "NIID-Bench"])
def test_scaffold(code: str) -> None:
    """ki-ljl/Scaffold-Federated-Learning, ScaffoldOptimizer.py and server.py at 01ece38, client.py at
    12e0421: the gradient is corrected before the step, the server takes plain means and moves c by their
    share |S| / N.

    Xtra-Computing/NIID-Bench, experiments.py at 90cc8de (`train_net_scaffold`, `local_train_net_scaffold`):
    the weights are corrected after the step, which for plain SGD is the same. This version leaves |S| / N out
    when it moves c, against line 17 of the paper's algorithm, so that c agrees while all sites are drawn;
    afterwards its change is N / |S| times Locum's.
    """
    config = ScaffoldConfig(**PLAIN, local_epochs=3, aggregation="uniform", rounds=4)
    c = torch.zeros(CLASSES, 5, dtype=torch.float64)
    own = dict.fromkeys(SITES, c)
    for names, (w_g, results, server) in zip(
        DRAWN, rounds(Scaffold(config, TASK), DRAWN, "control_change"), strict=True
    ):
        moves, changes = [], []
        for site in names:
            y = w_g
            for _ in range(3):
                if code == "ki-ljl":
                    y = y - (gradient(y, SITES[site].train) + c - own[site]) * RATE
                else:
                    y = y - RATE * gradient(y, SITES[site].train)
                    y = y - RATE * (c - own[site])
            new = own[site] - c + (w_g - y) / (3 * RATE)
            close(matrix(results[site].uploads["weights"]), y)
            close(matrix(part(results[site].memory.tensors, "control/variate")), new)
            moves.append(y - w_g)
            changes.append(new - own[site])
            own[site] = new
        share = len(names) / len(SITES)
        before, change = c, sum(changes) / len(names)
        c = before + (change * share if code == "ki-ljl" else change)
        found = matrix(part(server.tensors, "control/variate"))
        close(matrix(part(server.tensors, "train/w_g")), w_g + sum(moves) / len(names))
        close((found - before) / share, change)
        if code == "ki-ljl":
            close(found, c)
        assert change.abs().max() > 1e-3
        # NIID-Bench's next round begins with Locum's c, so that every round is compared.
        c = found


def test_scaffold_weighs_sites_by_their_images_where_public_code_takes_plain_means_of_c() -> None:
    """NIID-Bench (as above) averages w by n_k and c plainly; Locum averages both by n_k, by default."""
    algorithm = Scaffold(ScaffoldConfig(**PLAIN, local_epochs=2, rounds=1), TASK)
    ((_, results, server),) = rounds(algorithm, [tuple(SITES)], "control_change")
    controls = {site: matrix(part(r.memory.tensors, "control/variate")) for site, r in results.items()}
    plain = sum(controls.values()) / 3
    weighted = sum(c * len(SITES[site].train) for site, c in controls.items()) / 28
    close(matrix(part(server.tensors, "control/variate")), weighted)
    assert (plain - weighted).abs().max() > 1e-3


# FedAvgM, FedAdagrad, FedAdam, FedYogi.

ETA, BETA_1, BETA_2, TAU = 0.03, 0.6, 0.9, 0.005
ADAPTIVE: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "fedadagrad": lambda v, d: v + d * d,
    "fedadam": lambda v, d: BETA_2 * v + (1 - BETA_2) * d * d,
    "fedyogi": lambda v, d: v - (1 - BETA_2) * d * d * torch.sign(v - d * d),
}
ZERO = torch.zeros(CLASSES, 5, dtype=torch.float64)


def built(name: str, **fields: float) -> FedAvg:
    chosen = method(name)
    return chosen.build(chosen.config(recipe="paper", **fields), TASK)


def server_rounds(algorithm: Callable[[int], FedAvg]) -> Iterator[tuple[Tensor, Tensor, Tensor, Memory]]:
    """For every round: w_g, the sites' mean less w_g, w_g after it, and the server's memory."""
    server = algorithm(0).initial(context("initial", 0))
    draw = torch.Generator().manual_seed(2)
    for round_ in range(5):
        w_g = matrix(part(server.tensors, "train/w_g"))
        # The updates become smaller, so that Yogi's sign changes.
        away = 0.02 / 3**round_ * torch.randn(2, *w_g.shape, generator=draw, dtype=torch.float64)
        mean = (12 * (w_g + away[0]) + 7 * (w_g + away[1])) / 19
        result = RoundResult({"weights": state_of(mean)}, {}, {"A": 12.0, "B": 7.0}, {})
        server = server_step(algorithm(round_), context("train", round_, 5), server, result)
        yield w_g, mean - w_g, matrix(part(server.tensors, "train/w_g")), server


def moment(server: Memory, name: str) -> Tensor:
    return matrix(
        {layer: part(server.tensors, f"server_optimiser/of/{layer}")[name] for layer in state_of(ZERO)}
    )


def test_fedavgm() -> None:
    """adap/flower, src/py/flwr/server/strategy/fedavgm.py at 05c252a: a step of SGD with torch's momentum,
    which begins with the first gradient.
    """
    momentum = None
    for w_g, delta, after, _ in server_rounds(
        lambda _: built("fedavgm", server_rate=0.7, server_momentum=0.8)
    ):
        momentum = -delta if momentum is None else 0.8 * momentum - delta
        close(after, w_g - 0.7 * momentum)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_adaptive_servers(name: str) -> None:
    """adap/flower, src/py/flwr/server/strategy/: fedadagrad.py at 187f825, fedadam.py at 50a719a, fedyogi.py
    at 05c252a. tau is added to the root, and no bias is corrected, as in the paper's Algorithm 2 and in
    Locum. But Flower's v is 0 at first; the paper asks for v >= tau^2, and Locum begins with tau^2. With that
    v Flower's rules are Locum's; with 0, its v is less by what is left of tau^2, and its steps are longer.
    """
    fields = {"server_rate": ETA, "beta_1": BETA_1, "beta_2": BETA_2, "tau": TAU}
    m, v, flowers = ZERO, ZERO + TAU**2, ZERO
    signs: set[float] = set()
    for round_, (w_g, delta, after, server) in enumerate(server_rounds(lambda _: built(name, **fields))):
        signs |= set((v - delta * delta).sign().flatten().tolist())
        m = BETA_1 * m + (1 - BETA_1) * delta
        v, flowers = ADAPTIVE[name](v, delta), ADAPTIVE[name](flowers, delta)
        close(after, w_g + ETA * m / (v.sqrt() + TAU))
        close(moment(server, "m"), m)
        close(moment(server, "v"), v)
        if name != "fedyogi":
            left = TAU**2 * (BETA_2 ** (round_ + 1) if name == "fedadam" else 1)
            close(v - flowers, ZERO + left)
            assert (ETA * m / (flowers.sqrt() + TAU)).norm() > (after - w_g).norm()
    assert signs == {-1.0, 1.0}


def test_fedyogi_of_the_authors() -> None:
    """google-research/federated, utils/optimizers/yogi.py at 679b03d, with `initial_accumulator_value` tau^2
    and `epsilon` tau. The authors' code corrects the bias of both moments in the rate; the paper's Algorithm
    2 does not, and neither does Locum. With eta sqrt(1 - beta_2^t) / (1 - beta_1^t) for eta in round t they
    agree.
    """

    def rate(round_: int) -> float:
        return ETA * (1 - BETA_2 ** (round_ + 1)) ** 0.5 / (1 - BETA_1 ** (round_ + 1))

    fields = {"beta_1": BETA_1, "beta_2": BETA_2, "tau": TAU}
    found = server_rounds(lambda round_: built("fedyogi", server_rate=rate(round_), **fields))
    m, v = ZERO, ZERO + TAU**2
    for round_, (w_g, delta, after, _) in enumerate(found):
        slope = -delta
        m = m * BETA_1 + slope * (1 - BETA_1)
        v = v + (1 - BETA_2) * torch.sign(slope * slope - v) * slope * slope
        close(after, w_g - rate(round_) / (v.sqrt() + TAU) * m)


# Ditto, pFedMe, FedSoup.


def test_ditto() -> None:
    """litian96/ditto, flearn/trainers_MTL/ditto.py at 00c1837 and fedbase.py at 57768a6 (`simple_average`),
    with plain SGD and plain means. The authors' v begins with the first w_g of the run, Locum's with the
    first that the site receives: so both sites are drawn in the first round.
    """
    config = DittoConfig(**PLAIN, local_epochs=3, attraction=0.7, aggregation="uniform", rounds=3)
    drawn = (("A", "B"), ("A",), ("A", "B"))
    own: dict[str, Tensor] = {}
    for names, (w_g, results, server) in zip(
        drawn, rounds(without_momentum(Ditto)(config, TASK), drawn), strict=True
    ):
        updates = []
        for site in names:
            v, w = own.get(site, w_g), w_g
            for _ in range(3):
                v = v - RATE * (gradient(v, SITES[site].train) + 0.7 * (v - w_g))
                w = w - RATE * gradient(w, SITES[site].train)
            close(matrix(part(results[site].memory.tensors, "personal/model")), v)
            close(matrix(results[site].uploads["weights"]), w)
            updates.append(w - w_g)
            own[site] = v
        close(matrix(part(server.tensors, "train/w_g")), w_g + sum(updates) / len(names))


def test_dittos_model_begins_with_the_first_weights_that_its_site_receives() -> None:
    """The difference that `test_ditto` leaves out, at a site that is first drawn in the second round."""
    config = DittoConfig(**PLAIN, local_epochs=1, attraction=0.7, rounds=2)
    (first, _, _), (w_g, results, _) = rounds(Ditto(config, TASK), (("A",), ("B",)))
    found = matrix(part(results["B"].memory.tensors, "personal/model"))
    data = SITES["B"].train
    close(found, w_g - RATE * gradient(w_g, data))
    theirs = first - RATE * (gradient(first, data) + 0.7 * (first - w_g))
    assert (found - theirs).abs().max() > 1e-3


@pytest.mark.parametrize("beta", [1.0, 0.6, 2.0])
def test_pfedme(beta: float) -> None:
    """CharlieDinh/pFedMe, FLAlgorithms/users/userpFedMe.py at 0468164 and servers/serverbase.py at 7e52b22
    (`persionalized_aggregate_parameters`); its optimiser from the copy dual-grp/pFedMe,
    FLAlgorithms/optimizers/fedoptimizer.py at 874d63b, which decays theta by mu = 0.001.

    The authors' weights are n_k / n, as Locum's by default. Their `lamda * learning_rate` is `step_share`.
    """
    lamda, rate, mu = 3.0, 0.08, 0.001
    config = PFedMeConfig(
        **{**PLAIN, "learning_rate": 0.05, "statistics": "estimated"},
        local_epochs=2,
        attraction=lamda,
        personal_steps=4,
        step_share=lamda * rate,
        decay=mu,
        server_rate=beta,
        rounds=3,
    )
    drawn = (("A", "B"), ("B", "C"), ("A", "C"))
    for names, (w_g, results, server) in zip(drawn, rounds(PFedMe(config, TASK), drawn), strict=True):
        mean = torch.zeros_like(w_g)
        images = sum(len(SITES[site].train) for site in names)
        for site in names:
            theta, local = w_g, w_g
            for _ in range(2):
                for _ in range(4):
                    slope = gradient(theta, SITES[site].train) + lamda * (theta - local) + mu * theta
                    theta = theta - 0.05 * slope
                local = local - lamda * rate * (local - theta)
            close(matrix(results[site].uploads["weights"]), local)
            close(matrix(part(results[site].memory.tensors, "own/model")), theta)
            mean += local * (len(SITES[site].train) / images)
        close(matrix(part(server.tensors, "train/w_g")), (1 - beta) * w_g + beta * mean)


def test_fedsoup() -> None:
    """ubc-tea/FedSoup, system/flcore/clients/clientsoup.py at 0f202ed. The authors compare the candidates on
    a site's test images (`quick_test`), the paper and Locum on its validation images; here both have the
    same. Locum's optimiser begins afresh in every round, as plain SGD does anyway. The authors count the
    rounds that a site trained in, Locum those of the run: so all sites are drawn in all rounds.
    """
    config = FedSoupConfig(**{**PLAIN, "learning_rate": 1.0}, local_epochs=2, soup_start=0.3, rounds=14)
    drawn = [tuple(SITES)] * 14
    pools: dict[str, Tensor] = {}
    counts = dict.fromkeys(SITES, 0)
    answers = []
    for round_, (w_g, results, _) in enumerate(rounds(without_momentum(FedSoup)(config, TASK), drawn), 1):
        for site, data in SITES.items():
            w = w_g
            for _ in range(2):
                w = w - gradient(w, data.train)
            if round_ > 0.3 * 14:
                n = counts[site]
                pool = w_g if n == 0 else pools[site]
                without = w / (n + 1) + pool * n / (n + 1)
                with_ = w / (n + 2) + pool * n / (n + 2) + w_g / (n + 2)
                better = accuracy(with_, data.val) > accuracy(without, data.val)
                answers.append(better)
                if better:
                    pools[site], counts[site] = (n * pool + w_g) / (n + 1), n + 1
                w = with_ if better else without
                assert FedSoup.pool.read(results[site].memory).count == counts[site]
                if counts[site]:
                    close(matrix(part(results[site].memory.tensors, "pool/mean")), pools[site])
            close(matrix(results[site].uploads["weights"]), w)
            close(matrix(part(results[site].memory.tensors, "own/model")), w)
    assert len(answers) == 10 * 3
    assert set(answers) == {True, False}
    assert max(counts.values()) > 1


# DENSE.


def normed(seed: int) -> nn.Module:
    """A convolution, a batch norm with statistics, and logits, in float64."""
    draw = torch.Generator().manual_seed(seed)
    network = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 16, CLASSES)
    ).double()
    with torch.no_grad():
        for tensor in network.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=draw, dtype=torch.float64) - 0.5)
        network[1].running_var.abs_().add_(0.2)
    return network.eval()


def soft(logits: Tensor, temperature: float = 1.0) -> Tensor:
    shifted = (logits / temperature - (logits / temperature).amax(1, keepdim=True)).exp()
    return shifted / shifted.sum(1, keepdim=True)


def test_dense_generator() -> None:
    """zj-jayzhang/DENSE, helpers/synthesizers.py (`AdvSynthesizer.synthesize`) and helpers/utils.py
    (`DeepInversionHook`, `kldiv`) at 237c5dd. The authors add the batch-norm terms of all members, the paper
    and Locum divide them by the members: with `bn_weight` times m they agree.
    """
    members, student = [normed(seed) for seed in (1, 2, 3)], normed(7)
    images = torch.randn(20, 1, 6, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    labels = torch.arange(20) % CLASSES
    norms = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for member in members:
            maps = member[0](images)
            mean = maps.mean((0, 2, 3))
            variance = (maps**2).mean((0, 2, 3)) - mean**2
            norms += (member[1].running_var - variance).square().sum().sqrt()
            norms += (member[1].running_mean - mean).square().sum().sqrt()
        ensemble = sum(member(images) for member in members) / 3
        answers = student(images)
    p, q = soft(ensemble), soft(answers)
    differ = ensemble.argmax(1) != answers.argmax(1)
    assert 0 < int(differ.sum()) < 20
    entropy = -p[range(20), labels].log().mean()
    adversarial = -((p * (p.log() - q.log())).sum(1) * differ).mean()
    found = generator_loss(members, student, images, labels, 3 * 0.4, 0.7)
    close(found.total.detach(), 0.4 * norms + entropy + 0.7 * adversarial)


@pytest.mark.parametrize("temperature", [1.0, 20.0])
def test_dense_distillation(temperature: float) -> None:
    """zj-jayzhang/DENSE, heter_fl.py (`kd_train`) and helpers/utils.py (`KLDiv`) at 237c5dd: KL(D || S) by
    the images of the batch, times T^2. Their T is 1, as `recipe: paper` has it.
    """
    draw = torch.Generator().manual_seed(6)
    student, teacher = (4 * torch.randn(9, CLASSES, generator=draw, dtype=torch.float64) for _ in range(2))
    p, q = soft(teacher, temperature), soft(student, temperature)
    expected = (p * (p / q).log()).sum() / 9 * temperature**2
    torch.testing.assert_close(divergence(student, teacher, temperature), expected, rtol=1e-9, atol=1e-12)


# FedDC.


@pytest.mark.parametrize("clip", [None, 0.4])
def test_feddc_reading_code(clip: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """gaoliang13/FedDC, utils_methods_FedDC.py (`train_FedDC`) and utils_general.py (`train_model_FedDC`) at
    13440c2, with sites of one size, so that its weights of the sites are 1: each round adds the mean drift of
    all sites to the mean model of those that were drawn.
    """
    equal = {
        name: SiteData(name, points(9, seed), points(40, seed + 10), points(0, 0), None)
        for seed, name in enumerate("ABC")
    }
    for site, data in equal.items():
        monkeypatch.setitem(SITES, site, data)
    alpha, decay, steps = 0.3, 0.01, 3
    plain = {name: value for name, value in PLAIN.items() if name != "optimiser"}
    config = FedDcConfig(
        **plain,
        **{"local_epochs": steps, "rounds": 4, "reading": "code", "alpha": alpha, "clip": clip},
        **{"weight_decay": decay, "learning_rate_decay": 1.0},
    )
    zero = torch.zeros(CLASSES, 5, dtype=torch.float64)
    drift, state, mean_state = dict.fromkeys(SITES, zero), dict.fromkeys(SITES, zero), zero
    clipped = 0
    for names, (w_g, results, server) in zip(
        DRAWN, rounds(FedDc(config, TASK), DRAWN, "gradient_change"), strict=True
    ):
        models, moved = [], zero
        for site in names:
            y = w_g
            for _ in range(steps):
                slope = gradient(y, SITES[site].train) + alpha * (y - (w_g - drift[site]))
                slope = slope + (-state[site] + mean_state)
                if clip is not None and slope.norm() > clip:
                    # torch divides by the norm + 1e-6.
                    slope, clipped = slope * (clip / (slope.norm() + 1e-6)), clipped + 1
                y = y - RATE * (slope + decay * y)
            drift[site] = drift[site] + y - w_g
            new = state[site] - mean_state + (1 / steps / RATE) * (w_g - y)
            moved = moved + new - state[site]
            state[site] = new
            models.append(y)
            close(matrix(results[site].uploads["weights"]), y)
            close(matrix(part(results[site].memory.tensors, "drifts/drift")), drift[site])
            close(matrix(part(results[site].memory.tensors, "drifts/gradient")), new)
        mean_state = mean_state + moved / len(SITES)
        expected = sum(models) / len(models) + sum(drift.values()) / len(SITES)
        close(matrix(part(server.tensors, "train/w_g")), expected)
        close(matrix(part(server.tensors, "drifts/gradient")), mean_state)
    assert mean_state.abs().max() > 1e-3
    assert (clipped > 0) == (clip is not None)


# MOON.


class TwoLayers(nn.Module):
    """Logits of images of 2 x 2 values through three features, without biases, with weights in float64."""

    traits = Traits("classification", head=("output",))

    def __init__(self, **_: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3, bias=False, dtype=torch.float64)
        self.output = nn.Linear(3, CLASSES, bias=False, dtype=torch.float64)

    def forward(self, images: Tensor) -> Tensor:
        return self.output(self.first(images.flatten(1)))


def test_moon(monkeypatch: pytest.MonkeyPatch) -> None:
    """QinbinLi/MOON, main.py (`train_net_fedcon`) at 8fcba3c: cross-entropy of the cosines to the global and
    the previous representation, the first one right, times mu; SGD with momentum 0.9 and weight decay. Its
    gradient by the chain rule: with p the softmax of the cosines over t, and s = <z, a> / (|z| |a|),
    ds/dz = (a / |a| - s z / |z|) / |z|. Its representation is the features here, since the network has no
    projection.
    """
    monkeypatch.setitem(registry._NETWORKS, registry.DEFAULTS["classification", 2], TwoLayers)
    mu, t, decay = 0.8, 0.5, 0.02
    config = MoonConfig(
        **PLAIN,
        **{"local_epochs": 3, "rounds": 3, "mu": mu, "contrast_temperature": t, "projection": 0},
        **{"weight_decay": decay},
    )
    algorithm = Moon(config, TASK)
    train = next(step for step in algorithm.plan() if isinstance(step, Phase) and step.name == "train")
    data, memory = SITES["A"], EMPTY
    x, labels = torch.from_numpy(data.train.images).flatten(1), torch.from_numpy(data.train.targets)
    w_g = dict(part(algorithm.initial(context("initial", 0)).tensors, "train/w_g"))
    previous: State = {}
    for round_ in range(3):
        result = train.client_step(context("train", round_, 3, "A"), {"weights": w_g}, memory, data)
        memory = result.memory or EMPTY
        first, output = w_g["first.weight"], w_g["output.weight"]
        velocity = [torch.zeros_like(first), torch.zeros_like(output)]
        for step in range(3):
            z = x @ first.T
            errors = torch.softmax(z @ output.T, dim=1)
            errors[range(len(x)), labels] -= 1
            slope = errors @ output
            if previous:
                anchors = [x @ w_g["first.weight"].T, x @ previous["first.weight"].T]
                norms = [(z.norm(dim=1) * a.norm(dim=1))[:, None] for a in anchors]
                cosines = [(z * a).sum(1, keepdim=True) / n for a, n in zip(anchors, norms, strict=True)]
                p = torch.softmax(torch.cat(cosines, 1) / t, dim=1)
                for right, a, s, likely in zip((1, 0), anchors, cosines, p.T[:, :, None], strict=True):
                    size = z.norm(dim=1)[:, None]
                    ds = (a / a.norm(dim=1)[:, None] - s * z / size) / size
                    slope = slope + mu * (likely - right) / t * ds
            gradients = [slope.T @ x / len(x), errors.T @ z / len(x)]
            for number, weight in enumerate((first, output)):
                moved = gradients[number] + decay * weight
                velocity[number] = moved if step == 0 else 0.9 * velocity[number] + moved
            first, output = first - RATE * velocity[0], output - RATE * velocity[1]
        sent = result.uploads["weights"]
        close(sent["first.weight"], first)
        close(sent["output.weight"], output)
        previous = dict(sent)
        # Another w_g than the site's own model, as in a federation.
        w_g = {name: 0.7 * tensor + 0.1 for name, tensor in sent.items()}


# DAFL, FedISCA and Co-Boosting.


@pytest.mark.parametrize("reading", ["paper", "code"])
def test_dafl_generator(reading: Any) -> None:
    """huawei-noah/Data-Efficient-Model-Compression, DAFL (stored in several public copies): mean of |f| over
    images and features, and sum of q log10 q. The paper has the norm of f and 1/K sum of q log q, so that its
    terms are F and ln(10) / K times the code's.
    """
    member, images = normed(1), torch.randn(20, 1, 6, 6, dtype=torch.float64)
    member.traits = Traits("classification", head=(list(dict(member.named_children()))[-1],))
    seen: list[Tensor] = []
    handle = member[-1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        answers = member(images)
    handle.remove()
    q = soft(answers).mean(0)
    entropy, sizes = (q * q.log10()).sum(), seen[0].abs().mean()
    expected = -soft(answers).max(1).values.log().mean()
    if reading == "paper":
        entropy, sizes = entropy * np.log(10) / CLASSES, sizes * seen[0][0].numel()
    expected = expected + 5 * entropy - 0.1 * sizes
    found = dafl.generator_loss([member], images, 0.1, 5.0, reading)
    close(found.total.detach(), expected)


def test_fedisca_distillation() -> None:
    """myeongkyunkang/FedISCA, main_fedisca.py and utils.py (`kldiv`) at c6c737e: alpha i / n, T 20 with T^2,
    and the teacher that is adapted in training mode."""
    student, plain, noise = (4 * torch.randn(9, CLASSES, dtype=torch.float64) for _ in range(3))
    for number in range(5):
        alpha = number / 5
        losses = []
        for teacher in (plain, noise):
            p, q = soft(teacher, 20), soft(student, 20)
            losses.append((p * (p / q).log()).sum() / 9 * 400)
        expected = alpha * losses[0] + (1 - alpha) * losses[1]
        close(distillation_loss(student, plain, noise, 1 - alpha, 20), expected)
    member, images = normed(2), torch.randn(12, 1, 6, 6, dtype=torch.float64)
    teacher = Teacher([member], of_batch=True)
    teacher.adapt(images + 3)
    before = teacher.buffers()
    with torch.no_grad():
        maps = member[0](images)
        scale = (maps.var((0, 2, 3), unbiased=False) + member[1].eps).sqrt()
        own = (maps - maps.mean((0, 2, 3))[:, None, None]) / scale[:, None, None]
        own = own * member[1].weight[:, None, None] + member[1].bias[:, None, None]
        for layer in member[2:]:
            own = layer(own)
    close(teacher.logits(images)[1], own)
    assert all(torch.equal(t, before[0][n]) for n, t in teacher.buffers()[0].items())


def test_co_boosting() -> None:
    """rong-dai/Co-Boosting, datafree/synthesis/coboost.py (`synthesize`), datafree_kd.py (`cb_kd_train`) and
    utils_fl.py (`WEnsemble`) at b95d715, with its ensemble divided by the sum of the weights."""
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(10, 3, CLASSES, generator=draw, dtype=torch.float64)
    labels = torch.arange(10) % CLASSES
    w = torch.tensor([0.2, 0.9, 0.005], dtype=torch.float64)

    def answers(weights: Tensor) -> Tensor:
        return sum(weights[k] * logits[:, k] for k in range(3)) / weights.sum()

    mixed = w.clone().requires_grad_()
    p = torch.softmax(answers(mixed), 1)[range(10), labels]
    (-p.log().mean()).backward()
    mu = 0.01 * 0.99**4
    moved = w - mu * mixed.grad.sign()
    eta = torch.clamp(moved - w, min=-1, max=1)
    expected = torch.clamp(w + eta, min=0, max=1)
    close(co_boosting.boosted(w, logits, labels, mu, normalised=True), expected)

    student = torch.randn(10, CLASSES, generator=draw, dtype=torch.float64)
    teacher = answers(w)
    chosen = torch.softmax(teacher, 1)[range(10), labels]
    hard = ((1 - chosen) * -chosen.log()).mean()
    a, b = soft(teacher, 3), soft(student, 3)
    apart = (9 * (a * (a / b).log()).sum(1)).mean()
    close(co_boosting.generator_loss(teacher, student, labels, 1.0), hard - apart)
