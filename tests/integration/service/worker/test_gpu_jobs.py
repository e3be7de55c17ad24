"""Jobs on a GPU, from claim to published version: `pytest -m gpu` on a machine with one.

Without onnxruntime's build for CUDA, a job's pictures are drawn on the CPU.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from model_store.manifest import WEIGHTS
from service.settings import Settings
from service.worker import routing_space
from service.worker.device import prepare_torch
from service.worker.runner import run_job
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


@pytest.mark.parametrize("preset", ["paper", "tent", "distilled"])
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
