"""Slices with a wider field of view than the members': the network sees them larger, without a mask."""

from __future__ import annotations

import gzip
from collections.abc import Iterator

import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray

from locum.demo.body_scans import MEMBERS, BodyScan
from locum.demo.carried import MODEL, STORE
from model_store.lens import LENS
from model_store.manifest import WEIGHTS
from service.kinds import adaptation_of
from service.worker.runner import run_job
from tests.helpers.service.workplace import Workplace, opened
from tests.integration.service.worker.test_lens import dice_of

ZOOM = 2
# The scanner's air, beyond the body.
AIR = 2


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    with opened(tmp_path_factory.mktemp("scale"), STORE) as found:
        yield found


def wider(patient: int) -> tuple[bytes, NDArray[np.bool_]]:
    """A scan of a member with twice the field of view of a slice, and where liver and lesion are."""
    scan = BodyScan.at(MEMBERS[0], patient)
    margins = [*((side // 2, side // 2) for side in scan.voxels.shape[:2]), (0, 0)]
    voxels = np.pad(scan.voxels, margins, constant_values=int(np.percentile(scan.voxels, AIR)))
    image = nib.Nifti1Image(voxels, scan.volume.affine)
    return gzip.compress(image.to_bytes(), 1), np.pad(scan.mask, margins) > 0


def test_a_wider_field_of_view_is_seen_larger_by_the_same_weights(place: Workplace) -> None:
    parent = place.store.open(MODEL)
    scans = {f"scan-{patient}.nii.gz": wider(patient)[0] for patient in (1101, 1102, 1103)}
    job_id = place.adaptation(
        place.cohort(scans),
        model=MODEL,
        parent=parent.digest,
        options={"preset": "auto", "unlike": "include"},
    )
    run_job(job_id, place.settings)
    job = place.job(job_id)
    assert (job.state, job.reason) == ("succeeded", None)
    assert job.result is not None
    assert job.gate is not None
    assert (job.result["lens"]["made"], job.result["lens"]["scale"]) == ("scale", ZOOM), job.gate
    assert job.gate["passed"]
    assert "The network sees each slice 2 times larger" in job.gate["summary"][0]
    adaptation = adaptation_of(parent)
    assert adaptation is not None
    assert "How large these scans show things" in [each.title for each in adaptation.sections(job.result, ())]

    made = place.store.open(f"{MODEL}.at-dune")
    task = parent.manifest.task
    assert made.manifest.task.size == tuple(ZOOM * side for side in task.size)
    assert made.manifest.task.normalisation.middle == 1 / ZOOM
    assert LENS not in made.manifest.files
    assert made.read(WEIGHTS) == parent.read(WEIGHTS)
    scan, mask = wider(1110)
    assert dice_of(place, made, scan, mask) > max(0.93, dice_of(place, parent, scan, mask) + 0.02)
