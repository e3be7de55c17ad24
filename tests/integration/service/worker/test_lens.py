"""Jobs of preset `auto` by a lens: graphs alone, on slices and on volumes, and networks with batch norm.

The graphs mark what is brighter than the mean. A hospital with inverted scans gets a lens that negates
them, one like the members is left alone, and noise gets nothing.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from scipy import ndimage

from model_store.artefact import Artefact
from model_store.lens import (
    FINGERPRINT,
    KINDS,
    LENS,
    Fingerprint,
    Kind,
    LensForScan,
    Scale,
    Seen,
    fit,
    lens_of,
    seen_of,
)
from model_store.manifest import GRAPH, SHIFT_GRAPH, WEIGHTS, Lineage, ModelManifest, NetworkSpec
from model_store.preprocessing import Prepared, PreparedVolume, prepare, prepare_for, restore
from model_store.scan import decode
from model_store.store import Store
from model_store.task import Task
from personalization.iop_fl.batch_norm import profile
from personalization.iop_fl.spread import FILE as SPREAD
from personalization.iop_fl.spread import Spread, sent_by
from personalization.test_time.presets.ladder import shift_graph
from service.catalog.ways import ways_of
from service.files.folder import FilesFolder
from service.inference.pipeline import Stopwatch, read, segment
from service.inference.sessions import GraphSession
from service.jobs.sections import Lines, Section
from service.kinds import adaptation_of
from service.settings import scan_limits
from service.worker import lens as worker
from service.worker.runner import run_job
from tests.helpers.service.routing_federation import ORGAN, outside_scans, volume
from tests.helpers.service.workplace import Workplace, opened
from tests.integration.service.routes.test_segment_volume import PATCH, graph
from training.phantom.federation import nifti_bytes

SIDES = (24, 24, 8)
LABELS: dict[str, Any] = {"name": "organ", "labels": {"organ": [1]}}
SLICES = Task.model_validate({**LABELS, "normalisation": {"method": "zscore"}, "size": [32, 32]})
VOLUMES = Task.model_validate(
    {
        **LABELS,
        "normalisation": {"scope": "volume", "method": "zscore"},
        "geometry": {"spacing": None, "patch": PATCH},
    }
)
# Deviations above the mean: what is brighter is the organ.
AT = 0.75


def phantom(seed: int) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """A scan with a bright organ off its centre, and where that is."""
    rng = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(*(np.linspace(-1, 1, side) for side in SIDES), indexing="ij"))
    centre = rng.normal([0.3, -0.2, 0.0], 0.05).reshape(3, 1, 1, 1)
    organ = np.square((grid - centre) / [[[[0.5]]], [[[0.45]]], [[[2.0]]]]).sum(axis=0) < 1
    texture = ndimage.gaussian_filter(rng.normal(size=SIDES), 1.5)
    return (100 + 60 * organ + 40 * texture).astype(np.float32), organ


def nifti(voxels: NDArray[np.float32]) -> bytes:
    image = nib.Nifti1Image(voxels, np.diag([-1.0, -1.0, 2.0, 1.0]))
    image.header.set_xyzt_units("mm")
    return gzip.compress(image.to_bytes(), 1)


def fingerprint(task: Task) -> Fingerprint:
    """That of three members with scanners of their own."""
    return Fingerprint.of(shown_by(task))


def shown_by(task: Task) -> list[dict[Kind, Seen]]:
    """What each of them sees of its scans."""
    members = []
    for member, gain in enumerate((1.0, 1.2, 0.9)):
        seen = []
        for patient in range(5):
            voxels = phantom(100 * member + patient)[0]
            prepared = prepare_for(task, decode(nifti(np.abs(voxels) ** gain)))
            seen.append((patient, images_of(prepared)))
        members.append(seen_of(seen))
    return members


def images_of(prepared: Prepared | PreparedVolume) -> NDArray[np.float32]:
    return prepared.volume[np.newaxis] if isinstance(prepared, PreparedVolume) else prepared.slices


@pytest.fixture(scope="module")
def place(
    tmp_path_factory: pytest.TempPathFactory, threshold_graph: Callable[..., bytes]
) -> Iterator[Workplace]:
    root = tmp_path_factory.mktemp("store")
    for name, task, content in (
        ("slices", SLICES, threshold_graph(AT, slope=4.0)),
        ("volumes", VOLUMES, graph(1, AT)),
    ):
        manifest = ModelManifest(
            name=name,
            task=task,
            network=NetworkSpec(name="graph", arguments={}),
            lineage=Lineage(method="imported", run="test", sites=(), rounds=0, seed=0),
        )
        files = {WEIGHTS: b"", GRAPH: content}
        Store(root).publish(manifest, {**files, FINGERPRINT: fingerprint(task).to_bytes()})
        Store(root).publish(manifest.model_copy(update={"name": f"{name}-unknown"}), files)
        group = Fingerprint.of_one(shown_by(task)[0])
        alone = manifest.model_copy(update={"name": f"{name}-alone"})
        Store(root).publish(alone, {**files, FINGERPRINT: group.to_bytes()})
    with opened(tmp_path_factory.mktemp("lens"), root) as found:
        yield found


def adapted(place: Workplace, model: str, scans: list[NDArray[np.float32]]) -> tuple[Any, Artefact | None]:
    """The job on these scans, and its candidate."""
    parent = place.store.open(model)
    cohort = place.cohort({f"p{number}.nii.gz": nifti(scan) for number, scan in enumerate(scans)})
    options = {"preset": "auto", "unlike": "include"}
    job = place.adaptation(cohort, model=model, parent=parent.digest, options=options)
    run_job(job, place.settings)
    found = place.job(job)
    digest = found.candidate_digest
    return found, None if digest is None else place.store.by_digest(digest)


@pytest.mark.parametrize("model", ["slices", "volumes"])
def test_job_reads_each_scan_once(place: Workplace, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str] = []
    stored = FilesFolder.read
    monkeypatch.setattr(FilesFolder, "read", lambda self, key: keys.append(key) or stored(self, key))
    job, _ = adapted(place, model, [-phantom(number)[0] for number in range(3)])
    assert job.state == "succeeded"
    scans = [key for key in keys if key.startswith("cohorts/")]
    assert (len(scans), len(set(scans))) == (3, 3)


def _lens_sections(place: Workplace, job: Any) -> tuple[Section, ...]:
    adaptation = adaptation_of(place.store.by_digest(job.parent), {})
    assert adaptation is not None
    return adaptation.sections(job.result, ())


def dice(place: Workplace, version: Any, scan: NDArray[np.float32], truth: NDArray[np.bool_]) -> float:
    return dice_of(place, version, nifti(scan), truth)


def dice_of(place: Workplace, version: Any, scan: bytes, truth: NDArray[np.bool_]) -> float:
    """Dice of the answer that the service gives."""
    manifest, limits = version.manifest, scan_limits(place.settings, version.manifest.task)
    content = version.read(GRAPH)
    session = GraphSession(manifest.files[GRAPH].sha256, content, threads=1, device="cpu")
    reading = read(scan, manifest, limits, Stopwatch(), lens=lens_of(version))
    mask = segment(reading, manifest, session, Stopwatch()).classes > 0
    return float(2 * (mask & truth).sum() / (mask.sum() + truth.sum()))


@pytest.mark.parametrize("model", ["slices", "volumes"])
def test_inverted_scans_get_a_lens_that_negates_them(place: Workplace, model: str) -> None:
    scans = [phantom(900 + number) for number in range(6)]
    job, candidate = adapted(place, model, [260 - scan for scan, _ in scans])
    assert job.state == "succeeded", job.reason
    assert job.gate["passed"], job.gate
    assert candidate is not None
    parent = place.store.open(model)
    # The network is the parent's, byte for byte.
    assert candidate.manifest.files[GRAPH] == parent.manifest.files[GRAPH]
    lens = lens_of(candidate)
    assert lens is not None
    assert lens.negated
    assert job.result["lens"]["negated"]
    assert job.gate["summary"][0] == "These scans look inverted: the lens negates those that do."
    pictures = place.folder(job.id).pictures()
    assert [[*of_scan] for of_scan in pictures.values()] == [["after", "before", "lens"]] * 4
    sections = {section.title: section.body for section in _lens_sections(place, job)}
    contrast = sections["Contrast of these scans, before and through the lens"]
    assert isinstance(contrast, Lines)
    members, before, after = (np.array(line.values) for line in contrast.lines)
    assert np.abs(after - members).mean() < np.abs(before - members).mean() / 3
    assert isinstance(sections["Sharpness and noise of these scans, before and through the lens"], Lines)
    assert "curves" not in candidate.manifest.lineage.details
    scan, truth = phantom(990)
    as_it_is, before, after = (
        dice(place, version, values, truth)
        for version, values in ((parent, scan), (parent, 260 - scan), (candidate, 260 - scan))
    )
    assert before < 0.1
    assert after > as_it_is - 0.03
    assert as_it_is > 0.8
    # A scan that is not inverted is not negated.
    assert dice(place, candidate, scan, truth) > as_it_is - 0.03


@pytest.mark.parametrize("model", ["slices", "volumes"])
def test_scans_like_the_members_keep_the_global_model(place: Workplace, model: str) -> None:
    job, candidate = adapted(place, model, [phantom(800 + number)[0] for number in range(8)])
    assert job.state == "succeeded", job.reason
    assert job.gate["passed"]
    assert job.result["lens"]["made"] == "nothing"
    assert candidate is not None
    assert LENS not in candidate.manifest.files
    assert "look like the member hospitals'" in job.gate["summary"][0]


@pytest.mark.parametrize("model", ["slices", "volumes"])
def test_of_one_group_alone_inverted_scans_are_put_right_and_it_is_said(place: Workplace, model: str) -> None:
    scans = [phantom(900 + number) for number in range(6)]
    job, candidate = adapted(place, f"{model}-alone", [260 - scan for scan, _ in scans])
    assert job.gate["passed"], job.gate
    assert "where 1 counts as usual, of one group alone" in job.gate["summary"][1]
    scan, truth = phantom(990)
    assert dice(place, candidate, 260 - scan, truth) > 0.75


def test_smaller_structures_are_said_to_the_hospital(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def twice_smaller(cohort: Callable[[], Any], known: Fingerprint, larger: object) -> Scale:
        fitted = fit(cohort, known, ("polarity",))
        assert fitted is not None
        assert fitted.polarity is not None
        seen.append(fitted.polarity.correlation)
        assert larger is None
        return Scale(2.0, dict.fromkeys(KINDS, 20.0), dict.fromkeys(KINDS, 1.5))

    monkeypatch.setattr(worker, "scale_of", twice_smaller)
    job, _ = adapted(place, "slices", [260 - phantom(800 + number)[0] for number in range(3)])
    assert job.result["lens"]["scale"] == 2
    assert "Structures look about 2 times smaller in these scans" in job.gate["summary"][0]
    # It is asked of inverted scans as they are upright.
    assert seen[0] > 0.5


@pytest.mark.parametrize("model", ["slices", "volumes"])
def test_noise_is_refused(place: Workplace, model: str) -> None:
    draw = np.random.default_rng(3)
    noise = [ndimage.gaussian_filter(draw.normal(100, 40, SIDES), 2).astype(np.float32) for _ in range(6)]
    job, _ = adapted(place, model, noise)
    failed = {check["name"] for check in job.gate["checks"] if not check["passed"]}
    assert failed & {"lens_grid", "lens_sides"}
    assert not job.gate["passed"]


def test_models_say_that_they_adapt_without_masks_where_their_scans_are_known(place: Workplace) -> None:
    for name in ("slices", "volumes"):
        known, unknown = (ways_of(place.store, place.store.open(each)) for each in (name, f"{name}-unknown"))
        assert (known.adaptable, known.presets, known.masks) == (True, ("auto",), "none")
        assert known.summary == "adapts to a hospital without masks"
        assert not unknown.adaptable


def test_nothing_is_fitted_to_scans_of_one_intensity(place: Workplace) -> None:
    job, _ = adapted(place, "slices", [np.full(SIDES, 7, np.float32)] * 3)
    assert job.state == "failed"
    assert "the same intensity everywhere" in job.reason


@pytest.fixture(scope="module")
def organ(tmp_path_factory: pytest.TempPathFactory, routing_store: Path) -> Iterator[Workplace]:
    """A routing space of U-Nets with batch norm, which says what its members' scans look like."""
    with opened(tmp_path_factory.mktemp("organ"), routing_store) as found:
        loaded, shown, sent = found.loaded(), [], []
        network = loaded.space.plain()
        for scanner in ("aster", "birch"):
            scans = [prepare(volume(scanner, patient)[0], ORGAN).slices for patient in range(700, 705)]
            shown.append(seen_of(enumerate(scans)))
            patients = [index for index, slices in enumerate(scans) for _ in slices]
            measured = profile(network, torch.tensor(np.concatenate(scans)), patients)
            sent.append(sent_by(measured, (0.05, 0.2, 1.0)))
        mean = {name: (sent[0][name] + sent[1][name]) / 2 for name in sent[0]}
        spread = Spread.of(measured.layers, mean, 2)
        graph = shift_graph(network, spread, ORGAN.in_channels, ORGAN.size)
        known = {SPREAD: spread.to_bytes(), FINGERPRINT: Fingerprint.of(shown).to_bytes()}
        files = {**known, SHIFT_GRAPH: graph}
        found.store.publish(loaded.offered.manifest, files)
        yield found


