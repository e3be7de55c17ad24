"""A service with its store in a bucket, beside another publisher that shares no disk with it."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from model_store.artefact import Artefact
from model_store.store import Store
from tests.helpers.model_store.s3_server import make_bucket, s3_server
from tests.helpers.waiting import wait_for
from tests.integration.service.conftest import THRESHOLD, Api, png


def mask_of(api: Api, picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    answer = api.segment(png(picture), model="bright")
    assert answer.status_code == 200, answer.text
    return np.asarray(Image.open(io.BytesIO(answer.content)))


def test_a_version_that_another_node_publishes_is_served_and_its_withdrawal_heeded(
    bucket_url: str,
    tmp_path: Path,
    start: Callable[..., Api],
    publish_bright: Callable[..., Artefact],
    picture: NDArray[np.uint8],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # the other node's cache
    publish_bright(bucket_url)
    api = start(bucket_url, cache=tmp_path / "served")
    np.testing.assert_array_equal(mask_of(api, picture) > 0, picture > THRESHOLD)
    publish_bright(bucket_url, at=50)

    def newest() -> bool:
        return bool(api.client.get("/models/bright").json()["versions"][-1]["version"] == 2)

    wait_for(newest)
    np.testing.assert_array_equal(mask_of(api, picture) > 0, picture > 50)
    Store(bucket_url).withdraw("bright@2", actor="ada", reason="wrong threshold")
    wait_for(lambda: api.segment(png(picture), model="bright@2").status_code == 410)
    np.testing.assert_array_equal(mask_of(api, picture) > 0, picture > THRESHOLD)


def test_a_bucket_that_does_not_answer_is_said_so(
    tmp_path: Path,
    start: Callable[..., Api],
    publish_bright: Callable[..., Artefact],
    picture: NDArray[np.uint8],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("model_store.bucket._RETRIES", 0)
    with s3_server() as server:
        url = f"s3://{make_bucket(server)}/store"
        publish_bright(url)
        api = start(url, cache=tmp_path / "served")
        mask_of(api, picture)
    wait_for(lambda: api.segment(png(picture), model="bright").status_code == 503)
    answer = api.segment(png(picture), model="bright")
    assert answer.json()["type"].endswith("store-unavailable"), answer.text
    assert "AWS_ENDPOINT_URL" in answer.json()["detail"]
    wait_for(lambda: "s3://" in api.client.get("/health/ready").json()["parts"]["store"]["detail"])
