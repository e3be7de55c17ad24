"""A volume through the service's pipeline: equal to MONAI's, whatever the file's orientation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from monai.inferers.inferer import SlidingWindowInferer
from monai.networks.nets.basic_unet import BasicUNet
from numpy.typing import NDArray

from model_store.errors import ArtefactDamaged, ScanMismatch, ScanTooLarge
from model_store.scan import Limits
from model_store.task import Task
from personalization.export import to_onnx
from service.inference.pipeline import Segmentation, Stopwatch, check_answerable, read, segment
from service.inference.sessions import GraphSession
from service.inference.volumes import Between, Deadline, TakesLonger

PATCH = (16, 24, 16)


@dataclass(frozen=True)
class Manifest:
    """What the pipeline reads of one."""

    task: Task
    statistics: Any = None
    sources: Any = None


def task(geometry: dict[str, Any] | None = None, **fields: Any) -> Task:
    content = {"name": "v", "labels": {"a": [1], "b": [2]}, **fields}
    return Task.model_validate(
        {**content, "geometry": {"spacing": [1.5, 1.5, 1.5], "patch": PATCH, **(geometry or {})}}
    )


def network() -> torch.nn.Module:
    """Random weights, with outputs that differ enough for every class to be there."""
    torch.manual_seed(0)
    net = BasicUNet(
        spatial_dims=3, in_channels=1, out_channels=3, features=(4, 4, 8, 8, 8, 4), norm="batch"
    ).eval()
    with torch.no_grad():
        net.final_conv.weight *= 30
        net.final_conv.bias -= net(torch.randn(4, 1, *PATCH)).mean(dim=(0, 2, 3, 4))
    return net


@pytest.fixture(scope="module")
def session() -> GraphSession:
    return GraphSession("sha256:test", to_onnx(network(), 1, PATCH), threads=1, device="cpu")


def nifti(shape: tuple[int, int, int] = (29, 33, 21), orientation: Any = None) -> bytes:
    voxels = (np.random.default_rng(1).random(shape) * 500).astype(np.int16)
    affine = np.diag([1.1, 0.9, 2.0, 1.0])
    if orientation is not None:
        turned = nib.orientations.apply_orientation(voxels, orientation)
        affine = affine @ nib.orientations.inv_ornt_aff(orientation, voxels.shape)
        voxels = turned
    return bytes(nib.Nifti1Image(voxels, affine).to_bytes())


def answer(data: bytes, own: Task, graph: GraphSession, **options: Any) -> Segmentation:
    manifest: Any = Manifest(own)
    reading = read(data, manifest, Limits(), Stopwatch())
    return segment(reading, manifest, graph, Stopwatch(), **options)


def by_monai(volume: NDArray[np.float32], mode: str, overlap: float, *, logits: bool) -> NDArray[np.float32]:
    net = network()
    inferer = SlidingWindowInferer(PATCH, overlap=overlap, mode=mode)
    with torch.no_grad():
        found = inferer(
            torch.from_numpy(volume)[None], net if logits else lambda x: torch.softmax(net(x), dim=1)
        )
    assert isinstance(found, torch.Tensor)
    return np.asarray(found[0].numpy())


@pytest.mark.parametrize(
    ("mode", "overlap", "average"),
    [("gaussian", 0.5, "probabilities"), ("constant", 0.25, "probabilities"), ("gaussian", 0.25, "logits")],
)
def test_the_service_gives_what_monais_inferer_gives(
    session: GraphSession, mode: str, overlap: float, average: str
) -> None:
    own = task({"spacing": None, "window": mode, "overlap": overlap, "average": average, "restore": average})
    manifest: Any = Manifest(own)
    reading = read(nifti(), manifest, Limits(), Stopwatch())
    found = segment(reading, manifest, session, Stopwatch(), with_map=True)
    prepared: Any = reading.prepared
    expected = by_monai(prepared.volume, mode, overlap, logits=average == "logits")
    if average == "logits":
        expected = np.exp(expected) / np.exp(expected).sum(axis=0)
    assert len(np.unique(found.classes)) == 3
    # The file is in RAS, so the network's axes are the file's.
    np.testing.assert_array_equal(found.classes, expected.argmax(axis=0))
    entropy = -(expected * np.log(expected)).sum(axis=0) / np.log(3)
    assert found.uncertainty_map is not None
    assert np.abs(found.uncertainty_map - 100 * entropy).max() <= 0.5 + 1e-3
    for label, value in found.confidence.items():
        classes = list(own.label_classes(label))
        p, y = expected[classes].sum(axis=0), np.isin(found.classes, classes)
        assert value == pytest.approx(2 * (p * y).sum() / (p + y).sum(), abs=1e-5)


def test_logits_are_averaged_without_a_softmax_of_each_patch(session: GraphSession) -> None:
    own = task({"spacing": None, "average": "logits"})
    graph = GraphSession("sha256:logits", to_onnx(network(), 1, PATCH, logits=True), threads=1, device="cpu")
    patch = np.random.default_rng(0).normal(size=(2, 1, *PATCH)).astype(np.float32)
    outputs, plain = graph.run_alone(patch), session.run_alone(patch)
    assert outputs.softmaxed is None
    np.testing.assert_allclose(outputs.probabilities, plain.probabilities, atol=1e-6)
    found, expected = answer(nifti(), own, graph), answer(nifti(), own, session)
    np.testing.assert_array_equal(found.classes, expected.classes)
    assert found.confidence == pytest.approx(expected.confidence, abs=1e-5)
    # A task that averages probabilities gets them of the same graph.
    of_probabilities = task({"spacing": None})
    np.testing.assert_array_equal(
        answer(nifti(), of_probabilities, graph).classes, answer(nifti(), of_probabilities, session).classes
    )


def test_every_orientation_of_a_file_has_the_same_mask(session: GraphSession) -> None:
    own, identity = task(), [[0, 1], [1, 1], [2, 1]]
    expected = answer(nifti(orientation=np.array(identity)), own, session).classes
    assert len(np.unique(expected)) == 3
    for orientation in ([[2, -1], [0, 1], [1, -1]], [[1, 1], [2, 1], [0, -1]], [[0, -1], [2, -1], [1, 1]]):
        found = answer(nifti(orientation=np.array(orientation)), own, session).classes
        turned = nib.orientations.apply_orientation(expected, np.array(orientation))
        assert (found != turned).mean() < 1e-3


def test_a_mirrored_answer_is_the_mean_over_its_turns(session: GraphSession) -> None:
    own = task({"spacing": None, "mirror": [0, 2], "average": "logits"})
    manifest: Any = Manifest(own)
    reading = read(nifti(PATCH), manifest, Limits(), Stopwatch())
    seen = []

    class Noted(Between):
        def before_run(self, done: int, total: int, seconds: float | None) -> None:
            seen.append((done, total))

    found = segment(reading, manifest, session, Stopwatch(), between=Noted())
    assert seen == [(0, 4), (1, 4), (2, 4), (3, 4)]
    prepared: Any = reading.prepared
    volume, net = torch.from_numpy(prepared.volume)[None], network()
    with torch.no_grad():
        turns = [torch.log_softmax(net(volume.flip(axes)), 1).flip(axes) for axes in ([], [2], [4], [2, 4])]
    expected = torch.stack(turns).mean(dim=0)[0].argmax(dim=0).numpy()
    np.testing.assert_array_equal(found.classes, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_regions_are_decided_one_by_one() -> None:
    labels = {"whole": [1, 2], "core": [2]}

    class Sigmoids(torch.nn.Module):
        """Two regions of the intensity, as an exported graph would have them."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(torch.cat([x * 4, (x - 1) * 4], dim=1))

    import io

    buffer = io.BytesIO()
    torch.onnx.export(
        Sigmoids(),
        (torch.zeros(1, 1, *PATCH),),
        buffer,  # type: ignore[arg-type]
        dynamo=False,
        input_names=["image"],
        output_names=["probabilities"],
        dynamic_axes={"image": {0: "B"}, "probabilities": {0: "B"}},
    )
    graph = GraphSession("sha256:regions", buffer.getvalue(), threads=1, device="cpu")
    own = task({"spacing": None}, labels=labels, regions=["whole", "core"])
    manifest: Any = Manifest(own)
    reading = read(nifti(), manifest, Limits(), Stopwatch())
    found = segment(reading, manifest, graph, Stopwatch(), with_map=True)
    prepared: Any = reading.prepared
    values = prepared.volume[0]
    np.testing.assert_array_equal(found.classes, np.where(values > 1, 2, np.where(values > 0, 1, 0)))
    assert all(0 < value < 1 for value in found.confidence.values())


