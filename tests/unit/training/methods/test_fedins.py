"""FedIns's steps at a site and at the server, without an engine."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch

from model_store.store import Store
from model_store.task import Task
from personalization.fedins import InstanceAdaptive, key_entropy
from personalization.fedins.lookup import look_up
from personalization.precision import Precision, mixed_precision
from tests.helpers.training import sites
from tests.helpers.training.backbones import PICTURES, publish, unet, vit
from tests.helpers.training.sites import client_step, server_step
from training.algorithm import Memory, RoundResult
from training.bounds import FeatureBounds
from training.engine.client import run_step
from training.engine.egress import SiteSpec
from training.engine.folder import SiteFolder
from training.engine.reduction import Reducer
from training.errors import ConfigurationError, SiteFailed
from training.local.images import Images
from training.local.site import SiteData
from training.methods.fedins.client import summed_queries
from training.methods.fedins.config import FedInsConfig
from training.methods.fedins.method import FedIns

ENTRIES = 4


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    root = tmp_path_factory.mktemp("store")
    publish(root, sites.TASK, unet(sites.TASK), "discs")
    publish(root, PICTURES, vit(PICTURES), "pictures")
    return Store(root)


def method_of(store, task=sites.TASK, **options):
    config = FedInsConfig(**{"rounds": 2, "entries": ENTRIES, "top": 2, "batch_size": 4, **options})
    return FedIns(config.pinned(store, task, "pool"), task)


def pictures(labels, seed=0):
    labels = np.array(labels, np.int64)
    images = np.random.default_rng(seed).normal(size=(len(labels), 1, 16, 16)).astype(np.float32)
    names = tuple(str(index) for index in range(len(labels)))
    return Images(
        images + labels[:, None, None, None].astype(np.float32), labels, names, names, (0,) * len(names)
    )


def pool(method, server):
    """The averaged part of the pool."""
    return method.train.slot.read(server).w_g


def centre(method, server):
    return method.describe.mean.read(server).query["centre"]


def usage(method, server):
    """The use of the keys, round by round."""
    return method.train.usage.read(server).rounds


def seen(method, memory):
    """What a site has of its training images."""
    return method.describe.seen.read(memory).train


def labelled(name, train, val=(0, 1, 2)):
    return SiteData(name, pictures(train), pictures(val, 1), pictures(()), None)


def started(method, data):
    """The server after `describe`, and each site's memory."""
    server = method.initial(sites.context("initial", 0, 1))
    server, results = step(method, server, data, dict.fromkeys(data, Memory()), "describe", 0)
    return server, {name: result.memory for name, result in results.items()}


def step(method, server, data, memories, phase, round_):
    """One round over some sites, reduced as the engine reduces."""
    (planned,) = (p for p in method.plan() if p.name == phase)
    reducer, results = Reducer(planned), {}
    for name in data:
        context = sites.context(phase, round_, planned.rounds, name)
        received = planned.broadcast(server, name)
        results[name] = client_step(method, context, received, memories[name], data[name])
        sent = {**received, **planned.expected(server)}
        reducer.add(name, results[name].uploads, results[name].weight, results[name].metrics, sent=sent)
    context = sites.context(phase, round_, planned.rounds)
    return server_step(method, context, server, reducer.result()), results


def test_a_run_of_both_kinds_learns_and_publishes_what_was_best(store):
    segmentation = {"a": sites.site_data("a", 6, 4, 0), "b": sites.site_data("b", 4, 2, 5)}
    classification = {"a": labelled("a", [0, 1, 2, 0, 1]), "b": labelled("b", [1, 1, 2])}
    for task, data in ((sites.TASK, segmentation), (PICTURES, classification)):
        method = method_of(store, task, learning_rate=0.02, local_epochs=2)
        server, memories = started(method, data)
        losses = []
        for round_ in range(2):
            server, results = step(method, server, data, memories, "train", round_)
            losses.append(sum(result.metrics["loss"] for result in results.values()))
            assert all(result.memory is None for result in results.values())
        assert losses[1] < losses[0]
        server, _ = step(method, server, data, memories, "validate", 0)
        publication = method.publication(server)
        assert publication.kind == "ssf-pool"
        best = max(
            range(3),
            key=lambda index: (
                publication.exhibits.facts["usage"][index]["round"]
                == method.train.slot.read(server).chosen.round
            ),
        )
        assert publication.composite["usage"] == publication.exhibits.facts["usage"][best]["picks"]
        assert sum(publication.composite["usage"]) == 2 * sum(len(site.train) for site in data.values())
        assert [each["round"] for each in publication.details["key_usage"]] == [0, 1, 2]
        sent = publication.details["exchanged"]["pool"]
        (draft,) = publication.models
        assert sent == 4 * sum(t.numel() for name, t in draft.weights.items() if name != "centre")
        assert sent < publication.details["exchanged"]["full_fine_tuning"]


