"""The devices of these tests: one that is pretended, everywhere; a GPU, with `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.gpu import Cuda


@pytest.fixture(params=["pretended", pytest.param("real", marks=pytest.mark.gpu)])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cuda:
    # As in runs and workers; torch's own defaults are neither repeatable nor float32.
    for name, value in {"benchmark": False, "deterministic": True, "allow_tf32": False}.items():
        monkeypatch.setattr(torch.backends.cudnn, name, value)
    return Cuda(real=request.param == "real")