def test_what_ends_between_patches_ends_the_run(session: GraphSession) -> None:
    class Left(Exception): ...

    runs = []

    class Leaving(Between):
        def before_run(self, done: int, total: int, seconds: float | None) -> None:
            runs.append(done)
            if done == 3:
                raise Left

    with pytest.raises(Left):
        answer(nifti(), task(), session, between=Leaving())
    assert runs == [0, 1, 2, 3]


@pytest.mark.parametrize("resampling", ["linear", "nnunet"])
def test_preparing_and_restoring_are_looked_at_between_planes(session: GraphSession, resampling: str) -> None:
    class Left(Exception): ...

    class Looked(Between):
        def __init__(self, most: float) -> None:
            self.looks, self.most = 0, most

        def look(self) -> None:
            self.looks += 1
            if self.looks > self.most:
                raise Left

    own = task({"spacing": [2, 2, 1], "resampling": resampling})
    manifest: Any = Manifest(own)
    whole = Looked(math.inf)
    reading = read(nifti((24, 24, 48)), manifest, Limits(), Stopwatch(), whole.look)
    prepared = whole.looks
    assert prepared > 10
    segment(reading, manifest, session, Stopwatch(), between=whole)
    # Each plane that is restored is looked at, and each run.
    assert whole.looks > prepared + 20
    with pytest.raises(Left):
        read(nifti((24, 24, 48)), manifest, Limits(), Stopwatch(), Looked(5).look)
    with pytest.raises(Left):
        segment(reading, manifest, session, Stopwatch(), between=Looked(whole.looks - prepared - 3))