def test_a_pool_of_prompts_learns_and_is_a_control_that_is_not_published(store):
    data = {"a": labelled("a", [0, 1, 2, 0, 1]), "b": labelled("b", [1, 1, 2])}
    method = method_of(store, PICTURES, adapter="prompt", prompts=2, learning_rate=0.02, local_epochs=2)
    server, memories = started(method, data)
    before = pool(method, server)
    assert before["prompts"].shape == (ENTRIES, 2, 2, 16)
    losses = []
    for round_ in range(2):
        server, results = step(method, server, data, memories, "train", round_)
        losses.append(sum(result.metrics["loss"] for result in results.values()))
    assert losses[1] < losses[0]
    assert not torch.equal(pool(method, server)["prompts"], before["prompts"])
    with pytest.raises(ConfigurationError, match="adapter: 'prompt' is a control for benchmarks"):
        FedInsConfig(adapter="prompt").prepared(store, PICTURES, "pool")


@pytest.mark.parametrize("adapter", ["ssf", "prompt"])
def test_the_last_blocks_train_on_stems_that_are_made_once_as_without_them(store, monkeypatch, adapter):
    data = {"a": labelled("a", [0, 1, 2, 0, 1])}
    method = method_of(store, PICTURES, blocks=1, adapter=adapter, prompts=2, local_epochs=2)
    made = []
    stem = InstanceAdaptive.stem
    monkeypatch.setattr(InstanceAdaptive, "stem", lambda self, x: (made.append(len(x)), stem(self, x))[1])
    server, memories = started(method, data)
    assert sum(made) == 5 + 3
    network = method.config.network(method.classes, torch.device("cpu"))
    expected = stem(network, torch.from_numpy(data["a"].train.images))
    torch.testing.assert_close(seen(method, memories["a"])["stems"], expected)
    found = step(method, server, data, memories, "train", 0)[1]["a"]
    assert sum(made) == 5 + 3
    # Where they would be too large, they are made for every batch: 3 images to validate, 5 twice to train.
    monkeypatch.setattr("training.methods.fedins.client.MOST_STEM_BYTES", 1)
    server, memories = started(method, data)
    assert seen(method, memories["a"]).keys() == {"queries"}
    made.clear()
    again = step(method, server, data, memories, "train", 0)[1]["a"]
    assert sum(made) == 3 + 2 * 5
    torch.testing.assert_close(again.uploads["weights"], found.uploads["weights"])
    assert again.metrics == pytest.approx(found.metrics)


@pytest.mark.parametrize(
    ("task", "blocks", "expected"),
    [(PICTURES, 3, "expected 1 to 2, which the backbone has, found 3"), (sites.TASK, 1, "none with a unet")],
)
def test_blocks_that_the_backbone_does_not_have_are_refused(store, task, blocks, expected):
    with pytest.raises(ConfigurationError, match=expected):
        method_of(store, task, blocks=blocks)


def test_bfloat16_is_for_the_products_only_and_not_for_the_choice_of_entries(store):
    data = {"a": sites.site_data("a", 6, 2, 0)}
    found = {}
    for precision in get_args(Precision):
        method = method_of(store, precision=precision)
        server, memories = started(method, data)
        found[precision] = step(method, server, data, memories, "train", 0)[1]["a"]
    single, half = found["float32"], found["bfloat16"]
    assert half.metrics["loss"] == pytest.approx(single.metrics["loss"], rel=0.02)
    assert half.metrics["loss"] != single.metrics["loss"]
    assert {t.dtype for t in half.uploads["weights"].values()} == {torch.float32}
    queries, keys = torch.randn(50, 16), torch.randn(9, 16)
    with mixed_precision("bfloat16", torch.device("cpu")):
        assert (queries @ keys.T).dtype == torch.bfloat16
        lowered = look_up(queries, keys, 3)
    torch.testing.assert_close(vars(lowered), vars(look_up(queries, keys, 3)), rtol=0, atol=0)


