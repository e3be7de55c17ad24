"""Jobs on a GPU, from claim to published version: `pytest -m gpu` on a machine with one.

Without onnxruntime's build for CUDA, a job's pictures are drawn on the CPU.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from model_store.manifest import WEIGHTS
from model_store.store import Store
from service.settings import Settings
from service.worker import routing_space
from service.worker.device import prepare_torch
from service.worker.runner import run_job
from tests.helpers.service.drawn_clusters import finished, pictures, publish, submit
from tests.helpers.service.joining_federation import drawn_scans
from tests.helpers.service.routing_federation import outside_scans
from tests.helpers.service.workplace import Workplace, opened

pytestmark = pytest.mark.gpu
POISON = """
import torch
from service.errors import GpuUnusable
from service.settings import Settings
from service.worker.device import check_gpu, release
settings = Settings(device="cuda")
check_gpu(settings)
try:
    torch.zeros(2, device="cuda")[torch.tensor([5], device="cuda")].cpu()
except RuntimeError as error:
    print("poisoned:", type(error).__name__)
try:
    check_gpu(settings)
except GpuUnusable as error:
    print("unusable:", error)
release()
"""


@pytest.fixture
def place(tmp_path: Path, routing_store: Path) -> Iterator[Workplace]:
    with opened(tmp_path, routing_store, device="auto") as opened_place:
        yield opened_place


@pytest.mark.parametrize("preset", ["paper", "tent"])
def test_job_is_repeatable_and_resumes_to_the_bit(
    preset: str, place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weights(killed_after: int | None = None) -> bytes:
        cohort = place.cohort(outside_scans(2))
        job_id = place.adaptation(cohort, options={"preset": preset, "epochs": 3})
        if killed_after is not None:
            with monkeypatch.context() as patched:
                patched.setattr(routing_space.EpochReports, "report", killer(killed_after))
                with pytest.raises(KeyboardInterrupt):
                    run_job(job_id, place.settings)
            assert place.folder(job_id).read("checkpoint") is not None
            place.expire(job_id)
        run_job(job_id, place.settings)
        job = place.job(job_id)
        assert job.state in ("succeeded", "fell_back"), job.reason
        assert job.result is not None
        assert job.result["computed_on"]["card"] == torch.cuda.get_device_name(0)
        assert job.result["computed_on"]["driver"]
        return place.store.open("organ.at-dune").read(WEIGHTS)

    first = weights()
    # What torch keeps for later was given back.
    assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < 2**22
    assert weights() == first
    assert weights(killed_after=2) == first


def killer(epoch: int) -> Callable[..., None]:
    real = routing_space.EpochReports.report

    def report(self: routing_space.EpochReports, at: int, *arguments: object) -> None:
        real(self, at, *arguments)  # type: ignore[arg-type]
        if at == epoch:
            raise KeyboardInterrupt

    return report


@pytest.mark.parametrize(
    ("store", "model", "scanner", "options"),
    [
        ("joining_store", "tumour", "dune", {"epochs": 2, "batch_size": 16, "learning_rate": 1e-2}),
        ("routing_store", "organ", "heath", {"preset": "masks", "steps": 8, "folds": 3}),
    ],
)
def test_job_of_masks_is_computed_on_the_gpu(
    store: str,
    model: str,
    scanner: str,
    options: dict[str, Any],
    start: Callable[..., Any],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    folder: Path = request.getfixturevalue(store)
    api = start(shutil.copytree(folder, tmp_path / "store"), device="cuda")
    api.client.put("/hospitals/dune", json={"name": "Dune"})
    cohort = api.client.post("/hospitals/dune/cohorts").headers["location"]
    for name, (scan, mask) in drawn_scans(3, scanner).items():
        assert api.client.put(f"{cohort}/scans/{name}", content=scan).status_code == 201
        drawn = api.client.put(f"{cohort}/scans/{name}/mask?model={model}", content=mask)
        assert drawn.status_code == 201, drawn.text
    body = {"cohort": cohort.rpartition("/")[2], "model": model, "options": options}
    versions = []
    for _ in range(2):
        accepted = api.client.post("/hospitals/dune/adaptations", json=body)
        assert accepted.status_code == 202, accepted.text
        job = finished(api, accepted.json()["id"])
        assert job["state"] in ("succeeded", "fell_back"), job["reason"]
        assert job["result"]["computed_on"]["device"].startswith("cuda")
        versions.append(api.store.open(f"{model}.at-dune").read(WEIGHTS))
    assert versions[0] == versions[1]


def test_cluster_is_picked_on_the_gpu_as_on_the_cpu(start: Callable[..., Any], tmp_path: Path) -> None:
    publish(Store(tmp_path))
    results = []
    for device in ("cuda", "cpu"):
        api = start(tmp_path, device=device)
        api.client.put("/hospitals/oak", json={"name": "Oak"})
        job = finished(api, submit(api, pictures("hazel", 9), '{"criterion": "statistics"}'))
        assert job["state"] == "succeeded", job["reason"]
        results.append(job["result"])
    on_gpu, on_cpu = results
    assert on_gpu["computed_on"]["device"].startswith("cuda")
    assert on_gpu["cluster"] == on_cpu["cluster"] == "2"
    for criterion, found in on_gpu["costs"].items():
        assert found == pytest.approx(on_cpu["costs"][criterion], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("options", [{"preset": "paper"}, {"preset": "intent"}, {"preset": "ladder"}])
def test_scan_is_adapted_to_on_the_gpu_repeatably(options: dict[str, str], place: Workplace) -> None:
    (scan,) = outside_scans(1).values()
    answers = []
    for _ in range(2):
        job_id = place.scan_job(scan, **options)
        run_job(job_id, place.settings)
        job = place.job(job_id)
        assert job.state == "succeeded", job.reason
        assert job.result is not None
        assert job.result["computed_on"]["device"].startswith("cuda")
        answer = place.folder(job_id).read_result()
        assert answer is not None
        answers.append(answer.body)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_worker_whose_gpu_is_hidden_refuses_or_says_that_it_uses_the_cpu(device: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "service.worker.device"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "LOCUM_DEVICE": device},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "no GPU, though this machine has an NVIDIA device" in done.stderr
    if device == "cuda":
        assert done.returncode == 1
    else:
        assert (done.returncode, json.loads(done.stdout)["device"]) == (0, "cpu"), done.stderr


def test_job_that_does_not_fit_says_so(place: Workplace) -> None:
    settings = place.settings.model_copy(update={"gpu_memory_bytes": 2**20})
    job_id = place.adaptation(place.cohort(outside_scans(2)))
    try:
        run_job(job_id, settings)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    job = place.job(job_id)
    assert job.state == "failed"
    assert "the GPU has too little memory" in (job.reason or "")


def test_error_that_stays_makes_the_process_unusable() -> None:
    done = subprocess.run(
        [sys.executable, "-c", POISON], capture_output=True, text=True, timeout=100, check=False
    )
    assert "poisoned:" in done.stdout, done.stderr[-2000:]
    assert "unusable: the GPU cuda does not answer: CUDA error" in done.stdout


def test_worker_has_float32_and_equal_sums() -> None:
    prepare_torch(Settings(device="cuda"))
    draw = torch.Generator().manual_seed(0)
    convolution = torch.nn.Conv2d(16, 16, 3, padding=1).double()
    images = torch.randn(4, 16, 64, 64, generator=draw, dtype=torch.float64)
    expected = convolution(images)

    def gradient() -> torch.Tensor:
        on_gpu = torch.nn.Conv2d(16, 16, 3, padding=1).cuda()
        on_gpu.load_state_dict(convolution.state_dict())
        found = on_gpu(images.float().cuda())
        # TF32 has 10 bits of mantissa, float32 23.
        assert (found.double().cpu() - expected).abs().max() < 1e-5
        found.square().sum().backward()
        assert on_gpu.weight.grad is not None
        return on_gpu.weight.grad.cpu()

    assert torch.equal(gradient(), gradient())