def test_a_volume_is_priced_before_it_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("was prepared")

    monkeypatch.setattr("service.inference.pipeline.prepare_for", never)
    manifest: Any = Manifest(task({"spacing": [1, 1, 1], "patch": [32, 32, 32], "resampling": "nnunet"}))
    # Voxels of 79 mm: 632 x 632 x 632 for the network.
    large = nib.Nifti1Image(np.zeros((8, 8, 8), np.uint8), np.diag([79.0, 79, 79, 1]))
    with pytest.raises(ScanTooLarge, match=r"volume of 512 voxels would have 632 x 632 x 632, 493039 times"):
        read(large.to_bytes(), manifest, Limits(), Stopwatch())
    many = nib.Nifti1Image(np.zeros((64, 64, 64), np.uint8), np.diag([2.0, 2, 2, 1]))
    with pytest.raises(ScanTooLarge, match=r"would take 343 windows of task .* at most 100 are allowed"):
        read(many.to_bytes(), manifest, Limits(max_windows=100), Stopwatch())


def test_a_graph_of_another_shape_or_nan_is_damaged(session: GraphSession) -> None:
    with pytest.raises(ArtefactDamaged, match=r"expected probabilities \[4, 16, 24, 16\].*found \[3"):
        answer(nifti(), task(labels={"a": [1], "b": [2], "c": [3]}), session)


def test_a_volume_beyond_the_memory_is_refused_before_the_network_runs() -> None:
    own = task({"spacing": None, "patch": [128, 128, 128]}, labels={str(n): [n] for n in range(1, 200)})
    manifest: Any = Manifest(own)
    reading = read(nifti((9, 160, 160)), manifest, Limits(), Stopwatch())
    with pytest.raises(ScanTooLarge, match=r"200 outputs per voxel .* GiB for the average over windows"):
        check_answerable(reading, own)


def test_an_image_is_refused_by_a_task_of_volumes(session: GraphSession) -> None:
    from model_store.scan import encode_png

    with pytest.raises(ScanMismatch, match="segments volumes, and the scan is an image"):
        answer(encode_png(np.zeros((32, 32), np.uint8)), task(), session)


class TestHowLong:
    """A run that takes a second for each patch, and two more for the first."""

    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        now = [0.0]
        monkeypatch.setattr("service.inference.volumes.time.monotonic", lambda: now[0])
        return now

    def run(self, clock: list[float], graph: Any, most: float = 1e9) -> list[tuple[int, float | None]]:
        """The seconds that were expected when so many patches were done."""
        expected = []

        class Clocked(Deadline):
            def before_run(self, done: int, total: int, seconds: float | None) -> None:
                clock[0] += 2 if done == 0 else 1
                expected.append((done, seconds))
                super().before_run(done, total, seconds)

        prepared: Any = read(nifti((48, 48, 48)), Manifest(task({"spacing": None})), Limits(), Stopwatch())  # type: ignore[arg-type]
        manifest: Any = Manifest(task({"spacing": None}))
        segment(prepared, manifest, graph, Stopwatch(), between=Clocked(most))
        return expected

    def test_patches_tell_how_long_all_take_and_the_next_volume_knows_before_its_first(
        self, clock: list[float], session: GraphSession
    ) -> None:
        session.seconds_each = None
        first = self.run(clock, session)
        assert [seconds for _, seconds in first[:4]] == [None] * 4
        # 5 x 3 x 5 windows of a second each.
        assert [seconds for _, seconds in first[4:]] == [75.0] * 71
        with pytest.raises(TakesLonger, match="75 runs, of which 0 are done, would take 75 s"):
            self.run(clock, session, most=70)
        assert self.run(clock, session, most=80)[0] == (0, 75.0)

    def test_an_unknown_volume_ends_after_the_patches_that_tell(
        self, clock: list[float], session: GraphSession
    ) -> None:
        session.seconds_each = None
        with pytest.raises(TakesLonger, match="75 runs, of which 4 are done, would take 75 s"):
            self.run(clock, session, most=70)

    def test_the_seconds_in_which_others_were_let_by_do_not_count(
        self, clock: list[float], session: GraphSession
    ) -> None:
        session.seconds_each = None
        expected = []

        class Resting(Between):
            def before_run(self, done: int, total: int, seconds: float | None) -> None:
                clock[0] += 1 + 50
                self.rested += 50
                expected.append(seconds)

        manifest: Any = Manifest(task({"spacing": None}))
        reading = read(nifti((48, 48, 48)), manifest, Limits(), Stopwatch())
        segment(reading, manifest, session, Stopwatch(), between=Resting())
        assert expected[4:] == [pytest.approx(75.0)] * 71