def test_images_are_trained_with_their_own_query_and_scored_with_that_of_their_scan(store, monkeypatch):
    data = {"a": sites.site_data("a", 4, 4, 0)}
    method = method_of(store)
    server, memories = started(method, data)
    answer, answered = InstanceAdaptive.answer, []

    def watched(self, images, query=None, penalty=None, stem=None):
        own = self.query(images)
        # The slices of a patient are one scan, which the service routes as a whole.
        scan = own.unflatten(0, (-1, 2)).mean(dim=1, keepdim=True).expand(-1, 2, -1).flatten(0, 1)
        learning = torch.is_grad_enabled()
        torch.testing.assert_close(query, own if learning else scan)
        answered.append(learning)
        return answer(self, images, query, penalty, stem)

    monkeypatch.setattr(InstanceAdaptive, "answer", watched)
    step(method, server, data, memories, "train", 0)
    assert set(answered) == {True, False}


@pytest.mark.parametrize("aggregation", ["sample", "uniform"])
def test_the_server_averages_pools_by_images_or_uniformly(store, aggregation):
    data = {"a": sites.site_data("a", 6, 2, 0), "b": sites.site_data("b", 2, 2, 5)}
    method = method_of(store, aggregation=aggregation)
    server, memories = started(method, data)
    server, results = step(method, server, data, memories, "train", 0)
    weights = (6 / 8, 2 / 8) if aggregation == "sample" else (0.5, 0.5)
    for name, tensor in pool(method, server).items():
        a, b = (results[site].uploads["weights"][name] for site in ("a", "b"))
        torch.testing.assert_close(tensor, weights[0] * a + weights[1] * b)
        assert not torch.equal(a, b)


def test_all_sites_start_from_one_draw_and_queries_are_made_once(store, monkeypatch):
    data = {"a": sites.site_data("a", 6, 2, 0), "b": sites.site_data("b", 2, 2, 5)}
    method = method_of(store, local_epochs=2)
    asked = []
    query = InstanceAdaptive.query
    monkeypatch.setattr(InstanceAdaptive, "query", lambda self, x: (asked.append(len(x)), query(self, x))[1])
    server, memories = started(method, data)
    assert sum(asked) == 6 + 2 + 2 + 2
    train = method.plan()[1]
    assert train.broadcast(server, "a") == train.broadcast(server, "b")
    first = pool(method, method.initial(sites.context("initial", 0, 1)))
    assert all(torch.equal(tensor, pool(method, server)[name]) for name, tensor in first.items())
    for round_ in range(2):
        server, _ = step(method, server, data, memories, "train", round_)
    assert sum(asked) == 12
    # Augmented images are other images: each batch asks again, validation does not.
    augmenting = method_of(store, local_epochs=2, augment=True)
    step(augmenting, server, data, memories, "train", 0)
    assert sum(asked) == 12 + 2 * (6 + 2)


def test_the_centre_is_the_mean_query_of_all_training_images(store):
    data = {"a": sites.site_data("a", 6, 2, 0), "b": sites.site_data("b", 2, 2, 5)}
    method = method_of(store)
    server, memories = started(method, data)
    queries = torch.cat([seen(method, memory)["queries"] for memory in memories.values()])
    torch.testing.assert_close(centre(method, server), queries.mean(0))
    assert centre(method, server).any()
    for task, option, centred in (
        (sites.TASK, "no", False),
        (PICTURES, "auto", False),
        (PICTURES, "yes", True),
    ):
        mine = data if task == sites.TASK else {"a": labelled("a", [0, 1])}
        method = method_of(store, task, centre=option)
        server, _ = started(method, mine)
        assert bool(centre(method, server).any()) == centred


