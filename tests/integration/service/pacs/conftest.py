"""A real Orthanc per module of tests, the gate before it, and a service's workplace that knows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.helpers.service.coded import publish_coded
from tests.helpers.service.orthanc import Gate, Orthanc, configure, gate_before, running_orthanc
from tests.helpers.service.workplace import Workplace, opened


@pytest.fixture(scope="module")
def orthanc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Orthanc]:
    with running_orthanc(tmp_path_factory.mktemp("orthanc")) as found:
        yield found


@pytest.fixture(scope="module")
def gate(orthanc: Orthanc) -> Iterator[Gate]:
    with gate_before(orthanc) as found:
        yield found


@pytest.fixture(scope="module")
def place(
    tmp_path_factory: pytest.TempPathFactory, gate: Gate, publish_bright: Callable[..., Any]
) -> Iterator[Workplace]:
    root = tmp_path_factory.mktemp("pacs")
    publish_coded(root / "from", publish_bright)
    pacs = configure(root / "pacs.yaml", gate.url)
    with opened(root, root / "from", pacs=pacs, redis_url="redis://127.0.0.1:1") as opened_place:
        yield opened_place
