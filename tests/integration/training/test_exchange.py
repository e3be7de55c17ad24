"""Models made elsewhere give the masks of the software that made them: MONAI's parser, nnU-Net's
predictor."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import onnx
import pytest

from benchmarks.harness import forked
from model_store.lens import FINGERPRINT, STEPS
from model_store.manifest import GRAPH, NetworkSpec
from model_store.store import Store
from personalization.errors import NetworkError
from personalization.networks import build
from service.catalog.ways import ways_of
from tests.helpers.training.bundles import (
    ARGMAX,
    INVERT,
    PROBABILITIES,
    SAVE,
    SOFTMAX,
    SPLEEN,
    WINDOW,
    by_monai,
    make_bundle,
)
from tests.helpers.training.make_nnunet_folder import phantom, save
from tests.helpers.training.nnunet_folders import make_nnunet_folder
from tests.helpers.training.served_volumes import mask_of
from tests.helpers.training.zoo import ZOO
from tests.unit.model_store.lens.test_graph import drawn
from tests.unit.training.exchange.test_to_onnx import SLICES, published
from training.errors import ImportRefused
from training.exchange import bundle, imported, nnunet, to_bundle, to_nnunet
from training.exchange.source import Source

ROOT = Path(__file__).resolve().parents[3]
_LABELS = [SOFTMAX, ARGMAX, {**INVERT, "nearest_interp": True}, SAVE]
_LOGITS = [{**INVERT, "nearest_interp": False}, ARGMAX, SAVE]
_STORED = [each for each in SPLEEN if each["_target_"] not in ("Orientationd", "Spacingd")]
_ZSCORE = {"_target_": "NormalizeIntensityd", "keys": "image", "nonzero": True}
_UNIT = {"_target_": "ScaleIntensityd", "keys": "image", "minv": -1.0, "maxv": 1.0}
_PADDED = {"_target_": "SpatialPadd", "keys": "image", "spatial_size": [32, 32, 32]}
_SIGMOID = {"_target_": "Activationsd", "keys": "pred", "sigmoid": True}
_HALF = {"_target_": "AsDiscreted", "keys": "pred", "threshold": 0.5}
_LARGEST = {"_target_": "KeepLargestConnectedComponentd", "keys": "pred", "applied_labels": [1, 2]}
_REGIONS = [_SIGMOID, INVERT, _HALF, SAVE]
_BRATS = {"enhancing": (4,), "whole": (1, 2, 4), "core": (2, 4)}


@pytest.fixture(scope="module")
def scan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scan in LPS of thick slices, larger than the window, without ties between two voxels."""
    image, _ = phantom(np.random.default_rng(3), (40, 35, 18))
    path = tmp_path_factory.mktemp("scan") / "scan.nii.gz"
    save(path, image, (0.9, 1.1, 2.4))
    return path