def test_a_site_s_queries_are_features_that_leave_within_its_bounds_and_only_for_a_centre(store):
    queries, patients = torch.randn(5, 3), ("p0", "p0", "p1", "p1", "p2")
    clip = float(queries.double().norm(dim=1).sort().values[2])

    def sent(**bounds):
        return summed_queries(queries, patients, FeatureBounds(**bounds), sites.noise)

    assert sent()["count"] == 5
    assert torch.equal(sent()["sum"], queries.double().sum(0))
    short = sum(query * min(1.0, clip / float(query.norm())) for query in queries.double())
    torch.testing.assert_close(sent(clip=clip)["sum"], short)
    noise = torch.from_numpy(sites.noise("queries").standard_normal(3))
    torch.testing.assert_close(sent(clip=clip, noise=2.0)["sum"] / 5, (short + 2 * clip * noise) / 5)
    assert sent(minimum_images=5, minimum_patients=3)
    assert sent(minimum_images=6) == sent(minimum_patients=4) == {}

    for task, options, kinds in (
        (sites.TASK, {}, {"queries": "features", "statistics": "statistics", "fingerprint": "statistics"}),
        (sites.TASK, {"centre": "no"}, {"statistics": "statistics", "fingerprint": "statistics"}),
        (PICTURES, {}, {"statistics": "statistics", "fingerprint": "statistics"}),
    ):
        plan = method_of(store, task, **options).plan()
        assert {group.name: group.kind for group in plan[0].uploads} == kinds
        down = {group.name: group.kind for phase in plan for group in phase.downloads}
        assert down == {"weights": "weights"} | ({"centre": "features"} if "queries" in kinds else {})


def test_a_site_below_its_minimum_is_left_out_of_the_centre_and_the_run_goes_on(store, tmp_path):
    data = {"a": sites.site_data("a", 6, 2, 0), "b": sites.site_data("b", 2, 2, 5)}
    method = method_of(store)
    for minimum, heard in ((2, "ab"), (3, "a"), (7, "")):
        server, reducer = method.initial(sites.context("initial", 0, 1)), Reducer(method.plan()[0])
        memories = {}
        for name in data:
            context = sites.context("describe", 0, 1, name)
            own = SiteSpec(name, dict, bounds=FeatureBounds(minimum_images=minimum))
            folder = SiteFolder(tmp_path, name)
            out, memories[name] = run_step(method.plan()[0], context, own, {}, Memory(), data[name], folder)
            reducer.add(name, out.uploads, out.weight, out.metrics)
        server = server_step(method, sites.context("describe", 0, 1), server, reducer.result())
        means = [seen(method, memories[name])["queries"] for name in heard]
        expected = torch.cat(means).mean(0) if means else torch.zeros(32)
        torch.testing.assert_close(centre(method, server), expected)
        step(method, server, data, memories, "train", 0)


@pytest.mark.parametrize(
    ("phase", "bad"),
    [
        ("describe", {"queries": {"sum": torch.zeros(1).double(), "count": torch.tensor(1.0)}}),
        ("describe", {"queries": {"sum": torch.zeros(32).double(), "count": torch.tensor(-6.0)}}),
        ("train", {"usage": {"picks": torch.zeros(1, dtype=torch.int64)}}),
        ("train", {"usage": {"picks": torch.full((ENTRIES,), -1)}}),
    ],
)
def test_queries_and_picks_that_no_site_can_have_are_rejected(store, monkeypatch, phase, bad):
    data, method = {"a": sites.site_data("a", 6, 2, 0)}, method_of(store)
    server, memories = started(method, data)
    make = sites.phase_of(method, phase).client_step

    def lying(*arguments):
        found = make(*arguments)
        return replace(found, uploads={**found.uploads, **bad})

    monkeypatch.setattr(make.__self__, make.__name__, lying)
    with pytest.raises(SiteFailed, match=f"group '{next(iter(bad))}'"):
        step(method, server, data, memories, phase, 0)


def test_where_no_site_lets_statistics_out_there_is_no_centre_and_no_usage(store):
    method = method_of(store)
    server = method.initial(sites.context("initial", 0, 1))
    silent = RoundResult({}, {}, {"a": 1.0}, {})
    server = server_step(method, sites.context("describe", 0, 1), server, silent)
    weights = pool(method, server)
    server = server_step(
        method, sites.context("train", 0, 2), server, replace(silent, reduced={"weights": weights})
    )
    server = server_step(method, sites.context("validate", 0, 1), server, silent)
    publication = method.publication(server)
    assert publication.composite["usage"] is None
    assert publication.models[0].metrics == {}
    assert not publication.models[0].weights["centre"].any()


