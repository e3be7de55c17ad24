from __future__ import annotations

import json
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, RTStructureSetStorage

from model_store.task import Task
from tests.helpers.model_store.dicom_files import written
from training.data.cases import data_warnings
from training.data.consistency import Seen, other_units
from training.data.federation import load_federation
from training.data.scan_files import mask_of, read_mask
from training.data.segmentation.infer_task import inferred_in_words
from training.errors import FederationError
from training.local.loop import train_locally
from training.local.schedule import Schedule
from training.local.site import SiteData
from training.methods.registry import method
from training.phantom.federation import nifti_bytes
from training.run import Run

TASK = {
    "name": "nodules",
    "labels": {"nodule": [255]},
    "channels": 1,
    "size": [32, 32],
    "patient": "^(?P<patient>p[0-9]+)_",
}


def grey(shape: tuple[int, int] = (20, 24), seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, shape, dtype=np.uint8)


def colour() -> np.ndarray:
    return np.stack([grey(seed=seed) for seed in range(3)], axis=-1)


def blob(value: int = 255, shape: tuple[int, int] = (20, 24)) -> np.ndarray:
    mask = np.zeros(shape, np.uint8)
    mask[5:10, 6:12] = value
    return mask


def save(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two sites of two patients, two images each."""
    root = tmp_path / "Lung Nodules"
    for site in ("north", "south"):
        for patient in (1, 2):
            for i in (0, 1):
                save(root / site / "images" / f"p{patient}_{i}.png", grey(seed=patient * 10 + i))
                save(root / site / "masks" / f"p{patient}_{i}.png", blob())
    (root / "task.yaml").write_text(yaml.safe_dump(TASK))
    return root


def structures() -> bytes:
    """An RTSTRUCT without its contours."""
    dataset = Dataset()
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.file_meta.MediaStorageSOPClassUID = dataset.SOPClassUID = RTStructureSetStorage
    dataset.file_meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID = "1.2.3"
    return written(dataset)


def problems(root: Path, task: Task | None = None) -> tuple[str, ...]:
    with pytest.raises(FederationError) as caught:
        load_federation(root, task)
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return caught.value.problems


def test_valid_federation_loads_sites_patients_and_masks(root: Path) -> None:
    federation = load_federation(root)
    assert federation.names == ("north", "south")
    assert not federation.inferred
    assert federation.task.name == "nodules"
    site = federation.site("south")
    assert site.patients == ("p1", "p2")
    assert [case.name for case in site.cases] == ["p1_0.png", "p1_1.png", "p2_0.png", "p2_1.png"]
    assert all(case.split is None for case in site.cases)
    assert all(case.mask == root / "south" / "masks" / case.name for case in site.cases)
    assert federation.only(["north"]).names == ("north",)
    with pytest.raises(KeyError, match="no site 'west'"):
        federation.site("west")


def test_repeated_lists_an_image_shared_by_two_patients(root: Path) -> None:
    # The two sites have the same images but distinct patients; a copy within one patient is not reported.
    assert {group[0] for group in load_federation(root).repeated} == {
        f"north/images/p{patient}_{i}.png" for patient in (1, 2) for i in (0, 1)
    }
    for patient in (1, 2):
        for i in (0, 1):
            save(root / "south" / "images" / f"p{patient}_{i}.png", grey(seed=50 + patient * 10 + i))
    assert load_federation(root).repeated == ()
    content = (root / "north" / "images" / "p1_0.png").read_bytes()
    (root / "north" / "images" / "p1_1.png").write_bytes(content)
    assert load_federation(root).repeated == ()
    (root / "north" / "images" / "p2_0.png").write_bytes(content)
    names = tuple(f"north/images/{name}.png" for name in ("p1_0", "p1_1", "p2_0"))
    assert load_federation(root).repeated == (names,)


def test_files_of_operating_systems_are_ignored(root: Path) -> None:
    for name in ("Thumbs.db", ".DS_Store", "._p1_0.png", "desktop.ini", "ehthumbs.db"):
        (root / "north" / "images" / name).write_bytes(b"junk")
        (root / "north" / "masks" / name.upper()).write_bytes(b"junk")
    for name in ("__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information"):
        (root / name).mkdir()
    assert [site.size for site in load_federation(root).sites] == [4, 4]


def test_names_that_differ_in_unicode_form_alone_are_one_name(root: Path) -> None:
    """macOS writes an accent as a character of its own."""
    composed, apart = (unicodedata.normalize(form, "p3_0_ü.png") for form in ("NFC", "NFD"))
    assert composed != apart
    save(root / "north" / "images" / apart, grey(seed=99))
    save(root / "north" / "masks" / composed, blob())
    (root / "north" / "cases.csv").write_text(f"file,patient\n{composed},ann\n")
    case = load_federation(root).site("north").cases[-1]
    assert (case.name, case.patient, case.image.name, case.mask.name) == (composed, "ann", apart, composed)


def test_a_link_without_a_target_is_named_and_nothing_else(root: Path) -> None:
    image = root / "north" / "images" / "p1_0.png"
    image.unlink()
    image.symlink_to("/nowhere/x.png")
    (problem,) = problems(root)
    assert problem.startswith("north/images/p1_0.png: a link to /nowhere/x.png, which does not exist here")


@pytest.mark.parametrize(
    ("images", "masks"), [("imgs", "labels"), ("imagesTr", "labelsTr"), ("Images", "Masks")]
)
@pytest.mark.parametrize("known", [True, False])
def test_other_usual_names_of_the_folders_are_read(root: Path, images: str, masks: str, known: bool) -> None:
    for site in ("north", "south"):
        (root / site / "images").rename(root / site / images)
        (root / site / "masks").rename(root / site / masks)
    if not known:
        (root / "task.yaml").unlink()
    federation = load_federation(root)
    assert (federation.task.kind, [site.size for site in federation.sites]) == ("segmentation", [4, 4])
    alone = load_federation(root / "north", federation.task)
    assert alone.names == ("north",)


def test_folders_of_other_names_are_listed_with_what_to_do(root: Path) -> None:
    (root / "north" / "masks").rename(root / "north" / "ground truth")
    shutil.copytree(root / "south" / "images", root / "south" / "imgs")
    assert problems(root) == (
        "site 'north': expected the folder masks/, found ground truth, images; rename the one with the masks "
        "to masks",
        "site 'south': found the folders images, imgs for images; keep one",
    )


def test_masks_of_another_suffix_and_nnu_nets_channel_are_paired(root: Path) -> None:
    for site in ("north", "south"):
        for mask in list((root / site / "masks").iterdir()):
            Image.open(mask).save(mask.with_suffix(".tif"))
            mask.unlink()
    north = root / "north" / "images"
    (north / "p1_0.png").rename(north / "p1_0_0000.png")
    site = load_federation(root).site("north")
    assert {case.name: case.mask.name for case in site.cases} == {
        "p1_0_0000.png": "p1_0.tif",
        "p1_1.png": "p1_1.tif",
        "p2_0.png": "p2_0.tif",
        "p2_1.png": "p2_1.tif",
    }
    (north / "p2_0.png").rename(north / "p2_0_0000.png")
    (north / "p2_1.png").rename(north / "p2_0_0001.png")
    assert any("north/images/p2_0_0000.png: no mask" in problem for problem in problems(root))


def test_jpeg_beside_png_masks_is_named_as_what_it_is(root: Path) -> None:
    image = root / "north" / "images" / "p1_0.png"
    Image.open(image).save(image.with_suffix(".jpg"))
    image.unlink()
    (problem,) = problems(root)
    assert problem.startswith("north/images/p1_0.jpg: ")
    assert "JPEG" in problem


def test_a_mask_with_a_palette_of_colours_has_its_indices_for_values(root: Path) -> None:
    """PASCAL VOC and label tools write such masks: the palette is for eyes alone."""
    (root / "task.yaml").write_text(yaml.safe_dump({**TASK, "labels": {"nodule": [1], "rim": [2]}}))
    plain = []
    for palette in (False, True):
        for mask in root.glob("*/masks/*.png"):
            values = blob(1) + blob(1) * (np.arange(24) > 8)
            image = Image.fromarray(values.astype(np.uint8))
            if palette:
                image = Image.fromarray(values.astype(np.uint8), "P")
                image.putpalette([0, 0, 0, 128, 0, 0, 0, 128, 0] + [0] * 759)
            image.save(mask)
        cases = load_federation(root).site("north").cases
        plain.append([read_mask(case.mask).voxels.tolist() for case in cases])
    assert plain[0] == plain[1]
    grey = Image.fromarray(blob(1), "P")
    grey.putpalette([0, 0, 0, 127, 127, 127] + [0] * 762)
    grey.save(root / "north" / "masks" / "p1_0.png")
    (problem,) = problems(root)
    assert "does not name: 127" in problem


@pytest.mark.parametrize("sites", [("south",), ("north", "south")])
def test_masks_without_any_label_are_refused_everywhere_and_noted_of_one_site(root: Path, sites) -> None:
    for site in sites:
        for mask in (root / site / "masks").iterdir():
            save(mask, blob(0))
    if len(sites) == 1:
        federation = load_federation(root)
        assert {site.name: site.empty for site in federation.sites} == {"north": False, "south": True}
        assert "site 'south': no mask has a pixel of any label" in data_warnings(federation.sites)[0]
    else:
        (problem,) = problems(root)
        assert problem.startswith(
            "no mask of any site has a pixel of nodule (255): there is nothing to learn"
        )


def test_a_label_that_no_mask_has_is_noted(root: Path) -> None:
    (root / "task.yaml").write_text(yaml.safe_dump({**TASK, "labels": {"nodule": [255], "rim": [7]}}))
    federation = load_federation(root)
    assert federation.unlabelled == ("rim",)
    config = method("fedavg").config()
    (warning,) = (line for line in Run(federation, "fedavg", config).warnings() if "label" in line)
    assert warning.startswith("label 'rim': no mask of any site has it")


@pytest.fixture
def partly(root: Path) -> Path:
    """North draws the nodule alone, south its rim too, and not where 9 is."""
    told = {**TASK, "labels": {"nodule": [255], "rim": [7]}, "ignore": 9}
    (root / "task.yaml").write_text(yaml.safe_dump(told))
    for number, mask in enumerate(sorted((root / "south" / "masks").iterdir())):
        drawn = blob()
        drawn[10:12, 6:12] = 7
        if number == 0:
            drawn[:2] = 9
        save(mask, drawn)
    return root


def test_a_label_that_a_site_never_draws_is_found_said_and_left_out_of_its_loss(partly: Path) -> None:
    federation = load_federation(partly)
    north, south = federation.sites
    assert (north.undrawn, north.labelled) == (("rim",), {"nodule": 4, "rim": 0})
    assert (south.undrawn, south.labelled) == ((), {"nodule": 4, "rim": 4})
    run = Run(federation, "fedavg", method("fedavg").config())
    (warning,) = (line for line in run.warnings() if "draw" in line)
    assert warning.startswith("site 'north' does not draw 'rim': it is in none of its 4 masks")
    pooled = Run(federation, "centralised", method("centralised").config()).warnings()
    assert any("what a site does not draw is background there" in line for line in pooled)
    groups = {}
    for site in run.sites():
        data = SiteData.load(site, federation.task)
        groups[site.name] = data.train.told.groups
        assert data.train.take([0]).told == data.val.told == data.test.told == data.train.told
        network = torch.nn.Conv2d(1, 3, 1)
        images, targets = (torch.from_numpy(each) for each in (data.train.images, data.train.targets))
        schedule = Schedule(epochs=1, batch_size=64, learning_rate=0.0, augment=False)
        with torch.no_grad():
            expected = data.train.told.loss(schedule.loss)(network(images), targets).item()
        draw = torch.Generator().manual_seed(0)
        assert train_locally(network, data.train, schedule, draw) == pytest.approx(expected, rel=1e-6)
        ignored = sum((data.unfiltered or data.train).targets.ravel() == 255)
        assert bool(ignored) == (site.name == "south" and "p1_0.png" in data.train.cases)
        assert 255 not in data.train.met().targets
    assert groups == {"north": (0, 0, 2), "south": (0, 1, 2)}


def test_a_label_may_be_said_to_be_absent_where_no_mask_has_it(partly: Path) -> None:
    told = yaml.safe_load((partly / "task.yaml").read_text())
    (partly / "task.yaml").write_text(yaml.safe_dump({**told, "absent": "background"}))
    assert [site.undrawn for site in load_federation(partly).sites] == [(), ()]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("p1_0.stl", b"solid heart\nfacet", "this is a surface (a mesh), and no mask of voxels"),
        ("p1_0.json", b'{"shapes": []}', "this is text (JSON), and no image"),
        ("p1_0.mat", b"MATLAB 5.0 MAT-file", "this is a MATLAB file"),
        ("p1_0.dcm", structures(), "RTSTRUCT: contours have places in the patient, and this scan has none"),
    ],
)
def test_what_is_no_mask_is_named_as_what_it_is(root: Path, name: str, content: bytes, said: str) -> None:
    (root / "north" / "masks" / "p1_0.png").unlink()
    (root / "north" / "masks" / name).write_bytes(content)
    assert any(f"north/masks/{name}: " in line and said in line for line in problems(root))


def sidecar(root: Path, site: str, **labels: object) -> None:
    (root / site / "dataset.json").write_text(json.dumps({"labels": labels}))


def test_values_that_a_sites_dataset_json_names_otherwise_are_read_by_their_names(partly: Path) -> None:
    """The south numbers the labels the other way round."""
    for mask in (partly / "south" / "masks").iterdir():
        drawn = np.asarray(Image.open(mask)).astype(int)
        save(mask, np.select([drawn == 255, drawn == 7], [7, 255], drawn).astype(np.uint8))
    sidecar(partly, "south", background=0, Rim=255, nodule=7, ignore=9)
    north, south = load_federation(partly).sites
    assert south.labelled == {"nodule": 4, "rim": 4}
    assert south.notes == (
        "south/dataset.json: its mask values are read by their names: 7 (nodule) as 255, 255 (rim) as 7",
    )
    assert south.notes[0] in data_warnings((north, south))
    case = south.cases[-1]
    assert (mask_of(case).voxels == 255).sum() == 30  # the nodule of `blob`
    digest = south.digest
    sidecar(partly, "south", background=0, rim=7, nodule=255, ignore=9)
    assert load_federation(partly).sites[1].digest != digest


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (
            {"background": 0, "rim": 255, "other": 7},
            "value 7 is 'other', and of task 'nodules' it is rim",
        ),
        (
            {"background": 0, "nodule": [255, 7], "rim": [7]},
            "value 7 is nodule and rim, and no value of",
        ),
        (["nodule"], "expected labels by name or by value"),
    ],
)
def test_dataset_json_that_contradicts_the_task_is_a_problem(partly: Path, labels: Any, said: str) -> None:
    (partly / "south" / "dataset.json").write_text(json.dumps({"labels": labels}))
    (problem,) = problems(partly)
    assert problem.startswith("south/dataset.json: ")
    assert said in problem


def test_names_that_the_task_does_not_have_are_read_by_their_values_and_noted(partly: Path) -> None:
    sidecar(partly, "south", background=0, knoten=255, rim=7)
    (note,) = load_federation(partly).sites[1].notes
    assert note.endswith(
        "names that the task does not have are read by their values: 255 ('knoten') as nodule"
    )


def test_masks_with_a_label_that_the_sites_dataset_json_does_not_name_are_said(partly: Path) -> None:
    sidecar(partly, "south", background=0, nodule=255)
    for mask in (partly / "south" / "masks").iterdir():
        save(mask, np.where(np.asarray(Image.open(mask)) == 255, 7, 0).astype(np.uint8))
    south = load_federation(partly).sites[1]
    assert south.labelled["rim"] == len(south.cases)
    assert any(
        "does not name 'rim', and 4 of the site's masks have its value" in note for note in south.notes
    )


def test_sites_with_other_channels_in_their_dataset_json_are_named(partly: Path) -> None:
    for site, channels in (("north", {"0": "T1"}), ("south", {"0": "CT"})):
        content = {"labels": {"background": 0, "nodule": 255, "rim": 7}, "channel_names": channels}
        (partly / site / "dataset.json").write_text(json.dumps(content))
    said = "south/dataset.json: its channels are CT, and those of north T1"
    assert any(said in line for line in data_warnings(load_federation(partly).sites))
    (partly / "south" / "dataset.json").write_text(json.dumps({**content, "channel_names": {"0": "t1"}}))
    assert not any("channels are" in line for line in data_warnings(load_federation(partly).sites))


def test_a_seg_nrrd_beside_images_is_named_as_what_it_is(root: Path) -> None:
    (root / "north" / "images" / "p1_0.seg.nrrd").write_bytes(b"NRRD0004\n")
    said = "a .seg.nrrd is a segmentation, and no scan: put it into masks/ under its scan's name"
    assert any("north/images/p1_0.seg.nrrd: no mask" in line and said in line for line in problems(root))


def test_of_three_sites_the_one_with_other_units_alone_is_named() -> None:
    seen = {"a": Seen((150, 300, 810)), "b": Seen((-874, -724, -214)), "c": Seen((150, 300, 811))}
    said = [other_units(name, own, [o for n, o in seen.items() if n != name]) for name, own in seen.items()]
    assert [each is not None for each in said] == [False, True, False]


def test_without_a_task_the_sites_dataset_json_name_the_labels(partly: Path) -> None:
    (partly / "task.yaml").unlink()
    sidecar(partly, "south", background=0, nodule=255, rim=7, ignore=9)
    sidecar(partly, "north", background=0, nodule=255, rim=7, ignore=9)
    federation = load_federation(partly)
    assert federation.task.labels == {"nodule": (255,), "rim": (7,)}
    assert federation.task.ignore == (9,)


@pytest.mark.parametrize(
    ("named", "found"),
    [
        ({"nodule": 255, "Rim": 7}, {"nodule": (255,), "rim": (7,)}),
        ({"nodule": 255}, {"nodule": (255,), "rim": (7,)}),
        ({"nodule": 255, "vessel": 3}, {"nodule": (255,), "rim": (7,), "vessel": (3,)}),
        (
            {"nodule": 255, "wall": 7},
            "value 7 is 'wall', and in that of north it is 'rim'",
        ),
    ],
)
def test_without_a_task_the_labels_are_all_that_the_sites_name(
    partly: Path, named: dict[str, int], found: dict[str, tuple[int, ...]] | str
) -> None:
    (partly / "task.yaml").unlink()
    sidecar(partly, "north", background=0, nodule=255, rim=7)
    content = json.dumps({"labels": {"background": 0, "ignore": 9, **named}})
    (partly / "south" / "dataset.json").write_text(content, encoding="utf-8-sig")
    if isinstance(found, str):
        assert any(found in line for line in problems(partly))
        return
    task = load_federation(partly).task
    assert (task.labels, task.ignore) == (found, (9,))


@pytest.mark.parametrize(("scale", "offset"), [(0.02, 0.0), (1.0, -600.0)])
def test_a_site_with_intensities_in_other_units_is_named(root: Path, scale: float, offset: float) -> None:
    for site in ("east", "north", "south", "west"):
        for index in range(2):
            values = grey(seed=index).astype(float) * 2
            values = values * scale + offset if site == "south" else values * 1.7 + 10
            volume = np.repeat(values[:, :, None], 3, axis=2).astype(np.int16)
            for part, array in (("images", volume), ("masks", np.repeat(blob()[:, :, None], 3, axis=2))):
                path = root / site / part / f"p{index}_0.nii.gz"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(nifti_bytes(array, np.eye(4)))
        for path in (root / site).glob("*/*.png"):
            path.unlink()
    found = [line for line in data_warnings(load_federation(root).sites) if "intensities" in line]
    assert len(found) == 1
    assert found[0].startswith("site 'south': intensities run from ")


def test_more_than_twenty_like_problems_are_counted(root: Path) -> None:
    for number in range(30):
        save(root / "north" / "images" / f"p9_{number}.png", grey(seed=number))
    save(root / "south" / "masks" / "p8_0.png", blob())
    with pytest.raises(FederationError) as caught:
        load_federation(root)
    assert len(caught.value.problems) == 31
    lines = str(caught.value).splitlines()
    assert sum(": no mask; expected" in line for line in lines) == 20
    assert lines[21] == "  - and 10 more like the last 20"
    assert lines[22] == "  - south/masks/p8_0.png: no image; expected south/images/p8_0.png"


def test_given_task_overrides_task_yaml(root: Path) -> None:
    task = Task.load(root / "task.yaml").model_copy(update={"name": "other", "patient": None})
    federation = load_federation(root, task)
    assert federation.task.name == "other"
    assert len(federation.sites[0].patients) == 4


def test_all_problems_of_a_mask_federation_are_listed_at_once(root: Path) -> None:
    north, south = root / "north", root / "south"
    (north / "masks" / "p1_0.png").unlink()
    (north / "images" / "p2_0.png").unlink()
    save(north / "masks" / "p1_1.png", blob(7))
    save(north / "masks" / "p2_1.png", blob(shape=(20, 25)))
    save(south / "images" / "p1_0.png", colour())
    (south / "images" / "p1_1.png").write_bytes((south / "images" / "p1_1.png").read_bytes()[:60])
    save(south / "images" / "scan.png", grey())
    save(south / "masks" / "scan.png", blob())
    (root / "empty" / "images").mkdir(parents=True)
    (south / "cases.csv").write_text("file,patient,split\nabsent.png,p9,train\np2_0.png,,exam\n")
    found = problems(root)
    for fragment in (
        "north/images/p1_0.png: no mask; expected north/masks/p1_0.png",
        "north/masks/p2_0.png: no image",
        "north/masks/p1_1.png: the mask has values that task 'nodules' does not name: 7; expected [0, 255]",
        "north/masks/p2_1.png: the mask has 20 x 25 voxels, its scan 20 x 24",
        "south/images/p1_0.png: task 'nodules' expects a grey scan (1 channels), found colour",
        "south/images/p1_1.png: ",
        "south/images/scan.png: 'scan': no patient in the name",
        "site 'empty': empty",
        "south/cases.csv: 'absent.png' is not a file of images/",
        "south/cases.csv line 3: unknown split 'exam'; expected train, val, test or nothing",
    ):
        assert sum(fragment in problem for problem in found) == 1, (fragment, found)
    assert len(found) == 10


def test_cases_csv_sets_patients_and_splits_whole_patients(root: Path) -> None:
    (root / "north" / "cases.csv").write_text(
        "file, patient, split\np1_0.png, ann, test\np1_1.png, ann,\np2_0.png, , train\n"
    )
    cases = {case.name: case for case in load_federation(root).site("north").cases}
    assert (cases["p1_0.png"].patient, cases["p1_0.png"].split) == ("ann", "test")
    assert (cases["p1_1.png"].patient, cases["p1_1.png"].split) == ("ann", "test")
    assert (cases["p2_0.png"].patient, cases["p2_0.png"].split) == ("p2", "train")
    assert (cases["p2_1.png"].patient, cases["p2_1.png"].split) == ("p2", "train")


def test_cases_csv_ignores_empty_fields_at_the_end_of_a_row(root: Path) -> None:
    (root / "north" / "cases.csv").write_text("file,patient\np1_0.png,ann,\np1_1.png,ann, ,\n")
    cases = {case.name: case.patient for case in load_federation(root).site("north").cases}
    assert (cases["p1_0.png"], cases["p1_1.png"], cases["p2_0.png"]) == ("ann", "ann", "p2")


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        ("file,patient,split\np1_0.png,a,train\np1_1.png,a,val\n", "patient 'a' is in train and val"),
        ("name,patient\np1_0.png,a\n", "expected the columns file, patient, split"),
        ("file\np1_0.png\np1_0.png\n", "line 3: 'p1_0.png' is named twice"),
        ("", "found none"),
        ("file;patient\np1_0.png;a\n", "found file;patient; separate the columns by commas"),
        ("File,Patient\np1_0.png,a\n", "found File, Patient; write them in small letters"),
        ("file,patient\n\np1_0.png,Doe, Jane\n", "line 3: expected 2 fields, found more; quote a field"),
        ('file,patient\n"p1_0.png","Doe,\nJane"\np1_1.png,a,val\n', "line 4: expected 2 fields, found more"),
        ("file,patient,split,patient\np1_0.png,a,val,b\n", "found patient more than once; keep one"),
    ],
)
def test_invalid_cases_csv_is_rejected_with_its_reason(root: Path, content: str, fragment: str) -> None:
    (root / "north" / "cases.csv").write_text(content)
    (problem,) = problems(root)
    assert problem.startswith("north/cases.csv")
    assert fragment in problem


def test_binary_cases_csv_is_rejected(root: Path) -> None:
    (root / "north" / "cases.csv").write_bytes(b"\xff\xfe\x00file")
    (problem,) = problems(root)
    assert "cannot be read as CSV: it is not in UTF-8; save it again in UTF-8" in problem


def test_task_in_another_encoding_is_rejected_with_what_to_do(root: Path) -> None:
    (root / "task.yaml").write_bytes("name: t\nlabels: {Läsion: [1]}\n".encode("cp1252"))
    with pytest.raises(FederationError, match=r"it is not in UTF-8; save it in UTF-8"):
        load_federation(root)


@pytest.mark.parametrize("name", ["a b", "über", "-x", "a" * 65])
def test_site_name_unsafe_in_a_path_is_rejected(root: Path, name: str) -> None:
    (root / "north").rename(root / name)
    (problem,) = problems(root)
    assert problem.startswith(f"site {name!r}: a site's name becomes part of paths")


@pytest.mark.parametrize("name", ["global", "own", "cluster-1", "at-dune"])
def test_reserved_site_name_is_rejected(root: Path, name: str) -> None:
    (root / "north").rename(root / name)
    assert [*problems(root)] == [f"site {name!r}: the name is reserved; rename the folder"]


def test_absent_or_empty_folder_is_rejected(tmp_path: Path) -> None:
    assert "expected a folder" in problems(tmp_path / "absent")[0]
    assert "no site" in problems(tmp_path)[0]


def test_invalid_task_yaml_is_rejected_by_field(root: Path) -> None:
    (root / "task.yaml").write_text("name: x\nsize: [33, 32]\n")
    (problem,) = problems(root)
    assert "task.yaml" in problem
    assert "labels" in problem


def test_hidden_files_and_folders_are_ignored(root: Path) -> None:
    (root / "north" / "images" / ".DS_Store").write_bytes(b"x")
    (root / ".cache").mkdir()
    assert len(load_federation(root).site("north").cases) == 4


def test_single_site_folder_with_labels_folder_loads(root: Path) -> None:
    single = root.parent / "single"
    shutil.copytree(root / "north", single)
    (single / "masks").rename(single / "labels")
    federation = load_federation(single, Task.model_validate(TASK))
    assert federation.names == ("single",)
    save(single / "labels" / "p1_0.png", blob(9))
    assert (
        "single/labels/p1_0.png: the mask has values that task 'nodules' does not name: 9"
        in problems(single, Task.model_validate(TASK))[0]
    )


def test_colour_image_is_accepted_when_the_task_converts_it(root: Path) -> None:
    save(root / "north" / "images" / "p1_0.png", colour())
    assert len(problems(root)) == 1
    (root / "task.yaml").write_text(yaml.safe_dump(TASK | {"colour": "luminance"}))
    load_federation(root)
    (root / "task.yaml").write_text(yaml.safe_dump(TASK | {"colour": "replicate", "channels": 3}))
    load_federation(root)


def test_coloured_mask_is_rejected(root: Path) -> None:
    save(root / "north" / "masks" / "p1_0.png", np.stack([blob(), blob() * 0, blob()], axis=-1))
    assert "expected a mask with one channel" in problems(root)[0]


class TestVolumes:
    """NIfTI sites: grids and affines are checked too."""

    @pytest.fixture
    def volumes(self, tmp_path: Path) -> Path:
        for name in ("a", "b"):
            for part, voxels in (("images", self.voxels()), ("masks", self.mask())):
                path = tmp_path / "hospital" / part / f"{name}.nii.gz"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(nifti_bytes(voxels, np.diag([1.0, 1.0, 2.0, 1.0])))
        return tmp_path

    @staticmethod
    def voxels() -> np.ndarray:
        return np.random.default_rng(0).integers(0, 900, (30, 34, 10)).astype(np.int16)

    @staticmethod
    def mask(value: int = 1) -> np.ndarray:
        mask = np.zeros((30, 34, 10), np.uint8)
        mask[4:9, 6:14, 2:7] = value
        return mask

    def test_valid_volumes_load_with_an_inferred_task(self, volumes: Path) -> None:
        federation = load_federation(volumes)
        assert federation.inferred
        assert [case.patient for case in federation.sites[0].cases] == ["a", "b"]
        assert federation.task.size == (48, 32)

    def test_volume_mask_with_another_affine_is_rejected(self, volumes: Path) -> None:
        path = volumes / "hospital" / "masks" / "b.nii.gz"
        path.write_bytes(nifti_bytes(self.mask(), np.diag([-1.0, 1.0, 2.0, 1.0])))
        (problem,) = problems(volumes)
        assert problem.startswith("hospital/masks/b.nii.gz: the mask is up to 29 mm away from its scan")

    def test_volume_mask_with_fractions_is_rejected(self, volumes: Path) -> None:
        image = nib.Nifti1Image(self.mask() * np.float32(0.5), np.diag([1.0, 1.0, 2.0, 1.0]))
        (volumes / "hospital" / "masks" / "b.nii.gz").unlink()
        nib.save(image, volumes / "hospital" / "masks" / "b.nii.gz")
        (problem,) = problems(volumes)
        assert problem.startswith("hospital/masks/b.nii.gz: the mask has values that are not whole numbers")


class TestInference:
    """Without task.yaml."""

    def test_inferred_task_has_one_foreground_label_and_one_patient_per_file(self, root: Path) -> None:
        (root / "task.yaml").unlink()
        save(root / "north" / "masks" / "p1_0.png", blob(7))
        federation = load_federation(root)
        assert federation.inferred
        task = federation.task
        assert task.labels == {"foreground": (7, 255)}
        assert (task.name, task.channels, task.size) == ("lung-nodules", 1, (32, 32))
        assert federation.site("north").patients == ("p1_0", "p1_1", "p2_0", "p2_1")

    def test_values_that_all_hospitals_have_are_labels_of_their_own(self, root: Path) -> None:
        (root / "task.yaml").unlink()
        for path in root.glob("*/masks/*.png"):
            mask = blob(7)
            mask[:2, :2] = 3
            save(path, mask)
        task = load_federation(root).task
        assert task.labels == {"label-3": (3,), "label-7": (7,)}
        assert inferred_in_words(task) == (
            "of the masks' values, label-3 is 3, label-7 is 7; slices are trained on at 32x32"
        )
        (path, *_) = root.glob("*/masks/*.png")
        save(path, blob(9))
        task = load_federation(root).task
        assert task.labels == {"foreground": (3, 7, 9)}
        assert "foreground is 3, 7, 9; give them labels of their own" in inferred_in_words(task)

    def test_inferred_size_is_rounded_up(self, root: Path) -> None:
        (root / "task.yaml").unlink()
        for path in root.rglob("*.png"):
            save(path, np.asarray(Image.open(path).resize((33, 49), Image.Resampling.NEAREST)))
        assert load_federation(root).task.size == (64, 48)

    def test_inferred_size_of_large_images_is_256(self, root: Path) -> None:
        (root / "task.yaml").unlink()
        for path in root.rglob("*.png"):
            save(path, np.asarray(Image.open(path).resize((700, 300), Image.Resampling.NEAREST)))
        assert load_federation(root).task.size == (256, 256)

    def test_inferred_task_of_grey_and_colour_images_has_three_channels(self, root: Path) -> None:
        (root / "task.yaml").unlink()
        save(root / "north" / "images" / "p1_0.png", colour())
        task = load_federation(root).task
        assert (task.channels, task.colour) == (3, "replicate")

    def test_inferred_size_of_volumes_follows_the_affine(self, tmp_path: Path) -> None:
        # Stored with the axial axis first.
        affine = np.zeros((4, 4))
        affine[2, 0], affine[0, 1], affine[1, 2], affine[3, 3] = 3.0, 1.0, 1.0, 1.0
        for part in ("images", "masks"):
            path = tmp_path / "h" / part / "a.nii.gz"
            path.parent.mkdir(parents=True)
            voxels = np.random.default_rng(0).integers(0, 2, (12, 50, 64)).astype(np.uint8)
            path.write_bytes(nifti_bytes(voxels, affine))
        assert load_federation(tmp_path).task.size == (64, 64)

    def test_inference_without_foreground_is_rejected(self, root: Path) -> None:
        (root / "task.yaml").unlink()
        for path in root.glob("*/masks/*.png"):
            save(path, blob(0))
        assert "no mask has a non-zero value" in problems(root)[-1]


class TestDigest:
    """Inputs of the digest."""

    def test_digest_does_not_depend_on_the_location(self, root: Path, tmp_path: Path) -> None:
        copy = tmp_path / "copy"
        shutil.copytree(root, copy)
        assert load_federation(copy).digest == load_federation(root).digest

    @pytest.mark.parametrize("change", ["image", "mask", "task", "split", "name"])
    def test_digest_changes_with_every_training_input(self, root: Path, change: str) -> None:
        before = load_federation(root).digest
        north = root / "north"
        if change == "image":
            save(north / "images" / "p1_0.png", grey(seed=99))
        elif change == "mask":
            save(north / "masks" / "p1_0.png", blob()[::-1])
        elif change == "task":
            (root / "task.yaml").write_text(yaml.safe_dump(TASK | {"size": [48, 32]}))
        elif change == "split":
            (north / "cases.csv").write_text("file,split\np1_0.png,test\n")
        else:
            north.rename(root / "nord")
        assert load_federation(root).digest != before