def _imported(store: Store, folder: Path, **options: Any) -> Any:
    with Source(folder) as source:
        return imported.publish(store, "made-elsewhere", bundle.read(source, **options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"after": _LABELS, "inferer": {**WINDOW, "mode": "gaussian", "overlap": 0.25}},
        {"after": _LOGITS, "before": [*SPLEEN[:4], _ZSCORE, _UNIT]},
        {"before": _STORED},
        {"before": [*SPLEEN[:3], _ZSCORE, SPLEEN[3]]},
        {"after": [SOFTMAX, INVERT, ARGMAX, _LARGEST, SAVE]},
        {"before": [*SPLEEN, _PADDED], "inferer": {**WINDOW, "roi_size": [32, 32, 32]}},
        {"before": [*SPLEEN[:3], {**SPLEEN[3], "pixdim": [1.5, 1.5, -1]}, *SPLEEN[4:]]},
        {"before": [*SPLEEN[:3], {**SPLEEN[3], "pixdim": [-1, 1.3]}, *SPLEEN[4:]]},
    ],
    ids=[
        *("spleen", "labels", "logits", "stored axes", "normalised before", "largest", "padded"),
        *("an axis of its own", "the last repeated"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of MONAI
def test_an_imported_bundle_gives_monais_mask(tmp_path: Path, scan: Path, options: dict[str, Any]) -> None:
    if _LARGEST in options.get("after", ()):
        pytest.importorskip("skimage", reason="MONAI's transform needs scikit-image")
    folder = make_bundle(tmp_path / "bundle", **options)
    expected = by_monai(folder, scan)

    found = mask_of(_imported(Store(tmp_path / "store"), folder), scan)

    assert found.shape == expected.shape
    assert sorted(np.bincount(expected.astype(int).ravel()))[-2] > 100
    # Classes that are level within the rounding of float32.
    assert np.mean(found != expected) < 1e-4


@pytest.mark.filterwarnings("ignore")  # of MONAI
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("after", [PROBABILITIES, _LOGITS], ids=["probabilities", "logits"])
def test_an_imported_bundle_gives_monais_mask_of_an_oblique_scan(
    tmp_path: Path, seed: int, after: list[dict[str, Any]]
) -> None:
    rng = np.random.default_rng(seed)
    turn, _ = np.linalg.qr(rng.normal(size=(3, 3)))
    affine = np.eye(4)
    affine[:3, :3] = turn @ np.diag((0.93, 1.07, 2.41))
    affine[:3, 3] = rng.uniform(-100, 100, 3)
    image = nibabel.Nifti1Image(phantom(rng, (34, 30, 18))[0], affine)
    image.to_filename(tmp_path / "scan.nii.gz")
    folder = make_bundle(tmp_path / "bundle", before=[*SPLEEN[:4], _ZSCORE], after=after, seed=3)
    expected = by_monai(folder, tmp_path / "scan.nii.gz")

    found = mask_of(_imported(Store(tmp_path / "store"), folder), tmp_path / "scan.nii.gz")

    assert sorted(np.bincount(expected.astype(int).ravel()))[-2] > 100
    assert np.mean(found != expected) < 1e-4


@pytest.mark.filterwarnings("ignore")  # of MONAI
@pytest.mark.parametrize("name", ZOO)
def test_pipelines_of_the_zoo_give_monais_masks(tmp_path: Path, scan: Path, name: str) -> None:
    """Pre- and postprocessing as the zoo's bundles have them, around a small network."""
    without = {
        "pediatric_abdominal_ct_segmentation": "CropForegroundd",
        "brats_mri_segmentation": "Lambdad",
        # MONAI's transform needs scikit-image.
        "prostate_mri_anatomy": "KeepLargestConnectedComponentd",
    }
    left_out, regions = {without.get(name)}, name == "brats_mri_segmentation"
    whole = ZOO[name]
    oracle = {
        place: [each for each in whole[place] if each["_target_"] not in left_out]
        for place in ("before", "after")
    }
    if name == "prostate_mri_anatomy":
        # It interpolates the numbers of labels; the import takes the nearest, and says so.
        oracle["after"] = [
            {**each, "nearest_interp": True} if each["_target_"] == "Invertd" else each
            for each in oracle["after"]
        ]
    expected = by_monai(make_bundle(tmp_path / "oracle", **{**whole, **oracle}), scan)
    folder = make_bundle(tmp_path / "bundle", **whole)
    options: dict[str, Any] = {"without": left_out - {None}}
    if regions:
        options["labels"] = _BRATS

    found = mask_of(_imported(Store(tmp_path / "store"), folder, **options), scan)

    if regions:
        enhancing, region, core = expected > 0
        consistent = (core | ~enhancing) & (region | ~core)
        expected = np.select([enhancing, core, region], [4, 2, 1], 0)
        found, expected = found[consistent], expected[consistent]
    assert sorted(np.bincount(expected.astype(int).ravel()))[-2] > 100
    assert np.mean(found != expected) < 1e-4


@pytest.mark.filterwarnings("ignore")  # of MONAI
def test_imported_regions_are_monais_regions(tmp_path: Path, scan: Path) -> None:
    """Combinations of three sigmoids are the mask values of the declared labels."""
    folder = make_bundle(tmp_path / "bundle", after=_REGIONS)
    enhancing, whole, core = by_monai(folder, scan) > 0

    found = mask_of(_imported(Store(tmp_path / "store"), folder, labels=_BRATS), scan)

    # BraTS: the innermost region that a voxel is in names its value.
    expected = np.select([enhancing, core, whole], [4, 2, 1], 0)
    consistent = (core | ~enhancing) & (whole | ~core)
    assert consistent.mean() > 0.3
    assert sorted(np.bincount(expected[consistent]))[-2] > 100
    assert np.mean((found != expected)[consistent]) < 1e-4


@pytest.mark.filterwarnings("ignore")  # of MONAI
@pytest.mark.parametrize(
    ("after", "labels"),
    [
        (PROBABILITIES, None),
        (_LABELS, None),
        (_REGIONS, _BRATS),
        ([SOFTMAX, INVERT, ARGMAX, _LARGEST, SAVE], None),
    ],
)
def test_an_exported_bundle_opens_with_monais_parser_and_gives_the_same_mask(
    tmp_path: Path, scan: Path, after: list[dict[str, Any]], labels: dict[str, tuple[int, ...]] | None
) -> None:
    if _LARGEST in after:
        pytest.importorskip("skimage", reason="MONAI's transform needs scikit-image")
    folder = make_bundle(tmp_path / "bundle", after=after)
    artefact = _imported(Store(tmp_path / "store"), folder, labels=labels)

    to_bundle.write(artefact, tmp_path / "exported")

    own = mask_of(artefact, scan)
    assert sorted(np.bincount(own.ravel()))[-2] > 100
    assert np.mean(by_monai(tmp_path / "exported", scan) != own) < 1e-4
    again = _imported(Store(tmp_path / "again"), tmp_path / "exported")
    assert again.manifest.task == artefact.manifest.task
    assert again.read(GRAPH) == artefact.read(GRAPH)


@pytest.mark.filterwarnings("ignore")  # of MONAI
@pytest.mark.parametrize("transpose", [[0, 1, 2], [1, 2, 0]])
def test_an_nnunet_is_exported_as_the_closest_that_monai_has_with_its_axes_turned(
    tmp_path: Path, scan: Path, transpose: list[int]
) -> None:
    plans = {"transpose_forward": transpose}
    make_nnunet_folder(tmp_path / "nnunet", plans=plans)
    with Source(tmp_path / "nnunet") as source:
        artefact = imported.publish(Store(tmp_path / "store"), "blobs", nnunet.read(source))
    with pytest.raises(ImportRefused, match=r"window: nnunet, resampling: nnunet.*--closest"):
        to_bundle.write(artefact, tmp_path / "exported")

    notes = to_bundle.write(artefact, tmp_path / "exported", closest=True)

    assert [note.split()[0] for note in notes] == ["windows", "scans"]
    readme = (tmp_path / "exported" / "docs" / "README.md").read_text()
    assert all(note in readme for note in notes)
    own = mask_of(artefact, scan, to_bundle.closest_to(artefact.manifest.task)[0])
    assert sorted(np.bincount(own.ravel()))[-2] > 100
    assert np.mean(by_monai(tmp_path / "exported", scan) != own) < 1e-4
    # The export is imported again, and answers as MONAI does.
    again = _imported(Store(tmp_path / "again"), tmp_path / "exported")
    assert again.manifest.task.labels == artefact.manifest.task.labels
    assert np.mean(mask_of(again, scan) != own) < 1e-4


def test_axes_of_the_training_files_make_the_answer_independent_of_how_a_scan_is_stored(
    tmp_path: Path, scan: Path
) -> None:
    make_nnunet_folder(tmp_path / "nnunet")
    with Source(tmp_path / "nnunet") as source:
        found = nnunet.read(source, mirror=False)
    store = Store(tmp_path / "store")
    plain = imported.publish(store, "stored", found)
    turned = imported.publish(store, "turned", imported.turned(found, "LPS"))
    nibabel.save(nibabel.as_closest_canonical(nibabel.load(scan)), tmp_path / "ras.nii.gz")

    own, other = (mask_of(plain, path) for path in (scan, tmp_path / "ras.nii.gz"))
    assert (own != other[::-1, ::-1]).mean() > 0.01
    # The scan is stored as the training files were.
    np.testing.assert_array_equal(mask_of(turned, scan), own)
    np.testing.assert_array_equal(mask_of(turned, tmp_path / "ras.nii.gz")[::-1, ::-1], own)


def test_a_graph_is_imported_under_the_services_names_and_cannot_be_adapted(
    tmp_path: Path, scan: Path
) -> None:
    artefact = _imported(Store(tmp_path / "store"), make_bundle(tmp_path / "bundle"))
    model = onnx.load_from_string(artefact.read(GRAPH))
    del model.graph.output[1:]
    for node in model.graph.node:
        node.input[:] = ["picture" if name == "image" else name for name in node.input]
    model.graph.input[0].name = "picture"
    (tmp_path / "network.onnx").write_bytes(model.SerializeToString())
    artefact.manifest.task.dump(tmp_path / "task.yaml")

    line = ["import", "onnx", str(tmp_path / "network.onnx"), "--task", str(tmp_path / "task.yaml")]
    line += ["--store", str(tmp_path / "graphs"), "--name", "graph", "--licence", "CC0"]
    done = forked.run("model_store", *line)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "  it answers as it is"
    found = Store(tmp_path / "graphs").open("graph@1")
    lineage = found.manifest.lineage
    assert lineage.weights is not None
    assert (lineage.method, lineage.weights.licence) == ("imported", "CC0")
    assert lineage.weights.file == "network.onnx"
    # Its logits are the logarithms of its probabilities.
    assert np.mean(mask_of(found, scan) != mask_of(artefact, scan)) < 1e-3
    with pytest.raises(NetworkError, match="no weights to adapt"):
        build(found.manifest.network.name, **found.manifest.network.arguments)


def test_a_graph_is_exported_with_its_lens_and_imported_again(
    tmp_path: Path, threshold_graph: Callable[..., bytes]
) -> None:
    version = published(tmp_path / "store", SLICES, threshold_graph(), drawn(0, 1, STEPS))
    version.manifest.task.dump(tmp_path / "task.yaml")

    line = ["export", "onnx", "organ@1", str(tmp_path / "organ.onnx"), "--store", str(tmp_path / "store")]
    done = forked.run("model_store", *line)
    again = forked.run("model_store", *line)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1] == "  input image: float32 [B, 1, 48, 32]"
    assert again.returncode == 2
    assert "expected a new file, found one" in again.stderr
    line = ["import", "onnx", str(tmp_path / "organ.onnx"), "--task", str(tmp_path / "task.yaml")]
    done = forked.run("model_store", *line, "--store", str(tmp_path / "other"))
    assert done.returncode == 0, done.stderr
    assert Store(tmp_path / "other").open("organ@1").manifest.files[GRAPH].size > len(threshold_graph())


def test_an_imported_model_gets_a_fingerprint_of_scans_and_then_adapts_without_masks(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    artefact = _imported(store, make_bundle(tmp_path / "bundle"))
    (tmp_path / "scans").mkdir()
    for seed in range(3):
        image, _ = phantom(np.random.default_rng(seed), (40, 35, 18))
        save(tmp_path / "scans" / f"{seed}.nii.gz", image, (0.9, 1.1, 2.4))
    line = [sys.executable, "-m", "model_store", "fingerprint", artefact.manifest.name]
    line += [str(tmp_path / "scans"), "--store", str(tmp_path / "store")]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made = store.open(f"{artefact.manifest.name}@2")
    assert {*made.manifest.files} == {*artefact.manifest.files, FINGERPRINT}
    assert done.stdout.splitlines()[1] == f"  {tmp_path / 'scans'}: 3 patients"
    assert ways_of(store, made).presets[:1] == ("auto",)


def test_locum_store_imports_with_the_same_words_and_refuses_with_one_sentence(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "bundle")
    line = ["store", "import", "bundle", folder, "--store", tmp_path / "store", "--keep-largest", "posterior"]
    command = [sys.executable, "-m", "locum", *map(str, line)]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    refused = forked.run("locum", *line, "--without")
    (tmp_path / "empty").mkdir()
    missing = forked.run("locum", *line[:3], tmp_path / "empty", *line[4:])

    assert "imported spleen-ct-segmentation@1" in done.stdout, done.stderr
    assert "licence Apache License Version 2.0" in done.stdout
    assert done.stdout.splitlines()[-1] == "  it adapts to a hospital without masks, or with a few"
    task = Store(tmp_path / "store").open("spleen-ct-segmentation@1").manifest.task
    assert task.keep_largest == ("posterior",)
    assert refused.returncode == 2
    assert missing.returncode == 2
    assert "expected configs/metadata.json of a MONAI bundle" in missing.stderr
    assert "Traceback" not in missing.stderr


# nnU-Net asks for these with every normalisation.
_SEEN = {
    "foreground_intensity_properties_per_channel": {
        "0": {"mean": 90.0, "std": 50.0, "percentile_00_5": 10.0, "percentile_99_5": 200.0}
    }
}
_NESTED = {f"part{index}": [*range(index + 1, 34)] for index in range(33)}
_PREDICTED = {
    "resenc": {"residual": True},
    "slices": {"slices": True, "name": "2d"},
    "turned by SimpleITK": {"plans": {"image_reader_writer": "SimpleITKIOWithReorient", **_SEEN}},
    "an ignored value": {"labels": {"background": 0, "shell": 1, "core": 2, "ignore": 3}},
    "33 regions": {
        "labels": {"background": 0, **_NESTED},
        "dataset": {"regions_class_order": [*range(1, 34)]},
        "outputs": 33,
    },
}


def _nnunet() -> str | None:
    """The folder with nnunetv2, by LOCUM_NNUNET: Locum does not depend on it."""
    folder = os.environ.get("LOCUM_NNUNET", "")
    return folder if folder and (Path(folder) / "nnunetv2").is_dir() else None


@pytest.mark.skipif(_nnunet() is None, reason="LOCUM_NNUNET names no folder with nnunetv2")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("options", "most_of_a_million"),
    [
        ((), 0),
        (("--spacing", "1", "1", "3.5"), 20),
        # Each fold's sum is rounded to half precision by nnU-Net; here the folds are averaged before.
        (("--folds", "2"), 200),
        (("--regions",), 0),
    ],
    ids=["native spacing", "thick slices", "two folds", "regions"],
)
def test_an_imported_nnunet_gives_nnunets_own_masks(
    tmp_path: Path, options: tuple[str, ...], most_of_a_million: int
) -> None:
    script = ROOT / "tests" / "helpers" / "training" / "make_nnunet_folder.py"
    environment = {**os.environ, "PYTHONPATH": str(_nnunet()), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, str(script), str(tmp_path / "made"), *options]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]

    with Source(tmp_path / "made" / "model") as source:
        found = nnunet.read(source)
    artefact = imported.publish(Store(tmp_path / "store"), "blobs", found)

    assert isinstance(artefact.manifest.network, NetworkSpec)
    differ = total = foreground = 0
    for path in sorted((tmp_path / "made" / "scans").iterdir()):
        theirs = nibabel.load(tmp_path / "made" / "masks" / path.name.replace("_0000", ""))
        expected = np.asarray(theirs.dataobj)  # type: ignore[attr-defined]
        differ += int((mask_of(artefact, path) != expected).sum())
        total += expected.size
        foreground += int((expected > 0).sum())
    assert foreground > 1000
    assert differ <= most_of_a_million * total / 1e6


