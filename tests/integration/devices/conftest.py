"""The devices of these tests: one that is pretended, everywhere; a GPU, with `pytest -m gpu`."""

from __future__ import annotations

import pytest

from tests.helpers.gpu import Cuda


@pytest.fixture(params=["pretended", pytest.param("real", marks=pytest.mark.gpu)])
def cuda(request: pytest.FixtureRequest) -> Cuda:
    return Cuda(real=request.param == "real")
