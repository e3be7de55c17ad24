"""A real Orthanc per module of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.service.orthanc import Orthanc, running_orthanc


@pytest.fixture(scope="module")
def orthanc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Orthanc]:
    with running_orthanc(tmp_path_factory.mktemp("orthanc")) as found:
        yield found
