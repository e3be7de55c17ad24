"""A store in a bucket: what a folder does not have (conditional writes, a cache, a service that fails)."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import obstore
import pytest
from obstore.store import S3Store

from model_store import bucket
from model_store.artefact import Artefact
from model_store.bucket import Bucket
from model_store.errors import ArtefactDamaged, PublishRefused, StoreUnavailable
from model_store.store import Store
from tests.helpers.model_store.graphs import graph_of
from tests.unit.model_store.test_store import files, model


@pytest.fixture
def objects(bucket_url: str) -> S3Store:
    """The bucket itself."""
    return S3Store.from_url(bucket_url, client_options={"allow_http": True})


@pytest.fixture
def store(bucket_url: str, tmp_path: Path) -> Store:
    return Store(bucket_url, tmp_path / "cache")


def paths(objects: S3Store, prefix: str) -> list[str]:
    return [each["path"] for batch in obstore.list(objects, prefix) for each in batch]


def test_publishers_at_the_same_time_get_a_number_each_and_equal_content_once(
    bucket_url: str, tmp_path: Path
) -> None:
    contents = ["same", "same", "a", "b", "c", "same"]
    together = Barrier(len(contents))

    def publish(content: str) -> Artefact:
        store = Store(bucket_url, tmp_path / "cache")
        together.wait()
        return store.publish(model(), files(content))

    with ThreadPoolExecutor(len(contents)) as pool:
        published = list(pool.map(publish, contents))
    store = Store(bucket_url, tmp_path / "cache")
    assert store.versions.numbers("brain") == [1, 2, 3, 4]
    assert len({artefact.version for artefact in published if published[0].digest == artefact.digest}) == 1
    for content, artefact in zip(contents, published, strict=True):
        assert store.open(str(artefact)).read("weights.safetensors") == content.encode()


def test_content_that_another_publishes_meanwhile_is_one_version(
    store: Store, bucket_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = store._backend
    put = type(backend)._put
    others: list[Artefact] = []

    def put_after_another(self: Any, path: str, data: bytes) -> None:
        if self is backend and not others:
            others.append(Store(bucket_url).publish(model(), files("own")))
        put(self, path, data)

    monkeypatch.setattr(type(backend), "_put", put_after_another)
    assert store.publish(model(), files("own")).version == 1
    assert len(others) == 1
    assert store.versions.numbers("brain") == [1]


def test_a_publisher_that_loses_the_number_asks_admission_again(store: Store, bucket_url: str) -> None:
    asked = []

    def admit() -> None:
        asked.append(len(asked))
        if len(asked) == 1:
            Store(bucket_url).publish(model(), files("another's"))

    assert store.publish(model(), files("own"), admit).version == 2
    assert asked == [0, 1]


def test_a_publisher_that_was_killed_leaves_no_version(store: Store, objects: S3Store) -> None:
    class Killed(BaseException):
        pass

    def admit() -> None:
        raise Killed

    with pytest.raises(Killed):
        store.publish(model(), files(), admit)
    assert store.versions.names() == []
    assert paths(objects, "content/")
    # It may still be writing, for all that is known.
    assert store.prune() == []
    assert store.publish(model(), files()).version == 1


def test_content_without_a_version_is_pruned_after_an_hour(
    store: Store, objects: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = store.publish(model(), files())
    obstore.put(objects, f"content/{'0' * 64}/graph.onnx", b"orphan")
    monkeypatch.setattr(bucket, "_ABANDONED", -bucket._ABANDONED)
    assert [path.rsplit("/", 2)[1] for path in store.prune()] == ["0" * 64]
    kept.verify()


def test_a_service_without_conditional_writes_is_refused(
    store: Store, objects: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overwrite(store: S3Store, path: str, data: bytes, **_options: object) -> None:
        obstore_put(store, path, data)

    obstore_put = obstore.put
    monkeypatch.setattr(obstore, "put", overwrite)
    with pytest.raises(PublishRefused, match="ignores 'If-None-Match"):
        store.publish(model(), files())
    assert paths(objects, "versions/") == []


def test_a_changed_file_is_refused_when_it_is_fetched(
    store: Store, objects: S3Store, bucket_url: str
) -> None:
    artefact = store.publish(model(), files())
    (path,) = (path for path in paths(objects, "content/") if path.endswith("weights.safetensors"))
    obstore.put(objects, path, b"W")
    with pytest.raises(ArtefactDamaged, match=r"weights.safetensors in s3://.*expected sha256"):
        artefact.read("weights.safetensors")
    with pytest.raises(ArtefactDamaged, match=r"weights\.safetensors"):
        store.open("brain")
    obstore.delete(objects, path)
    with pytest.raises(ArtefactDamaged, match="found none"):
        artefact.read("weights.safetensors")
    assert Store(bucket_url).open("brain", verify=False).read("graph.onnx") == graph_of("w")


def test_publishing_damaged_content_again_repairs_the_bucket(
    store: Store, objects: S3Store, bucket_url: str, tmp_path: Path
) -> None:
    store.publish(model(), files())
    for path in paths(objects, "content/"):
        if path.endswith("weights.safetensors"):
            obstore.put(objects, path, b"W")
        if path.endswith("graph.onnx"):
            obstore.delete(objects, path)
    store.publish(model(), files())
    repaired = Store(bucket_url, tmp_path / "another").open("brain")
    assert repaired.version == 1
    assert repaired.read("weights.safetensors") == b"w"
    assert repaired.read("graph.onnx") == graph_of("w")


def test_a_version_that_points_outside_the_cache_is_refused(store: Store, objects: S3Store) -> None:
    obstore.put(objects, "versions/brain/1", b"sha256:../../etc")
    with pytest.raises(ArtefactDamaged, match="expected a digest"):
        store.open("brain@1")


def test_opening_reads_a_file_of_the_bucket_once(store: Store, objects: S3Store) -> None:
    artefact = store.publish(model(), files())
    assert artefact.read("graph.onnx") == graph_of("w")
    for path in paths(objects, "content/"):
        obstore.delete(objects, path)
    assert artefact.read("graph.onnx") == graph_of("w")


@pytest.mark.parametrize("damage", [b"", b"another graph", graph_of("W")])
def test_a_damaged_file_of_the_cache_is_fetched_again(
    store: Store, bucket_url: str, tmp_path: Path, damage: bytes
) -> None:
    store.publish(model(), files())

    def damaged() -> Artefact:
        artefact = Store(bucket_url, tmp_path / "cache").open("brain", verify=False)
        path = artefact.path_of("graph.onnx")
        path.unlink()
        path.write_bytes(damage)
        return artefact

    assert damaged().read("graph.onnx") == graph_of("w")
    damaged().verify()
    assert store.open("brain").path_of("graph.onnx").read_bytes() == graph_of("w")


@pytest.mark.parametrize("damage", [None, graph_of("W")])
def test_verify_finds_a_damaged_file_of_the_bucket_behind_an_intact_copy(
    store: Store, objects: S3Store, damage: bytes | None
) -> None:
    artefact = store.publish(model(), files())
    assert artefact.read("graph.onnx") == graph_of("w")
    (path,) = (path for path in paths(objects, "content/") if path.endswith("graph.onnx"))
    obstore.delete(objects, path)
    if damage is not None:
        obstore.put(objects, path, damage)
    with pytest.raises(ArtefactDamaged, match=r"graph\.onnx"):
        artefact.verify()


@pytest.mark.parametrize("file", ["manifest.json", "manifest.sha256"])
def test_a_damaged_manifest_of_the_cache_is_fetched_again(
    store: Store, bucket_url: str, tmp_path: Path, file: str
) -> None:
    published = store.publish(model(), files())
    path = published.path / file
    path.unlink()
    path.write_text("{}")
    assert Store(bucket_url, tmp_path / "cache").open("brain").manifest == published.manifest
    assert path.read_text() != "{}"


def test_the_cache_keeps_within_its_bound_but_not_at_the_cost_of_what_is_in_use(
    bucket_url: str, tmp_path: Path
) -> None:
    store = Store(bucket_url, tmp_path / "other")
    versions = [store.publish(model(), files(str(number) * 1000)) for number in range(3)]
    cache = tmp_path / "cache"
    backend = Bucket(bucket_url, cache, most_cached=2500)
    for artefact in versions:
        opened = backend.artefact("brain", artefact.version)
        path = opened.path_of("weights.safetensors")
        # As if it was asked for a while ago.
        os.utime(path, (time.time() - 3600 + artefact.version,) * 2)
    backend.artefact("brain", 1).path_of("graph.onnx")
    left = sorted(path.read_bytes()[:1] for path in cache.glob("*/weights.safetensors"))
    assert left == [b"2"]
    assert len(list(cache.glob("*/graph.onnx"))) == 1
    assert backend.artefact("brain", 1).read("weights.safetensors") == b"0" * 1000


def test_a_service_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(bucket, "_RETRIES", 0)
    store = Store("s3://nowhere/store", tmp_path)
    for ask in (store.versions.names, store.check, store.prepare):
        with pytest.raises(StoreUnavailable, match=r"s3://nowhere/store cannot be used.*AWS_ENDPOINT_URL"):
            ask()