def test_key_usage_is_of_the_pool_that_was_sent_over_all_sites(store):
    data = {"a": sites.site_data("a", 6, 2, 0), "b": sites.site_data("b", 2, 2, 5)}
    method = method_of(store)
    server, memories = started(method, data)
    server, results = step(method, server, data, memories, "train", 0)
    picks = [result.uploads["usage"]["picks"] for result in results.values()]
    (picked,) = usage(method, server)
    assert picked.picks == (picks[0] + picks[1]).tolist()
    assert picked.entropy == pytest.approx(key_entropy(picks[0] + picks[1]))
    assert picked.dead == sum(count == 0 for count in picked.picks)
    assert results["a"].metrics["key_entropy"] == pytest.approx(key_entropy(picks[0]))


def test_the_frequency_penalty_spreads_the_picks_in_training(store, monkeypatch):
    data = {"a": sites.site_data("a", 8, 2, 0)}
    method = method_of(store, frequency_penalty=10.0, centre="no")
    server, memories = started(method, data)
    penalties = []
    pick = InstanceAdaptive.pick

    def watched(self, query, penalty=None):
        penalties.append(penalty)
        return pick(self, query, penalty)

    monkeypatch.setattr(InstanceAdaptive, "pick", watched)
    server, _ = step(method, server, data, memories, "train", 0)
    assert not any(p is not None and p.any() for p in penalties)  # nothing was picked before
    share = torch.tensor(usage(method, server)[0].picks) / 8
    penalties.clear()
    step(method, server, data, memories, "train", 1)
    torch.testing.assert_close(penalties[-1], 10.0 * share)
    assert penalties[0] is None  # scoring knows no penalty


def test_fewer_entries_than_are_picked_are_all_picked(store):
    data = {"a": sites.site_data("a", 3, 2, 0)}
    method = method_of(store, entries=2, top=3)
    server, memories = started(method, data)
    server, _ = step(method, server, data, memories, "train", 0)
    assert usage(method, server)[0].picks == [3, 3]
    assert method.publication(server).composite["top"] == 2


def test_one_image_and_a_missing_class_train_and_no_image_is_a_failure(store):
    method = method_of(store, PICTURES, batch_size=32)
    data = {"one": labelled("one", [1], val=[0]), "two": labelled("two", [0, 0, 2])}
    server, memories = started(method, data)
    server, results = step(method, server, data, memories, "train", 0)
    assert all(np.isfinite(result.metrics["loss"]) for result in results.values())
    received = method.plan()[1].broadcast(server, "none")
    with pytest.raises(SiteFailed, match="at least one image to train on"):
        client_step(method, sites.context("train", 0, 2, "none"), received, Memory(), labelled("none", []))


def test_a_site_that_comes_late_makes_its_queries_then(store):
    data = {"a": sites.site_data("a", 4, 2, 0)}
    method = method_of(store)
    server, _ = started(method, data)
    _, results = step(method, server, data, {"a": Memory()}, "train", 0)
    assert results["a"].memory is not None
    assert seen(method, results["a"].memory)["queries"].shape == (4, 32)


@pytest.mark.parametrize("routing", ["batch", "random"])
def test_controls_route_otherwise(store, routing):
    data = {"a": sites.site_data("a", 4, 2, 0)}
    pools = []
    for chosen in ("instance", routing):
        method = method_of(store, routing=chosen, head="drawn")
        server, memories = started(method, data)
        server, _ = step(method, server, data, memories, "train", 0)
        pools.append(pool(method, server)["scale"])
    assert not torch.equal(*pools)


def test_heads_start_at_the_backbones_where_it_knows_the_task(store):
    method = method_of(store)
    backbone = method.config.frozen.load(torch.device("cpu"))
    head = pool(method, method.initial(sites.context("initial", 0, 1)))["head_weight"]
    assert torch.equal(head[2], backbone.get_submodule("conv").weight.flatten(1))
    other = method_of(store, head="drawn")
    drawn = pool(other, other.initial(sites.context("initial", 0, 1)))["head_weight"]
    assert not torch.equal(drawn[0], drawn[1])


def test_heads_do_not_start_at_those_of_other_classes(store):
    other = Task(name="other", labels={"a": (1,), "b": (2,)}, size=sites.TASK.size)
    assert not method_of(store, other, backbone="discs").starts_at_head
    with pytest.raises(ConfigurationError, match="head: it has 2 classes, the task 3"):
        method_of(store, other, backbone="discs", head="backbone")


def test_without_a_pinned_backbone_there_is_no_method():
    with pytest.raises(ConfigurationError, match="expected NAME@sha256"):
        FedIns(FedInsConfig(backbone="discs"), sites.TASK)