def test_one_scan_is_seen_through_its_lens_by_a_network_with_its_dose(organ: Workplace) -> None:
    offered = organ.loaded().offered
    (data,) = outside_scans(1, "aster").values()
    masks = []
    for scan in (data, inverted(data)):
        job = organ.scan_job(scan)
        run_job(job, organ.settings)
        answer = organ.folder(job).read_result()
        assert answer is not None, organ.job(job).reason
        masks.append(np.asarray(nib.Nifti1Image.from_bytes(gzip.decompress(answer.body)).dataobj) > 0)
    # The graph that answers at once sees the same, and says the same.
    prepared = prepare(decode(inverted(data)), ORGAN)
    found = LensForScan(Fingerprint.model_validate_json(offered.read(FINGERPRINT))).of(prepared)
    assert found.lens is not None
    assert found.lens.negated
    session = onnxruntime.InferenceSession(offered.read(SHIFT_GRAPH), providers=["CPUExecutionProvider"])
    (outputs,) = session.run(None, {"image": found.lens.apply(prepared.slices)})
    at_once = restore(outputs, prepared.geometry) > 0
    assert np.mean(at_once != masks[1]) < 1e-3
    usual, negative = masks
    assert 2 * (usual & negative).sum() / (usual.sum() + negative.sum()) > 0.9


