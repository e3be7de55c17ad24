from __future__ import annotations

from pathlib import Path

import pytest

from training.choices.fedavg import FedAvgConfig
from training.config import RunConfig
from training.data.federation import load_federation
from training.methods.fedbicross.config import FedBiCrossConfig
from training.methods.fedbicross.method import FedBiCross
from training.phantom.shapes import write_shapes
from training.progress.forecast import expected_seconds
from training.run import Run

SITES = ("elm", "fir", "hazel")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_shapes(tmp_path_factory.mktemp("shapes"), SITES, images_per_site=20, size=8)
    for image in sorted(root.glob("fir/*/*.png"))[:10]:
        image.unlink()
    return root


@pytest.mark.parametrize("workers", [None, 0, 1, 2, 3, 8])
def test_forecast_is_asked_for_the_images_of_the_busiest_worker(
    data: Path, workers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        FedBiCross, "forecast", lambda _, images, sites, threads: {"local": (images, sites, threads)}
    )
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    # All of elm's, fir's and hazel's 20, 10 and 20 images that are neither for testing nor for validation.
    job = Run(
        load_federation(data), "fedbicross", FedBiCrossConfig(width=1), RunConfig(threads=3, test=0, val=0)
    )
    images = {None: 30, 0: 50, 1: 50, 2: 30, 3: 20, 8: 20}[workers]
    assert expected_seconds(job, workers) == {"local": (images, 3, 3)}


def test_forecast_of_a_method_without_one_or_on_a_gpu_is_empty(data: Path) -> None:
    federation = load_federation(data)
    assert expected_seconds(Run(federation, "fedavg", FedAvgConfig(width=1)), 1) == {}
    job = Run(federation, "fedbicross", FedBiCrossConfig(width=1), RunConfig(device="cuda"))
    assert expected_seconds(job, 1) == {}
