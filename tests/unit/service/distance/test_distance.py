"""`locum distance`: a folder of scans beside a model's fingerprint, in a table, a picture and JSON."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from model_store.artefact import Artefact
from model_store.guard import Range, ReferenceStatistics
from model_store.lens import FINGERPRINT, Fingerprint, seen_of
from model_store.manifest import GRAPH, WEIGHTS, Lineage, ModelManifest, NetworkSpec
from model_store.scan import Limits
from model_store.store import Store
from model_store.task import Channel, Normalisation, Task, VolumeGeometry
from service.distance import report
from service.distance.__main__ import main
from service.distance.picture import drawn
from tests.helpers.model_store.graphs import graph_of
from tests.helpers.model_store.scan_files import nifti1

SIDE = 48


def pixels(seed: int, gain: float = 1.0) -> NDArray[np.uint8]:
    """An image with a bright organ off its centre, in noise."""
    draw = np.random.default_rng(seed)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    y, x = draw.normal([18, 30], 1.0)
    organ = np.hypot(rows - y, columns - x) < draw.uniform(9, 11)
    values = 60 + 90 * gain * organ + draw.normal(0, 12, (SIDE, SIDE))
    found: NDArray[np.uint8] = np.clip(values, 0, 255).astype(np.uint8)
    return found


def save(folder: Path, name: str, values: NDArray[np.uint8]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(folder / name)


def published(root: Path) -> Store:
    """`organ`, `unknown` and `part` without a fingerprint, and the classifier `kinds`."""
    members = (
        seen_of((seed, pixels(seed, gain)[None, None].astype(np.float32)) for seed in range(first, first + 6))
        for first, gain in ((0, 0.8), (6, 1.0), (12, 1.3))
    )
    known = {FINGERPRINT: Fingerprint.of([*members]).to_bytes()}
    found = Store(root)
    shared = {"size": (SIDE, SIDE), "normalisation": Normalisation(method="zscore")}
    segments = Task(name="organ", labels={"organ": (1,)}, **shared)
    kinds = Task(name="kinds", kind="classification", class_names=("a", "b"), **shared)
    for name, task, files in (("organ", segments, known), ("unknown", segments, {}), ("kinds", kinds, known)):
        manifest = ModelManifest(
            name=name,
            task=task,
            network=NetworkSpec(name="graph", arguments={}),
            lineage=Lineage(method="imported", run="test", sites=(), rounds=0, seed=0),
        )
        found.publish(manifest, {WEIGHTS: b"", GRAPH: graph_of(name), **files})
    part = manifest.model_copy(update={"name": "part", "part_of": "organ", "task": segments})
    found.publish(part, {WEIGHTS: b"", GRAPH: graph_of("part")})
    return found


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return published(tmp_path_factory.mktemp("distance") / "store")


@pytest.fixture
def run(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """`run(*arguments)`: the exit code, what is printed, and what is printed as an error."""
    monkeypatch.setenv("LOCUM_STORE", str(store.root))

    def runs(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["locum distance", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return runs


Run = Callable[..., tuple[int, str, str]]


def test_scans_like_the_members_are_natural(run: Run, tmp_path: Path) -> None:
    for seed in range(10, 16):
        save(tmp_path, f"p{seed}.png", pixels(seed))
    code, said, errors = run("organ", tmp_path)
    assert (code, errors) == (0, "")
    lines = said.splitlines()
    assert lines[0] == "organ@1: 6 scans"
    assert [line.split()[0] for line in lines[3:9]] == [f"p{seed}.png" for seed in range(10, 16)]
    assert lines[9].split()[:2] == ["all", "together"]
    assert lines[-1] == "natural: these scans look like the members'; a lens would leave them as they are."


def test_inverted_scans_of_a_site_are_said_to_be_negated_and_its_masks_are_left_alone(
    run: Run, tmp_path: Path
) -> None:
    for seed in range(20, 24):
        save(tmp_path / "images", f"p{seed}.png", 255 - pixels(seed))
        save(tmp_path / "masks", f"p{seed}.png", (pixels(seed) > 100).astype(np.uint8))
    code, said, _ = run("organ", tmp_path, "--json", "--picture", tmp_path / "seen.svg")
    found = json.loads(said)
    assert code == 0
    assert [each["name"] for each in found["scans"]] == [f"p{seed}.png" for seed in range(20, 24)]
    assert [each["most"] for each in found["scans"]] == ["polarity"] * 4
    assert found["all"]["inverted_scans"] == 4
    assert found["lens"]["polarity"] == 1.0
    assert found["sentences"][0].startswith(
        "inverted: these scans look like the members' in negative; a lens"
    )
    assert "would negate them" in found["sentences"][0]
    names = [each.text for each in ElementTree.parse(tmp_path / "seen.svg").iter() if each.text]
    assert names.count("these scans") == 3
    # The files of the masks are no scans of the folder that has both.
    assert "masks" not in said


def test_what_cannot_be_read_is_named_and_skipped_and_the_exit_code_says_so(run: Run, tmp_path: Path) -> None:
    save(tmp_path, "good.png", pixels(20))
    save(tmp_path, "mask.png", (pixels(20) > 100).astype(np.uint8))
    (tmp_path / "cut.png").write_bytes((tmp_path / "good.png").read_bytes()[:200])
    code, said, errors = run("organ", tmp_path)
    assert code == 1
    assert said.startswith("organ@1: 1 scan\n")
    assert re.search(r"^skipped cut\.png: PNG: the file ends", errors, re.MULTILINE)
    assert "skipped mask.png: expected a scan, found 2 different values, as masks have" in errors
    (tmp_path / "good.png").unlink()
    code, said, errors = run("organ", tmp_path)
    assert (code, said) == (2, "")
    assert "expected scans that fit organ@1, found none:" in errors
    assert "Traceback" not in errors


def test_of_many_scans_some_evenly_spaced_are_measured_or_all(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "MOST_IMAGES", 3)
    for seed in range(7):
        save(tmp_path, f"p{seed}.png", pixels(seed))
    code, said, _ = run("organ", tmp_path)
    assert code == 0
    assert said.startswith("organ@1: 3 scans, evenly spaced among 7: --all measures all\n")
    assert re.findall(r"p\d\.png", said) == ["p1.png", "p3.png", "p5.png"]
    assert len(json.loads(run("organ", tmp_path, "--all", "--json")[1])["scans"]) == 7


def test_a_model_without_a_fingerprint_says_how_to_make_one(run: Run, tmp_path: Path, store: Store) -> None:
    save(tmp_path, "p.png", pixels(0))
    code, _, errors = run("unknown", tmp_path)
    assert code == 2
    assert f"locum store fingerprint unknown@1 FOLDER FOLDER --store {store.root}" in errors
    code, _, errors = run("part", tmp_path)
    assert (code, "it is a part: name organ" in errors) == (2, True)
    code, _, errors = run("heart", tmp_path)
    assert (code, "'heart' is not in the store" in errors) == (2, True)
    code, _, errors = run("organ", tmp_path / "none")
    assert (code, "expected a file, a folder or a glob" in errors) == (2, True)
    code, _, errors = run("organ", tmp_path, "--picture", "seen.png")
    assert (code, "ends in .svg" in errors) == (2, True)


def test_a_version_is_also_named_by_its_folder(run: Run, tmp_path: Path, store: Store) -> None:
    save(tmp_path, "p.png", pixels(0))
    code, said, _ = run(Path(str(store.root)) / "organ" / "1", tmp_path / "p.png", "--store", "elsewhere")
    assert (code, said.splitlines()[0]) == (0, "organ@1: 1 scan")


def test_a_model_that_no_lens_is_fitted_to_says_so(run: Run, tmp_path: Path) -> None:
    save(tmp_path, "p.png", 255 - pixels(0))
    code, said, _ = run("kinds", tmp_path, "--json")
    found = json.loads(said)
    assert (code, found["lens"]) == (0, None)
    assert found["sentences"] == [
        "inverted: these scans look like the members' in negative; Locum fits no lens to this model."
    ]


def test_scans_that_show_something_else_are_refused_a_lens(run: Run, tmp_path: Path) -> None:
    rows, columns = np.mgrid[:SIDE, :SIDE] // 8
    for seed in range(4):
        board = 60 + 90 * ((rows + columns) % 2) + np.random.default_rng(seed).normal(0, 12, (SIDE, SIDE))
        save(tmp_path, f"p{seed}.png", np.clip(board, 0, 255).astype(np.uint8))
    [sentence, *_] = json.loads(run("organ", tmp_path, "--json")[1])["sentences"]
    assert sentence.startswith("far: these scans are not like the members'")
    assert "a lens would be refused: these scans do not show what the members' show" in sentence


def test_names_move_no_cursor_and_are_no_markup(run: Run, tmp_path: Path) -> None:
    save(tmp_path, "a[red]\x1b[2Jb.png", pixels(0))
    _, said, _ = run("organ", tmp_path)
    assert "\x1b" not in said
    assert "a[red][2Jb.png" in said


def test_the_picture_has_the_curves_of_the_members_and_of_the_scans(store: Store, tmp_path: Path) -> None:
    save(tmp_path, "p.png", pixels(30))
    model: Artefact = report.model_of(store, "organ")
    found = report.measure(store, model, str(tmp_path), Limits(), every=False)
    text = drawn(found)
    root = ElementTree.fromstring(text)
    kinds = [
        each.get("class") for each in root.iter() if (each.get("class") or "").startswith(("line", "band"))
    ]
    # Per figure a band, and of each line itself and its mark above the figure.
    assert kinds == ["band", *["line line-0"] * 2, *["line line-1"] * 2] * 2
    grids = [each for each in root.iter() if (each.get("fill") or "").startswith("rgb")]
    assert len(grids) == 2 * 36
    assert len(text) < 20_000
    assert io.StringIO(text).readline().startswith('<svg xmlns="http://www.w3.org/2000/svg"')


def test_files_of_channels_are_one_scan_and_a_case_without_one_is_named(
    run: Run, tmp_path: Path, store: Store
) -> None:
    whole = Normalisation(scope="volume", method="zscore")
    task = Task(
        name="brain",
        labels={"lesion": (1,)},
        channels=tuple(Channel(name=name, normalisation=whole) for name in ("T1", "FLAIR")),
        geometry=VolumeGeometry(spacing=None, patch=(16, 16, 16)),
    )

    def volume(seed: int) -> NDArray[np.int16]:
        planes = [pixels(100 * seed + plane)[::2, ::2] for plane in range(16)]
        return np.stack(planes, axis=-1).astype(np.int16)

    patients = ((seed, np.stack([volume(seed), -volume(seed)])[None].astype(np.float32)) for seed in range(4))
    manifest = ModelManifest(
        name="brain",
        task=task,
        network=NetworkSpec(name="graph", arguments={}),
        lineage=Lineage(method="imported", run="test", sites=(), rounds=0, seed=0),
        statistics=ReferenceStatistics(
            count=0, kinds={"2-channel volume": 1}, ranges={"first_mm": Range(low=2, high=2)}
        ),
    )
    known = Fingerprint.of_one(seen_of(patients)).to_bytes()
    store.publish(manifest, {WEIGHTS: b"", GRAPH: graph_of("brain"), FINGERPRINT: known})
    for name, seed, sign in (("a_T1", 9, 1), ("a_FLAIR", 9, -1), ("b_0000", 8, 1), ("b_0001", 8, -1)):
        (tmp_path / f"{name}.nii").write_bytes(nifti1(sign * volume(seed)))
    (tmp_path / "c_T1.nii").write_bytes(nifti1(volume(7)))
    code, said, errors = run("brain", tmp_path, "--json")
    found = json.loads(said)
    assert code == 1
    assert [(each["name"], each["spacing"], each["size"]) for each in found["scans"]] == [
        ("a", 1.0, None),
        ("b", 1.0, None),
    ]
    assert "skipped c: expected the channels T1, FLAIR, found c_T1.nii: FLAIR is missing" in errors
    assert found["all"]["most"] is None
    assert found["sentences"][-1].startswith("The model knows the scans of one group alone")
