"""From `training.federate --method fedoap` to `/segment`: what answers is the published graph."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from typing import Any

import httpx
import nibabel as nib
import numpy as np
import onnxruntime
import pytest
import typer
import yaml
from numpy.typing import NDArray
from typer.testing import CliRunner

from model_store.manifest import GRAPH, ModelManifest
from model_store.preprocessing import prepare, to_slices
from model_store.scan import decode
from tests.helpers.service.joining_federation import drawn_scans
from training.federate import federate
from training.phantom import write_federation

METHOD = {"width": 2, "heads": 4, "rounds": 3, "local_steps": 8, "batch_size": 8, "fine_tune_rounds": 1}
SOURCES = ("own", "aster", "birch", "cedar")
# A patient that no site has seen, on a scanner with slices of the network's own size.
((SCAN, _),) = drawn_scans(1, "aster").values()
ASKED = [
    ({"personalization": "global"}, "global", "global", None),
    ({"personalization": "member", "site": "aster"}, "aster", "member; site=aster", "aster"),
    ({"hospital": "at-birch"}, "birch", "member; site=birch", "birch"),
    ({"hospital": "outside"}, "global", "global", None),
]


@pytest.fixture(scope="module")
def api(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A service on the store of a run from the command line; `cedar` did not agree to the export."""
    root = tmp_path_factory.mktemp("federated")
    data = write_federation(root / "data", ("aster", "birch", "cedar"), patients_per_site=3, size=32)
    (root / "run.yaml").write_text(yaml.safe_dump({"method": {**METHOD, "learning_rate": 0.01}}))
    app = typer.Typer()
    app.command()(federate)
    given = {"data": data, "out": root / "store", "config": root / "run.yaml", "consent": "aster,birch"}
    options = [str(word) for name, value in given.items() for word in (f"--{name}", value)]
    with pytest.MonkeyPatch.context() as patched:
        # Overlays are drawn in processes of their own, which take seconds to start.
        patched.setattr("training.report.write_site_pages", lambda _result, _folder: {})
        done = CliRunner().invoke(app, ["--method", "fedoap", "--workers", "0", *options])
    assert done.exit_code == 0, done.output
    api = start(root / "store")
    for name, site in (("at-birch", "birch"), ("outside", None)):
        assert api.client.put(f"/hospitals/{name}", json={"name": name, "site": site}).status_code == 201
    return api


def run_alone(api: Any, label: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Probabilities [N, 2, H, W] and attention [N, 4]: what the published graph gives for the slices."""
    artefact = api.store.open(f"phantom.{label}")
    assert isinstance(artefact.manifest, ModelManifest)
    assert artefact.manifest.sources == SOURCES
    session = onnxruntime.InferenceSession(artefact.read(GRAPH), providers=["CPUExecutionProvider"])
    slices = prepare(decode(SCAN), artefact.manifest.task).slices
    probabilities, attention = session.run(["probabilities", "attention"], {"image": slices})
    return probabilities, attention


def mask_of(answer: httpx.Response, api: Any) -> NDArray[np.uint8]:
    """The mask of an answer by slices [N, H, W], as the network saw them."""
    assert answer.status_code == 200, answer.text
    voxels = np.asarray(nib.Nifti1Image.from_bytes(gzip.decompress(answer.content)).dataobj)
    geometry = prepare(decode(SCAN), api.store.open("phantom.global").manifest.task).geometry
    assert geometry.slices[1:] == (32, 32)  # the network's own size: nothing was interpolated
    return np.asarray(to_slices(voxels, geometry), np.uint8)


@pytest.mark.parametrize(("asked", "label", "header", "own"), ASKED)
def test_segment_with_each_part_equals_its_graph_run_alone(
    api: Any, asked: dict[str, str], label: str, header: str, own: str | None
) -> None:
    probabilities, attention = run_alone(api, label)
    answer = api.segment(SCAN, model="phantom", **asked)
    assert answer.headers["locum-personalization"] == header
    assert answer.headers["locum-graph"] == api.store.open(f"phantom.{label}").manifest.files[GRAPH].sha256
    np.testing.assert_array_equal(mask_of(answer, api), probabilities.argmax(axis=1))
    report = api.segment(SCAN, model="phantom", output="json", **asked).json()
    assert tuple(report["attention"]) == SOURCES
    np.testing.assert_allclose(list(report["attention"].values()), attention.mean(axis=0), atol=1e-6)
    assert [source for source, share in report["attention"].items() if share == 0] == ([own] if own else [])
    (label_name,) = report["labels"]
    assert report["labels"][label_name]["voxels"] == int(probabilities.argmax(axis=1).sum())


def test_parts_give_different_masks(api: Any) -> None:
    masks = [run_alone(api, label)[0].argmax(axis=1) for label in ("global", "aster", "birch")]
    assert all(0 < mask.mean() < 1 for mask in masks)
    assert not any(np.array_equal(masks[i], masks[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
