"""Choice of the backbone of a run, and errors when none fits."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from model_store.errors import PublishRefused
from model_store.manifest import GRAPH, WEIGHTS, ModelManifest, RoutingSpaceManifest, SsfPoolManifest
from model_store.store import Store
from personalization.networks import build, initialise
from tests.helpers.model_store.graphs import graph_of
from tests.helpers.training.backbones import LINEAGE, PICTURES, publish, unet, vit
from tests.helpers.training.sites import TASK
from training.backbones import find_backbone
from training.errors import ConfigurationError

CPU = torch.device("cpu")


def test_find_backbone_defaults_to_the_newest_global_model_of_the_task(tmp_path):
    old = publish(tmp_path, TASK, unet(TASK), "old")
    new = publish(tmp_path, TASK, unet(TASK, width=3), "new")
    publish(tmp_path, TASK.model_copy(update={"labels": {"other": (1,)}}), unet(TASK), "of-another-task")
    publish(tmp_path, TASK, unet(TASK), "of-a-site", site="s", role="inside")
    for artefact, time in ((old, 100), (new, 200)):
        os.utime(artefact.path / "manifest.json", (time, time))
    found = find_backbone(Store(tmp_path), None, TASK, "pool")
    assert found.reference == f"new@{new.digest}"
    assert found.load(CPU) is found.load(CPU)
    assert not any(parameter.requires_grad for parameter in found.load(CPU).parameters())
    assert find_backbone(Store(tmp_path), "old@1", TASK, "pool").reference == f"old@{old.digest}"


def test_find_backbone_of_a_routing_space_returns_its_global_model(tmp_path):
    part = publish(tmp_path, TASK, unet(TASK), "space.global", part_of="space")
    space = RoutingSpaceManifest(
        name="space", task=TASK, lineage=LINEAGE, global_model=part.digest, inside={"s": part.digest}
    )
    Store(tmp_path).publish(space, {})
    for asked in ("space", None):
        assert find_backbone(Store(tmp_path), asked, TASK, "pool").reference.endswith(part.digest)


def test_find_backbone_rejects_missing_and_unfit_models_with_advice(tmp_path):
    store = Store(tmp_path / "store")
    with pytest.raises(ConfigurationError, match=r"no global model to adapt of the task 'discs'; train one"):
        find_backbone(store, None, TASK, "pool")
    with pytest.raises(ConfigurationError, match=r"no global model.*weights of a ViT: --backbone FILE"):
        find_backbone(store, None, PICTURES, "pool")
    publish(store.root, TASK, unet(TASK), "small")
    with pytest.raises(ConfigurationError, match=r"'small@1' cannot be.*\n.*a classification, found a unet"):
        find_backbone(store, "small", PICTURES, "pool")
    with pytest.raises(ConfigurationError, match=r"small@1: expected a network for a classification"):
        find_backbone(store, None, PICTURES, "pool")
    with pytest.raises(ConfigurationError, match=r"'absent' is not in the store.*file of weights ends in"):
        find_backbone(store, "absent", TASK, "pool")
    other = PICTURES.model_copy(update={"size": (24, 24), "channels": 3, "colour": "replicate"})
    publish(store.root, PICTURES, vit(PICTURES), "vit")
    with pytest.raises(ConfigurationError, match=r"expected 3 input .* found 1\n.*size \[24, 24\], found"):
        find_backbone(store, "vit", other, "pool")


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_find_backbone_publishes_a_weights_file_as_part_of_the_pool(tmp_path, suffix):
    network = initialise(build("vit", **vit(PICTURES).arguments), torch.Generator().manual_seed(1))
    file = tmp_path / f"vit.{suffix}"
    state = {name: tensor for name, tensor in network.state_dict().items() if not name.startswith("head")}
    if suffix == "npz":
        np.savez(file, **{name: tensor.numpy() for name, tensor in state.items()})
    else:
        save_file(state, file)
    store = Store(tmp_path / "store")
    found = find_backbone(store, str(file), PICTURES, "pool")
    manifest = found.manifest
    assert (manifest.name, manifest.part_of, manifest.role) == ("pool.backbone", "pool", "backbone")
    loaded = found.load(CPU).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    assert find_backbone(store, str(file), PICTURES, "pool") == found
    assert store.versions.numbers("pool.backbone") == [1]


def test_find_backbone_rejects_files_that_are_not_a_vit(tmp_path):
    store = Store(tmp_path / "store")
    (tmp_path / "vit.npz").write_bytes(b"not an archive")
    np.savez(tmp_path / "other.npz", weight=np.zeros(3))
    for name, message in (
        ("vit.npz", r"vit\.npz cannot be the backbone"),
        ("other.npz", "expected the weights of a ViT"),
        ("absent.safetensors", r"absent\.safetensors cannot be the backbone"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            find_backbone(store, str(tmp_path / name), PICTURES, "pool")
    with pytest.raises(ConfigurationError, match="a ViT is for classification, 'discs' is a segmentation"):
        find_backbone(store, str(tmp_path / "other.npz"), TASK, "pool")
    # The store would reject this name later.
    with pytest.raises(ConfigurationError, match=r"'p{120}\.backbone', of 129"):
        find_backbone(store, str(tmp_path / "other.npz"), PICTURES, "p" * 120)


def _pool(backbone, spec, **fields):
    return SsfPoolManifest(
        name="pool", task=TASK, lineage=LINEAGE, backbone=backbone, network=spec, entries=3, top=2, **fields
    )


def test_publishing_a_pool_with_another_backbone_is_rejected(tmp_path):
    store, files = Store(tmp_path), {WEIGHTS: b"w", GRAPH: graph_of("g")}
    right, wrong = (publish(tmp_path, TASK, unet(TASK, width=w), f"w{w}") for w in (2, 3))
    with pytest.raises(PublishRefused, match="fits only the backbone that it was trained on"):
        store.publish(_pool(wrong.digest, unet(TASK)), files)
    with pytest.raises(PublishRefused, match="its part 'backbone' cannot be used"):
        store.publish(_pool(f"sha256:{'0' * 64}", unet(TASK)), files)
    with pytest.raises(PublishRefused, match="a ssf-pool needs"):
        store.publish(_pool(right.digest, unet(TASK)), {WEIGHTS: b"w"})
    published = store.publish(_pool(right.digest, unet(TASK), usage=(1, 0, 2)), files)
    assert store.open("pool").manifest == published.manifest
    assert [str(found) for found in store.lineage.descendants(right.digest)] == ["pool@1"]
    assert isinstance(store.by_digest(published.manifest.backbone).manifest, ModelManifest)


@pytest.mark.parametrize("fields", [{"usage": (1, 2)}, {"part_of": "other"}])
def test_pool_manifest_with_contradicting_fields_is_rejected(fields):
    with pytest.raises(ValueError, match=r"count for each|cannot be a part of another"):
        _pool(f"sha256:{'0' * 64}", unet(TASK), **fields)
