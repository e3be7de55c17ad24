"""A whole trajectory: resumed, with one cluster, and in memory independent of its length."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from personalization.fedbicross.synthesis import SynthesisConfig, Trajectory, recalibrate
from personalization.networks import initialise

CONFIG = SynthesisConfig(steps=4, batch_size=10, outer_steps=2, inner_rate=0.05)
SHAPE = (1, 8, 8)


class Tiny(nn.Module):
    """The smallest network with batch norm; the tests do not depend on the architecture."""

    def __init__(self, channels: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 4, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(4)
        self.linear = nn.Linear(4, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.relu(self.bn1(self.conv1(images))).mean(dim=(2, 3)))


def network(seed: int) -> nn.Module:
    draw = torch.Generator().manual_seed(seed)
    made = initialise(Tiny(), draw).train()
    with torch.no_grad():
        for _ in range(10):
            made(2 * torch.randn(16, *SHAPE, generator=draw) + seed)
    return made.eval()


def trajectory(clusters: int = 2, config: SynthesisConfig = CONFIG, seed: int = 3) -> Trajectory:
    members = [[network(10 * k), network(10 * k + 1)][: 1 + k % 2] for k in range(clusters)]
    students = [network(100 + k) for k in range(clusters)]
    mixing = torch.full((clusters, clusters), 1 / clusters, dtype=torch.float64)
    return Trajectory(members, students, mixing, SHAPE, 3, config, seed)


def run(made: Trajectory, *steps: int) -> dict[str, torch.Tensor]:
    """What a trajectory is after some steps: what it has to restore, its students and w."""
    for step in steps:
        made.step(step)
    students = {
        f"student/{index}/{name}": tensor.clone()
        for index, student in enumerate(made.students)
        for name, tensor in student.state_dict().items()
    }
    return {**made.tensors(), **students, "mixing": made.mixing.clone()}


@pytest.mark.parametrize(
    ("count", "share", "learned"),
    [(256, 0.8, 205), (64, 0.8, 51), (10, 0.8, 8), (6, 0.8, 4), (10, 0.99, 8), (10, 0.01, 2)],
)
def test_each_image_is_used_for_training_or_for_validation(count: int, share: float, learned: int) -> None:
    made = trajectory(3, replace(CONFIG, batch_size=count, train_share=share))
    for inner, outer in made._parts:
        assert (len(inner), len(outer)) == (learned, count - learned)
        assert sorted([*inner.tolist(), *outer.tolist()]) == list(range(count))
    # The split is drawn for each cluster, since labels repeat in order.
    orders = {(*inner.tolist(), *outer.tolist()) for inner, outer in made._parts}
    assert len(orders | {tuple(range(count))}) == 4


def test_labels_are_balanced_by_default_or_drawn_uniformly() -> None:
    balanced = trajectory(2)._labels
    assert [labels.tolist() for labels in balanced] == [[0, 1, 2, 0, 1, 2, 0, 1, 2, 0]] * 2
    first, second = trajectory(2, replace(CONFIG, batch_size=300, labels="uniform"))._labels
    for labels in (first, second):
        counts = torch.bincount(labels).tolist()
        assert len(counts) == 3
        assert min(counts) > 70  # 100 each, give or take four standard deviations
        assert counts != [100, 100, 100]
    assert not torch.equal(first, second)


def test_images_start_as_distinct_standard_normal_noise() -> None:
    first, second = trajectory(2, replace(CONFIG, batch_size=256)).images()
    assert not torch.equal(first, second)
    for images in (first, second):
        assert images.shape == (256, *SHAPE)
        assert float(images.mean()) == pytest.approx(0, abs=0.04)
        assert float(images.std()) == pytest.approx(1, abs=0.03)


def test_restored_trajectory_equals_an_uninterrupted_one() -> None:
    whole = run(trajectory(), 1, 2, 3, 4)
    half, other = trajectory(), trajectory()
    run(half, 1, 2)
    other.students, other.mixing = half.students, half.mixing
    other.restore(half.tensors())
    found = run(other, 3, 4)
    assert found.keys() == whole.keys()
    assert [name for name, tensor in whole.items() if not torch.equal(tensor, found[name])] == []


def test_bfloat16_keeps_the_dtype_of_every_stored_tensor() -> None:
    single = run(trajectory(), 1, 2)
    half = run(trajectory(config=replace(CONFIG, precision="bfloat16")), 1, 2)
    assert {name: tensor.dtype for name, tensor in half.items()} == {n: t.dtype for n, t in single.items()}
    student = [name for name in single if name.endswith("conv1.weight") and name.startswith("student")]
    for name in student:
        torch.testing.assert_close(half[name], single[name], rtol=0, atol=0.01)
        assert not torch.equal(half[name], single[name])


def test_trajectory_depends_only_on_its_seed() -> None:
    torch.manual_seed(0)
    first = run(trajectory(), 1)
    torch.manual_seed(1)
    assert all(torch.equal(t, first[name]) for name, t in run(trajectory(), 1).items())
    assert not torch.equal(run(trajectory(seed=4), 1)["image/0"], first["image/0"])


def test_w_changes_only_at_outer_steps_and_stays_a_distribution() -> None:
    made = trajectory(3)
    moved = set()
    for step in range(1, 5):
        before = made.mixing.clone()
        notes = made.step(step)
        if not torch.equal(before, made.mixing):
            moved.add(step)
        assert ("validation" in notes) == (step in made.outer)
        assert float(made.mixing.min()) >= 0
        assert made.mixing.sum(1).tolist() == pytest.approx([1, 1, 1])
    assert moved == made.outer


def test_without_bilevel_w_stays_fixed_and_students_learn() -> None:
    made = trajectory(2, replace(CONFIG, bilevel=False))
    before = [student.linear.weight.clone() for student in made.students]
    run(made, 1, 2, 3, 4)
    assert torch.equal(made.mixing, torch.full((2, 2), 0.5, dtype=torch.float64))
    assert not any(torch.equal(a, s.linear.weight) for a, s in zip(before, made.students, strict=True))


def test_every_step_false_trains_students_only_at_outer_steps() -> None:
    made = trajectory(2, replace(CONFIG, every_step=False))
    for step in range(1, 5):
        before = made.students[0].linear.weight.clone()
        notes = made.step(step)
        assert torch.equal(before, made.students[0].linear.weight) == (step not in made.outer)
        assert ("distillation" in notes) == (step in made.outer)


def test_one_cluster_keeps_w_at_1_and_its_student_learns() -> None:
    made = trajectory(1)
    before = made.students[0].linear.weight.clone()
    run(made, 1, 2, 3, 4)
    assert made.mixing.tolist() == [[1.0]]
    assert not torch.equal(before, made.students[0].linear.weight)


def test_student_update_does_not_depend_on_the_order_of_clusters() -> None:
    """Student 1 of a pair learns the same whether student 0 was updated before it or not."""
    made, still = trajectory(), trajectory()
    made.step(1)
    for parameter in still.students[0].parameters():
        parameter.register_hook(torch.zeros_like)
    still.step(1)
    assert not torch.equal(made.students[0].linear.weight, still.students[0].linear.weight)
    assert torch.equal(made.students[1].linear.weight, still.students[1].linear.weight)
    assert torch.equal(made.mixing[1], still.mixing[1])


def test_source_with_zero_weight_does_not_change_the_student() -> None:
    config = replace(CONFIG, bilevel=False)
    made, alone = trajectory(2, config), trajectory(2, config)
    made.mixing = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    alone.mixing = made.mixing.clone()
    for parameter in alone._teachers[1].members[0].parameters():
        parameter.data.mul_(1.5)
    made.step(1)
    alone.step(1)
    assert torch.equal(made.students[0].conv1.weight, alone.students[0].conv1.weight)
    assert not torch.equal(made.students[1].conv1.weight, alone.students[1].conv1.weight)


def test_recalibrate_mixes_the_statistics_of_the_sources() -> None:
    model = network(0)
    sources = [torch.randn(8, *SHAPE, generator=torch.Generator().manual_seed(k)) + k for k in range(2)]
    first = [model.conv1(source) for source in sources]
    expected_mean = 0.25 * first[0].mean((0, 2, 3)) + 0.75 * first[1].mean((0, 2, 3))
    expected_var = 0.25 * first[0].var((0, 2, 3)) + 0.75 * first[1].var((0, 2, 3))
    recalibrate(model, sources, torch.tensor([0.25, 0.75], dtype=torch.float64))
    torch.testing.assert_close(model.bn1.running_mean, expected_mean)
    torch.testing.assert_close(model.bn1.running_var, expected_var)
    assert model.bn1.momentum == 0.1
    assert not model.training


MEASURE = """
import resource, sys, torch
sys.path.insert(0, sys.argv[1])
from test_synthesis import SynthesisConfig, Tiny, Trajectory
steps = int(sys.argv[2])
config = SynthesisConfig(steps=steps, batch_size=96, outer_steps=2)
mixing = torch.full((2, 2), 0.5, dtype=torch.float64)
members, students = [[Tiny(3).eval()], [Tiny(3).eval()]], [Tiny(3), Tiny(3)]
made = Trajectory(members, students, mixing, (3, 48, 48), 3, config, 0)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
for step in range(1, 5):
    made.step(step)
warm = peak()
for step in range(5, steps + 1):
    made.step(step)
print(peak() - warm)
"""


@pytest.mark.process
def test_trajectory_memory_does_not_grow_with_its_length() -> None:
    steps = 24
    command = [sys.executable, "-c", MEASURE, str(Path(__file__).parent), str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    kept = (steps - 4) * 2 * 96 * 3 * 48 * 48 * 4 / 2**20  # MiB, if the images of every step were kept
    assert kept > 100
    assert float(done.stdout) < kept / 4
