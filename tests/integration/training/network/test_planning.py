"""Plan over NVFLARE's connections, then train what was planned, with hospitals that stay for it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from benchmarks.harness.forked import Forked
from benchmarks.network.consortium import Consortium
from model_store.store import Store
from model_store.task import Task
from tests.helpers.training.ct_volumes import write_volumes
from training.config import RunConfig
from training.data.federation import load_federation
from training.methods.registry import method
from training.planning.planner import BUDGETS
from training.planning.proposal import Proposal
from training.planning_round import plan_federation, replanned, with_plan
from training.run import Run, execute

SITES = ("aster", "birch", "cedar")
SLICES = Task(name="organ", labels={"organ": (1, 2), "core": (2,)}, size=(32, 32))
REFUSING = {"cedar": ("weights",)}


def write(root: Path, spacing: tuple[float, float, float], shape: tuple[int, int, int]) -> Path:
    write_volumes(root, dict.fromkeys(SITES, (5, spacing)), shape)
    SLICES.dump(root / "task.yaml")
    return root


def in_process(data: Path, place: Path, options: dict[str, object]) -> tuple[Proposal, str]:
    """The plan, and the digest of what is trained by it, in one process."""
    settings = RunConfig(seed=4, egress=REFUSING)
    federation = load_federation(data)
    proposal = plan_federation(federation, settings, BUDGETS["laptop"], place / "plan")
    config = method("fedavg").config.model_validate({**proposal.options, **options})
    run = Run(
        replanned(federation, proposal),
        "fedavg",
        config.prepared(Store(place / "store"), proposal.task, "organ"),
        settings.model_copy(update={"consent": "all"}),
    )
    recorded = partial(with_plan, proposal=proposal)
    execute(run, place / "run", workers=0, store=Store(place / "store"), extend=recorded)
    return proposal, Store(place / "store").open("organ").digest


# Seven processes import torch, and those of volumes MONAI.
@pytest.mark.timeout(600)
def test_hospitals_that_planned_train_what_was_planned(tmp_path):
    data = write(tmp_path / "data", (2.0, 2.0, 2.5), (24, 20, 20))
    options = {"rounds": 2, "least_steps": 2}
    (tmp_path / "config.yaml").write_text(json.dumps({"method": options, "run": {"seed": 4}}))
    with Consortium(tmp_path, data, SITES, begin=Forked) as consortium:
        consortium.policy("cedar", "allows: [weights]\nconsents: true\n")
        command = ("--method", "fedavg", "--config", tmp_path / "config.yaml", "--plan")
        operator = consortium.start_operator(*command)
        operator.wait_for("listening on")
        sites = {site: consortium.start_site(site) for site in SITES}
        sites["aster"].wait_for("train 1/2: computing")
        operator.kill()
        operator = consortium.start_operator(*command, "--resume")
        assert operator.end() == 0, operator.text()
        assert [site.end() for site in sites.values()] == [0, 0, 0]
        shown = operator.text()
        hospital = sites["cedar"].text()
        record = json.loads((tmp_path / "run" / "record.json").read_text())
        digest = Store(tmp_path / "store").open("organ").digest
    assert "Volumes (3-D)" in shown
    assert "cedar sent nothing (its policy refuses statistics): planned for, not with" in shown
    assert "fingerprint 1: left no tensors; withheld fingerprint" in hospital
    proposal, expected = in_process(data, tmp_path / "reference", options)
    assert digest == expected
    assert record["details"]["plan"] == json.loads(json.dumps(proposal.content()))
    assert Task.load(tmp_path / "run" / "task.yaml") == proposal.task
    assert proposal.task.is_volume