def inverted(content: bytes) -> bytes:
    """The same scan in negative."""
    image: Any = nib.Nifti1Image.from_bytes(gzip.decompress(content))
    voxels = np.asarray(image.dataobj, np.float32)
    return gzip.compress(nib.Nifti1Image(voxels.max() - voxels, image.affine, image.header).to_bytes(), 1)


def test_a_network_with_batch_norm_says_whether_the_lens_helped_it(organ: Workplace) -> None:
    scans = {name: inverted(content) for name, content in outside_scans(4, "aster").items()}
    options = {"preset": "auto", "unlike": "include"}
    job_id = organ.adaptation(organ.cohort(scans), options=options)
    run_job(job_id, organ.settings)
    job = organ.job(job_id)
    assert (job.state, job.reason) == ("succeeded", None)
    assert job.result is not None
    found = job.result["lens"]
    assert found["negated"]
    before, after = found["network"]
    assert after < before / 1.5
    assert job.gate is not None
    assert {"lens_licence", "lens_left", "lens_grid"} <= {check["name"] for check in job.gate["checks"]}
    candidate = organ.store.open("organ.at-dune")
    assert LENS in candidate.manifest.files
    assert candidate.manifest.lineage.method == "lens"
    moved = found["made"] == "lens and dose"
    whole = organ.loaded().global_model
    assert (candidate.read(WEIGHTS) == whole.read(WEIGHTS)) is not moved
    adaptation = adaptation_of(organ.loaded().offered, options)
    assert adaptation is not None
    titles = [section.title for section in adaptation.sections(job.result, ())]
    assert titles[0] == "What the lens does to these scans"
    # What the version answers to an inverted scan is near what the global model answers to the scan.
    scan, mask = volume("aster", 600)
    truth = np.asarray(mask.voxels[..., 0]) > 0
    voxels = np.asarray(scan.voxels[..., 0], np.float32)
    usual, negative = (
        dice_of(organ, version, nifti_bytes(values, scan.affine), truth)
        for version, values in ((whole, voxels), (candidate, voxels.max() - voxels))
    )
    assert negative > usual - 0.05
    assert usual > 0.6
