"""A version leaves as an onnx file that answers prepared scans as the version does, with its lens."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from typer.testing import CliRunner

from model_store.artefact import Artefact
from model_store.graphs import check_graph
from model_store.lens import LENS, Lens, lens_of
from model_store.manifest import GRAPH, WEIGHTS, Lineage, ModelManifest, NetworkSpec, RoutingSpaceManifest
from model_store.store import Store
from model_store.task import Task
from tests.unit.model_store.lens.test_graph import drawn, textures
from training.errors import ImportRefused
from training.exchange import to_bundle
from training.exchange.__main__ import app
from training.exchange.to_onnx import _before, write

SLICES = Task.model_validate(
    {
        "name": "organ",
        "labels": {"organ": [1]},
        "normalisation": {"scope": "volume", "percentiles": [1, 99]},
        "size": [48, 32],
    }
)
VOLUMES = Task.model_validate(
    {
        "name": "organ",
        "labels": {"organ": [1]},
        "normalisation": {"steps": [{"step": "rescale", "window": [-57, 164], "clip": True}]},
        "geometry": {"spacing": [1.5, 1.5, 2], "patch": [16, 16, 16], "normalise": "after"},
    }
)


def published(root: Path, task: Task, graph: bytes, lens: Lens | None = None) -> Artefact:
    manifest = ModelManifest(
        name="organ",
        task=task,
        network=NetworkSpec(name="graph", arguments={}),
        lineage=Lineage(method="imported", run="r", sites=(), rounds=0, seed=0),
    )
    more = {} if lens is None else {LENS: lens.to_bytes()}
    return Store(root).publish(manifest, {WEIGHTS: b"", GRAPH: graph, **more})


def export(root: Path, out: Path) -> Any:
    return CliRunner().invoke(app, ["export", "onnx", "organ@1", str(out), "--store", str(root)])


def probabilities(content: bytes, images: Any) -> Any:
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return session.run(["probabilities"], {"image": images})[0]


def test_a_version_with_a_lens_answers_as_the_service_does(
    tmp_path: Path, threshold_graph: Callable[..., bytes]
) -> None:
    steps = ("polarity", "field", "spectrum", "quantiles")
    version = published(tmp_path / "store", SLICES, threshold_graph(0.5), drawn(0, 1, steps))
    out = tmp_path / "new" / "organ.onnx"
    done = export(tmp_path / "store", out)
    assert done.output.splitlines() == [
        f"exported organ@1 to {out}",
        "  input image: float32 [B, 1, 48, 32]",
        "  output probabilities: float32 [B, 2, H, W]",
        "  before it: axial slices; clipped to percentiles 1 to 99 of each volume; less the mean of each "
        "volume, divided by the deviation of each volume; each slice resized to 48 x 32 (height x width, "
        "bilinear)",
        "  in it: the lens (polarity, field, spectrum, quantiles)",
        "  its softmax is written in passes: a receipt names the version's own graph",
        "  a run takes all images of one scan, and of no other: the lens negates all or none",
    ]
    images, lens = textures(0, 3, 1, 48, 32), lens_of(version)
    images /= images.std(axis=(2, 3), keepdims=True)
    assert lens is not None
    np.testing.assert_allclose(
        probabilities(out.read_bytes(), images),
        probabilities(version.read(GRAPH), lens.apply(images)),
        atol=1e-5,
    )


def test_a_version_without_a_lens_has_its_softmax_written_in_passes_and_nothing_is_overwritten(
    tmp_path: Path, threshold_graph: Callable[..., bytes]
) -> None:
    version = published(tmp_path / "store", SLICES, threshold_graph())
    out = tmp_path / "organ.onnx"
    done = export(tmp_path / "store", out)
    assert "in it" not in done.output
    exported = check_graph(out.read_bytes(), "exported")
    assert [each.op_type for each in exported.graph.node if each.op_type in ("Softmax", "ReduceMax")] == [
        "ReduceMax"
    ]
    images = textures(0, 3, 1, 48, 32)
    expected = probabilities(version.read(GRAPH), images)
    np.testing.assert_allclose(probabilities(out.read_bytes(), images), expected, atol=1e-6)
    assert version.read(GRAPH) == threshold_graph()
    again = export(tmp_path / "store", out)
    assert isinstance(again.exception, ImportRefused)
    assert f"{out}: expected a new file, found one" in str(again.exception)
    (tmp_path / "file").touch()
    assert isinstance(export(tmp_path / "store", tmp_path / "file" / "organ.onnx").exception, ImportRefused)


def test_a_version_of_volumes_has_no_lens_in_front_of_its_graph(
    tmp_path: Path, threshold_graph: Callable[..., bytes]
) -> None:
    lens = Lens(axes=3, channels=1, field=((0.1,) * 216,))
    version = published(tmp_path / "store", VOLUMES, threshold_graph(), lens)
    out = tmp_path / "organ.onnx"
    with pytest.raises(ImportRefused, match="organ@1: its lens sees a volume as a whole"):
        raise export(tmp_path / "store", out).exception
    assert not out.exists()
    with pytest.raises(ImportRefused, match=r"lens\.json.*: export its parent"):
        to_bundle.write(version, tmp_path / "bundle")


def test_a_composite_is_refused_with_the_name_of_a_part(
    tmp_path: Path, threshold_graph: Callable[..., bytes]
) -> None:
    part = published(tmp_path / "store", SLICES, threshold_graph())
    manifest = RoutingSpaceManifest(
        name="space",
        task=SLICES,
        lineage=part.manifest.lineage,
        global_model=part.digest,
        inside={"north": part.digest},
    )
    space = Store(tmp_path / "store").publish(manifest, {})
    with pytest.raises(ImportRefused, match=r"found kind routing-space.*; of a composite, name its part"):
        write(space, tmp_path / "space.onnx")


def test_a_bundle_of_a_version_with_a_lens_is_refused_by_the_name_of_this_command(
    tmp_path: Path, threshold_graph: Callable[..., bytes]
) -> None:
    version = published(tmp_path / "store", SLICES, threshold_graph(), drawn(0, 1, ("field",)))
    said = re.escape("`python -m model_store export onnx` writes its graph with the lens in front")
    with pytest.raises(ImportRefused, match=said):
        to_bundle.write(version, tmp_path / "bundle")


_T1 = {"name": "T1", "normalisation": {"within": "nonzero"}}
_CT = {"name": "CT", "normalisation": {"method": "fixed", "mean": 5, "std": 2}}
_MINMAX = {"method": "minmax", "window": [0, 80]}


@pytest.mark.parametrize(
    ("task", "changes", "said"),
    [
        (
            VOLUMES,
            {},
            "axes RAS; resampled to 1.5 x 1.5 x 2 mm (linear); [-57.0, 164.0] mapped to [0.0, 1.0], "
            "clipped; windows that overlap by 0.5 (gaussian)",
        ),
        (
            VOLUMES,
            {"channels": [_T1, _CT]},
            "axes RAS; resampled to 1.5 x 1.5 x 2 mm (linear); T1: less the mean of the volume, divided by "
            "the deviation of the volume, nonzero alone; CT: less 5, divided by 2; windows that overlap by "
            "0.5 (gaussian)",
        ),
        (
            SLICES,
            {"normalisation": _MINMAX, "neighbours": 1},
            "axial slices; clipped to [0.0, 80.0]; least to most of each image mapped to [0.0, 1.0]; each "
            "slice resized to 48 x 32 (height x width, bilinear); with 1 neighbour on either side as "
            "channels",
        ),
    ],
)
def test_what_comes_before_the_graph_is_said(task: Task, changes: dict[str, Any], said: str) -> None:
    fields = task.model_dump(exclude={"normalisation"} if changes else None)
    assert "; ".join(_before(Task.model_validate({**fields, **changes}))) == said
