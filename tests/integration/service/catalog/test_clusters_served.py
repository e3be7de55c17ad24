"""What `/classify` answers of clusters that FedBiCross trained, against their graphs run by themselves.

Those are run on what the documentation says that a network sees, which `network_input` works out by itself.
"""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from model_store.manifest import GRAPH, WEIGHTS, ClustersManifest, ModelManifest
from model_store.store import Store
from personalization.networks import build
from personalization.state import from_safetensors
from service.worker.runner import run_job
from tests.helpers.service import network_input
from tests.helpers.service.clusters_federation import EXPORTED, SHAPES, SITES
from tests.helpers.service.network_input import file_of, nifti_of

Pixels = NDArray[np.uint8]
# The reference is float64 and Pillow's resizing float32: answers differ by some 1e-7. FAR is what wrong
# pixels, or another network, make of one at least.
TOLERANCE, FAR = 2e-6, 1e-4
LUMINANCE = (0.299, 0.587, 0.114)  # ITU-R BT.601
CLUSTER, MEMBER = {"personalization": "cluster"}, {"personalization": "member"}
WHO = {"actor": "ada", "reason": "looked at it"}


@pytest.fixture(scope="module")
def api(start: Callable[..., Any], clusters_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A hospital of each member's site, and `oak` from outside."""
    api = start(shutil.copytree(clusters_store, tmp_path_factory.mktemp("copy") / "store"))
    for site in SITES["shapes"]:
        registered = api.client.put(f"/hospitals/at-{site}", json={"name": site, "site": site})
        assert registered.status_code == 201
    assert api.client.put("/hospitals/oak", json={"name": "Oak"}).status_code == 201
    return api


@pytest.fixture(scope="module")
def grey() -> Pixels:
    """[37, 53]: a bright blob off the centre, on a slope, in noise: turned or smoothed it is another."""
    rows, columns = np.mgrid[:37, :53]
    blob = 110 * np.exp(-(((rows - 11) / 5) ** 2) - ((columns - 36) / 9) ** 2)
    noise = np.random.default_rng(5).normal(0, 30, (37, 53))
    return np.clip(60 + 0.9 * columns + blob + noise, 0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def colour(grey: Pixels) -> Pixels:
    """[37, 53, 3], each channel another picture."""
    return np.stack([grey, 40 + grey[::-1, ::-1] // 2, 200 - grey[:, ::-1] // 2], axis=-1)


def seen(pixels: NDArray[Any]) -> NDArray[np.float32]:
    return network_input.seen(pixels, SHAPES.size)


def run_alone(store: Store, name: str, image: NDArray[np.float32]) -> NDArray[np.float64]:
    """[K]: what the graph of `name` gives by itself."""
    session = onnxruntime.InferenceSession(store.open(name).read(GRAPH), providers=["CPUExecutionProvider"])
    (found,) = session.run(["probabilities"], {"image": image})
    assert found.shape == (1, 3)
    return found[0].astype(np.float64)


def run_network(store: Store, name: str, image: NDArray[np.float32]) -> NDArray[np.float64]:
    """[K]: what the weights of `name` give, without its graph."""
    artefact = store.open(name)
    manifest = artefact.manifest
    assert isinstance(manifest, ModelManifest)
    network = build(manifest.network.name, **manifest.network.arguments).eval()
    network.load_state_dict(from_safetensors(artefact.read(WEIGHTS)))
    with torch.no_grad():
        found: NDArray[np.float64] = network(torch.from_numpy(image)).double().softmax(dim=1)[0].numpy()
    return found


def probabilities_of(answer: httpx.Response) -> NDArray[np.float64]:
    assert answer.status_code == 200, answer.text
    return np.array(list(answer.json()["probabilities"].values()))


def pick_and_assign(api: Any, scans: list[bytes]) -> str:
    """The cluster that oak's scans pick; its model is assigned to oak."""
    files = [("scans", (f"{number}", scan)) for number, scan in enumerate(scans)]
    sent = api.client.post("/hospitals/oak/adaptations", files=files, data={"model": "shapes"})
    assert sent.status_code == 202, sent.text
    job = sent.headers["Location"].rsplit("/", 1)[1]
    run_job(job, api.settings)
    done = api.client.get(f"/jobs/{job}").json()
    assert done["state"] == "succeeded", done["reason"]
    decision = {"version": done["candidate"]["reference"], **WHO, "override": True}
    assigned = api.client.put("/hospitals/oak/serving/shapes", json=decision, headers={"If-Match": '"0"'})
    assert assigned.status_code == 200, assigned.text
    cluster: str = done["result"]["cluster"]
    return cluster


def cases(home: Mapping[str, str]) -> list[tuple[dict[str, str], str, str]]:
    """The query, the artefact with the graph that answers, its owner; `home` is the cluster of each site."""
    found = [({**CLUSTER, "cluster": k}, f"shapes.cluster-{k}", f"cluster; cluster={k}") for k in ("1", "2")]
    for site, k in home.items():
        own = f"shapes.cluster-{k}", f"cluster; cluster={k}"
        found.append(({**CLUSTER, "hospital": f"at-{site}"}, *own))
        if site in EXPORTED["shapes"]:
            own = f"shapes.{site}", f"member; site={site}"
            found += [({**MEMBER, "site": site}, *own), ({**MEMBER, "hospital": f"at-{site}"}, *own)]
        found.append(({"hospital": f"at-{site}"}, *own))
    of_oak = "shapes.at-oak", "hospital; hospital=oak"
    return [
        *found,
        ({"hospital": "oak"}, *of_oak),
        ({"hospital": "oak", "personalization": "hospital"}, *of_oak),
        ({"model": "shapes.at-oak@1"}, *of_oak),
        ({**CLUSTER, "cluster": "2", "hospital": "oak"}, "shapes.cluster-2", "cluster; cluster=2"),
        ({"model": "stains"}, "stains.cluster-1", "global"),
        ({"model": "stains", "personalization": "global"}, "stains.cluster-1", "global"),
        ({"model": "stains", **CLUSTER, "cluster": "1"}, "stains.cluster-1", "cluster; cluster=1"),
        ({"model": "stains", **MEMBER, "site": "maple"}, "stains.maple", "member; site=maple"),
    ]


def test_classify_with_each_part_equals_its_graph_run_alone(api: Any, grey: Pixels, colour: Pixels) -> None:
    store = api.store
    manifest = store.open("shapes").manifest
    assert isinstance(manifest, ClustersManifest)
    assert set(manifest.assignment.values()) == {"1", "2"}
    unassigned = api.classify(file_of(grey, "PNG"), model="shapes", hospital="oak")
    assert (unassigned.status_code, unassigned.json()["type"]) == (422, "urn:locum:problem:no-global-model")
    picked = pick_and_assign(api, [file_of(np.roll(grey, 7 * shift, axis=1), "PNG") for shift in range(4)])

    answered: dict[str, NDArray[np.float64]] = {}
    for asked, name, owner in cases(manifest.assignment):
        fields = {"model": "shapes", **asked}
        pixels = colour if fields["model"] == "stains" else grey
        response = api.classify(file_of(pixels, "PNG"), **fields)
        assert response.headers.get("locum-personalization") == owner, (asked, response.text)
        assert response.headers["locum-graph"] == store.open(name).manifest.files[GRAPH].sha256, asked
        expected = run_alone(store, name, seen(pixels))
        np.testing.assert_allclose(
            probabilities_of(response), expected, rtol=0, atol=TOLERANCE, err_msg=str(asked)
        )
        trained = run_network(store, name, seen(pixels))
        np.testing.assert_allclose(expected, trained, rtol=0, atol=FAR / 10, err_msg=name)
        assert response.json()["predicted"] == SHAPES.class_names[int(expected.argmax())]
        answered[name] = probabilities_of(response)

    names = store.versions.names()
    assert set(answered) == {name for name in names if GRAPH in store.open(name).manifest.files}
    # Each answer differs from all others but its copy, so the figures show which one answered.
    of_oak = answered.pop("shapes.at-oak")
    np.testing.assert_array_equal(of_oak, answered[f"shapes.cluster-{picked}"])
    names = sorted(answered)
    for number, name in enumerate(names):
        for other in names[:number]:
            assert abs(answered[name] - answered[other]).max() > FAR, (name, other)


@pytest.mark.parametrize(
    ("fields", "status", "slug"),
    [
        ({"personalization": "global"}, 422, "no-global-model"),
        ({"personalization": "global", "hospital": "at-elm"}, 422, "no-global-model"),
        ({}, 422, "no-global-model"),
        ({"personalization": "member", "site": "fir"}, 404, "site-not-found"),
        ({"personalization": "cluster", "cluster": "3"}, 404, "cluster-not-found"),
        ({"personalization": "hospital", "hospital": "at-elm"}, 404, "no-adapted-version"),
    ],
)
def test_classify_with_an_absent_part_is_rejected(
    api: Any, grey: Pixels, fields: dict[str, str], status: int, slug: str
) -> None:
    refused = api.classify(file_of(grey, "PNG"), model="shapes", **fields)
    assert (refused.status_code, refused.json()["type"]) == (status, f"urn:locum:problem:{slug}")


@pytest.mark.parametrize(("rows", "columns"), [(37, 53), (11, 13)], ids=["larger", "smaller"])
@pytest.mark.parametrize(("model", "site"), [("shapes", "elm"), ("stains", "maple")])
def test_classify_of_the_same_pixels_is_equal_in_every_format(
    api: Any,
    grey: Pixels,
    colour: Pixels,
    make_nifti: Callable[..., bytes],
    model: str,
    site: str,
    rows: int,
    columns: int,
) -> None:
    pixels = (colour if model == "stains" else grey)[:rows, -columns:]
    volume = nifti_of(pixels, make_nifti)
    files = {
        "PNG": file_of(pixels, "PNG"),
        "TIFF": file_of(pixels, "TIFF"),
        "TIFF, packed": file_of(pixels, "TIFF", compression="tiff_lzw"),
        "NIfTI": volume,
        "NIfTI, packed": gzip.compress(volume),
    }
    answers = {
        name: api.classify(scan, model=model, personalization="member", site=site)
        for name, scan in files.items()
    }
    expected = run_alone(api.store, f"{model}.{site}", seen(pixels))
    for name, answer in answers.items():
        np.testing.assert_array_equal(
            probabilities_of(answer), probabilities_of(answers["PNG"]), err_msg=name
        )
        report, volume_sent = answer.json(), name.startswith("NIfTI")
        assert report["shape"] == ([columns, rows, 1] if volume_sent else [rows, columns])
        assert (report["slices"] is not None) == volume_sent
    np.testing.assert_allclose(probabilities_of(answers["PNG"]), expected, rtol=0, atol=TOLERANCE)


def test_colour_image_reaches_a_grey_network_as_luminance(api: Any, colour: Pixels) -> None:
    fields = {"model": "shapes", "personalization": "member", "site": "elm"}
    found = probabilities_of(api.classify(file_of(colour, "PNG"), **fields))
    expected = run_alone(api.store, "shapes.elm", seen(colour.astype(np.float64) @ LUMINANCE))
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
    for wrong in (colour.astype(np.float64).mean(axis=-1), colour.astype(np.float64) @ LUMINANCE[::-1]):
        assert abs(run_alone(api.store, "shapes.elm", seen(wrong)) - expected).max() > FAR


@pytest.mark.parametrize("name", ["shapes.elm", "stains.maple"])
def test_wrongly_prepared_pixels_give_other_answers(
    api: Any, grey: Pixels, colour: Pixels, name: str
) -> None:
    """The comparisons above can fail: whatever else might reach the network is answered otherwise."""
    pixels = colour if name == "stains.maple" else grey
    right, image, size = seen(pixels), Image.fromarray(pixels), SHAPES.size[::-1]
    wrong = {
        "nearest": seen(np.asarray(image.resize(size, Image.Resampling.NEAREST))),
        "bicubic": seen(np.asarray(image.resize(size, Image.Resampling.BICUBIC))),
        "normalised after resizing": seen(np.asarray(image.resize(size, Image.Resampling.BILINEAR))),
        "transposed": seen(pixels.swapaxes(0, 1)),
        "left for right": right[..., ::-1],
        "upside down": right[..., ::-1, :],
        "cut to the network's shape": seen(pixels[:, :30]),
        "as it was stored": np.float32(pixels.std()) * right + np.float32(pixels.mean()),
    }
    if name == "stains.maple":
        wrong["blue for red"] = right[:, ::-1]
    expected = run_alone(api.store, name, right)
    moved = {
        what: float(abs(run_alone(api.store, name, np.ascontiguousarray(image)) - expected).max())
        for what, image in wrong.items()
    }
    assert min(moved.values()) > FAR, moved
