"""What most tests of a route start from; a module with another API has a fixture of this name of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.service.api import Api


@pytest.fixture(scope="module")
def api(
    start: Callable[[Path], Api],
    tmp_path_factory: pytest.TempPathFactory,
    publish_bright: Callable[[Path], object],
) -> Api:
    """An API with the model `bright` and the hospital `north`."""
    root = tmp_path_factory.mktemp("store")
    publish_bright(root)
    running = start(root)
    assert running.client.put("/hospitals/north", json={"name": "north"}).status_code == 201
    return running


@pytest.fixture
def cohort(api: Api) -> Iterator[str]:
    """The path of a cohort of `north`, deleted after the test."""
    place = api.client.post("/hospitals/north/cohorts").headers["location"]
    yield place
    assert api.client.delete(place).status_code == 204
