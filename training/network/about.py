"""What a hospital tells its operator of itself, for the roster, as its policy permits."""

from __future__ import annotations

import hashlib
import shutil
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from training.data.cases import Site
from training.network.calendar import agreements
from training.network.cell import printable
from training.network.checking import Hospital, diagnose
from training.network.kits import Kit
from training.network.messages import PROTOCOL, About, Found
from training.network.policy import Policy

_LONGEST = 500
_GIB = 2**30


def tell(hospital: Hospital, policy: Policy, site: Site[Any] | None = None) -> About:
    """Look at this hospital, and say what its policy permits. `site` is its folder, where a run has read it.

    Raises TrainingError where the kit or the policy cannot be read.
    """
    assert hospital.kit is not None
    assert hospital.policy is not None
    said = About(
        protocol=PROTOCOL,
        locum=version("locum"),
        clock=datetime.now(UTC),
        kit=Kit.open(hospital.kit, server=False).certified().fingerprint,
        policy=hashlib.sha256(hospital.policy.read_bytes()).hexdigest(),
        agreed=agreements(hospital.state_folder),
    )
    if not policy.reports:
        return said
    counts = site if "statistics" in policy.allows else None
    found = [
        Found(part=each.part, state=each.state, words=printable(each.words)[:_LONGEST])
        for each in diagnose(hospital, alone=True)
    ]
    return said.model_copy(
        update={
            "device": hospital.device or "the run's",
            "free_gib": shutil.disk_usage(hospital.writable).free / _GIB,
            "patients": None if counts is None else len(counts.patients),
            "labels": None if counts is None else dict(counts.labelled),
            "findings": tuple(found),
        }
    )
