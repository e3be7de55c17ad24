"""FedBiCross on the server: what begins a cluster's model, and what ends it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from model_store.task import Task
from tests.helpers.training.sites import context, server_stage
from training.algorithm import Memory, State
from training.errors import TrainingError
from training.local.networks import network_of, new_network, state_of
from training.methods.fedbicross.config import FedBiCrossConfig
from training.methods.fedbicross.method import FedBiCross
from training.methods.fedbicross.server import Clusters
from training.methods.one_shot import Uploaded

TASK = Task(name="toy", kind="classification", class_names=("a", "b", "c"), size=(8, 8))
CONFIG = FedBiCrossConfig(
    width=1, probes=4, epochs=1, steps=2, outer_steps=1, synthesis_batch=8, checkpoint_every=2
)
SPEC = CONFIG.network_for(TASK)
# Two opinions, each of two sites with logits a hundred apart: a softmax does not see that.
OPINIONS = {
    "elm": (4.0, 0.0, 0.0),
    "fir": (104.0, 100.0, 100.0),
    "hazel": (0.0, 4.0, 0.0),
    "larch": (100.0, 104.0, 100.0),
}
SIZES = {"elm": 3.0, "fir": 9.0, "hazel": 2.0, "larch": 5.0}


def upload(seed: int, opinion: tuple[float, ...]) -> State:
    """A network that says the same of every image. Nothing of it is as a fresh one has it."""
    draw = torch.Generator().manual_seed(seed)
    state = state_of(new_network(SPEC, draw))
    for tensor in state.values():
        tensor.add_(torch.rand(tensor.shape, generator=draw) if tensor.is_floating_point() else 7)
    state["linear.weight"].zero_()
    state["linear.bias"].copy_(torch.tensor(opinion))
    return state


UPLOADS = {site: upload(seed, opinion) for seed, (site, opinion) in enumerate(OPINIONS.items())}


def method(**options: object) -> FedBiCross:
    return FedBiCross(CONFIG.model_copy(update=options), TASK)


def uploaded(algorithm: FedBiCross) -> Memory:
    return algorithm.upload.slot.write(Memory(), Uploaded(models=UPLOADS, images=SIZES))


def clustered(**options: object) -> Clusters:
    algorithm = method(**options)
    return algorithm.distil.slot.read(server_stage(algorithm, context("cluster", 0, 1), uploaded(algorithm)))


def students(clusters: Clusters) -> list[State]:
    return list(clusters.models.values())


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


@pytest.mark.parametrize(("output", "companion"), [("softmax", "fir"), ("logits", "hazel")])
def test_models_are_compared_by_what_was_asked_for(output: str, companion: str) -> None:
    assignment = clustered(probe_output=output).assignment
    assert {site for site, cluster in assignment.items() if cluster == "1"} == {"elm", companion}


def test_a_structure_too_weak_for_the_configuration_is_none() -> None:
    silhouettes = clustered(probe_output="logits").silhouettes
    best = max(silhouettes.values())
    for least, count in ((best, 2), (best + 1e-6, 1)):
        found = clustered(probe_output="logits", min_silhouette=least)
        assert len(set(found.assignment.values())) == count
        assert found.mixing == ((1 / count,) * count,) * count


def test_a_student_begins_as_its_largest_hospital() -> None:
    first, second = students(clustered(init="largest_client"))
    assert same(first, UPLOADS["fir"])
    assert same(second, UPLOADS["larch"])


def test_a_student_begins_as_the_mean_of_its_hospitals_whatever_their_size() -> None:
    assert CONFIG.init == "cluster_average"
    for student, (one, other) in zip(
        students(clustered()), (("elm", "fir"), ("hazel", "larch")), strict=True
    ):
        for name, tensor in student.items():
            a, b = UPLOADS[one][name], UPLOADS[other][name]
            torch.testing.assert_close(tensor, (a + b) / 2 if tensor.is_floating_point() else a)


def test_a_student_begins_at_random() -> None:
    first, second = students(clustered(init="random"))
    fresh = state_of(new_network(SPEC, torch.Generator()))
    for name, tensor in first.items():
        if name.endswith(("conv1.weight", "linear.weight")):
            assert not torch.equal(tensor, second[name])
            assert float(tensor.abs().max()) <= 3  # an upload's are weights plus up to 1, or all 0
            assert not any(torch.equal(tensor, state[name]) for state in UPLOADS.values())
        elif "running" in name or "batches" in name:
            assert torch.equal(tensor, fresh[name])
    assert same(first, students(clustered(init="random"))[0])


def distilled(clusters: Clusters, **options: object) -> Memory:
    algorithm = method(bilevel=False, **options)
    server = algorithm.distil.slot.write(uploaded(algorithm), clusters)
    return server_stage(algorithm, context("synthesise+bilevel", 0, 1), server)


def test_finished_models_have_the_statistics_of_the_images_they_learned_from() -> None:
    mixing = ((0.75, 0.25), (0.4, 0.6))
    finished = method().distil.slot.read(distilled(replace(clustered(), mixing=mixing)))
    assert finished.mixing == mixing
    images = [finished.exhibits[name] for name in ("1", "2")]
    assert len(images[0]) == CONFIG.synthesis_batch  # all there are
    for name, row in zip(("1", "2"), mixing, strict=True):
        state = finished.models[name]
        network = network_of(SPEC, state, torch.device("cpu"))
        seen = [network.conv1(batch).detach() for batch in images]
        mean = sum(w * found.mean((0, 2, 3)) for w, found in zip(row, seen, strict=True))
        var = sum(w * found.var((0, 2, 3)) for w, found in zip(row, seen, strict=True))
        torch.testing.assert_close(state["bn1.running_mean"], mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(state["bn1.running_var"], var, rtol=1e-5, atol=1e-6)


def test_nothing_of_the_uploads_outlives_the_last_step() -> None:
    server = distilled(clustered())
    finished = method().distil.slot.read(server)
    assert not method().upload.slot.holds(server)
    assert (finished.seeds, finished.trajectory) == ((), {})
    assert len(server.tensors) == 2 + sum(map(len, finished.models.values()))  # two sheets of images


def test_students_that_diverge_end_the_run_and_the_first_is_named() -> None:
    with pytest.raises(TrainingError, match=r"the model of cluster 1 diverged .*lower inner_rate"):
        distilled(clustered(init="random"), inner_rate=1e38)


def test_the_one_student_that_diverges_is_named() -> None:
    clusters = clustered()
    clusters.models["2"]["linear.bias"].copy_(torch.tensor([0.0, float("inf"), 0.0]))
    with pytest.raises(TrainingError, match=r"the model of cluster 2 diverged \('.+' is not finite\)"):
        distilled(clusters)