def _predict(scans: Path, *line: str | Path) -> None:
    """Answer with nnU-Net's own predictor, in a process of its own."""
    script = ROOT / "tests" / "helpers" / "training" / "predict_nnunet.py"
    environment = {**os.environ, "PYTHONPATH": str(_nnunet()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(scans), *map(str, line)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two scans of nnU-Net's names: thick slices, and one that is stored in another direction."""
    folder = tmp_path_factory.mktemp("scans")
    for seed, spacing in enumerate([(1.0, 1.3, 3.4), (1.4, 0.9, 2.8)]):
        image, _ = phantom(np.random.default_rng(seed), (34, 30, 14))
        save(folder / f"blob{seed}_0000.nii.gz", image, spacing)
    turned = folder / "blob1_0000.nii.gz"
    whole = nibabel.as_closest_canonical(nibabel.load(turned))
    nibabel.save(nibabel.Nifti1Image(np.asarray(whole.dataobj), whole.affine), turned)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, scans: Path) -> Path:
    """Trainers' folders with nnU-Net's own networks, and their predictor's masks beside each."""
    folder = tmp_path_factory.mktemp("models")
    for name, given in _PREDICTED.items():
        make_nnunet_folder(folder / name / "model", **{"plans": _SEEN, **given})
    _predict(scans, *(folder / name / "model" for name in _PREDICTED), "--draw")
    return folder


@pytest.mark.skipif(_nnunet() is None, reason="LOCUM_NNUNET names no folder with nnunetv2")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", _PREDICTED)
def test_networks_that_nnunet_builds_are_imported_with_its_predictors_masks(
    tmp_path: Path, models: Path, scans: Path, name: str
) -> None:
    with Source(models / name / "model") as source:
        artefact = imported.publish(Store(tmp_path / "store"), "blobs", nnunet.read(source))

    _agree(artefact, scans, models / name / "masks")


@pytest.mark.skipif(_nnunet() is None, reason="LOCUM_NNUNET names no folder with nnunetv2")
@pytest.mark.timeout(600)
@pytest.mark.xfail(reason="69 of 28,509 voxels of the plain network differ: the cause is not found")
def test_an_export_is_answered_by_nnunets_predictor_with_the_same_masks_mirrored_or_not(
    tmp_path: Path, scans: Path
) -> None:
    folders, artefacts = [], []
    for name in ("plain", "resenc", "slices"):
        given = _PREDICTED.get(name, {})
        make_nnunet_folder(tmp_path / name, **{"plans": _SEEN, **given})
        with Source(tmp_path / name) as source:
            found = nnunet.read(source, mirror=name != "resenc")
        artefacts.append(imported.publish(Store(tmp_path / "store"), f"model{len(folders)}", found))
        folders.append(to_nnunet.write(artefacts[-1], tmp_path / "results" / name)[0])

    _predict(scans, *folders)

    for artefact, folder in zip(artefacts, folders, strict=True):
        _agree(artefact, scans, folder.parent / "masks")


def _agree(artefact: Any, scans: Path, masks: Path) -> None:
    """At most 3 of 4,014 foreground voxels differ."""
    differ = foreground = 0
    for path in sorted(scans.iterdir()):
        theirs: Any = nibabel.load(masks / path.name.replace("_0000", ""))
        expected = np.asarray(theirs.dataobj)
        differ += int((mask_of(artefact, path) != expected).sum())
        foreground += int((expected > 0).sum())
    assert foreground > 4000
    assert differ <= 3 * foreground / 4014, f"{differ} of {foreground} voxels differ"
