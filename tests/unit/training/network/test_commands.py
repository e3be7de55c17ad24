"""The commands that an operator and a hospital type, where they fail before a connection."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from training.algorithm import Memory
from training.choices.fedavg import FedAvgConfig
from training.config import RunConfig
from training.engine.folder import RunCheckpoint, RunFolder
from training.federate import federate
from training.network.__main__ import app as network
from training.network.runs import NetworkRun
from training.phantom.federation import TASK
from training.site import site

POLICY = "allows: [weights]\nconsents: false\n"


def invoke(command, *arguments):
    if not isinstance(command, typer.Typer):
        app = typer.Typer()
        app.command()(command)
        command = app
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def kits(tmp_path_factory):
    root = tmp_path_factory.mktemp("consortium") / "kits"
    done = invoke(network, "provision", "--out", root, "--address", "localhost:8002", "--site", "birch")
    assert done.exit_code == 0, done.output
    return root


def test_kits_are_made_listed_and_revoked(tmp_path):
    root = tmp_path / "kits"
    options = ("--out", root, "--address", "localhost:8002", "--site", "birch")
    assert "birch" in invoke(network, "provision", *options).output
    assert "every hospital has a kit already" in invoke(network, "provision", *options).output
    renewed = invoke(network, "renew", "--kits", root)
    assert f"{root / 'birch'}" in renewed.output
    assert "Valid for 360 days" in renewed.output
    assert (
        "revoked the certificate of birch"
        in invoke(network, "revoke", "--kits", root, "--site", "birch").output
    )
    again = invoke(network, "revoke", "--kits", root, "--site", "birch")
    assert again.exit_code == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--consent", "all"), "--consent: each hospital decides"),
        (("--playbook",), "--playbook: each hospital decides"),
        (("--data", "."), "--data: each hospital decides"),
        (("--leave-out", "elm"), "leave_out: ['elm']; hospitals: birch"),
        (("--quorum", 2), "quorum: expected 1 to 1 hospitals, found 2"),
    ],
)
def test_option_that_does_not_fit_a_network_is_rejected(kits, tmp_path, options, words):
    TASK.dump(tmp_path / "task.yaml")
    done = invoke(
        federate,
        *("--engine", "network", "--kit", kits / "server", "--task", tmp_path / "task.yaml"),
        *("--method", "fedavg", "--out", tmp_path / "store", *options),
    )
    assert done.exit_code == 2
    assert words in done.output


def test_resume_names_the_runs_of_other_hospitals(kits, tmp_path):
    TASK.dump(tmp_path / "task.yaml")
    sites = ("birch", "elm")
    run = tmp_path / "runs" / NetworkRun(sites, "fedavg", FedAvgConfig(), RunConfig(), TASK).id
    run.mkdir(parents=True)
    (run / "network.json").write_text(json.dumps({"run": "0", "sites": dict.fromkeys(sites)}))
    RunFolder(run).commit(RunCheckpoint(1, 0, "a"), Memory({}, {}), {})
    done = invoke(
        federate,
        *("--engine", "network", "--kit", kits / "server", "--task", tmp_path / "task.yaml"),
        *("--method", "fedavg", "--out", tmp_path / "store", "--resume"),
    )
    assert done.exit_code == 2
    assert f"{run}: a run of birch, elm" in done.output
    assert [*run.parent.iterdir()] == [run]


def test_missing_kit_or_task_is_named(tmp_path):
    done = invoke(federate, "--engine", "network", "--method", "fedavg", "--out", tmp_path / "store")
    assert done.exit_code == 2
    assert "is missing" in done.output


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("allows: [faces]\nconsents: true\n", "allows"),
        ("consents: true\n", "allows: Field required"),
        (
            "allows: [weights]\nconsents: true\nallow: []\n",
            "allow: there is no such field; did you mean 'allows'?",
        ),
        ("allows: [weights]\nconsents: true\npatient: P[0-9]\n", "needs a group named 'patient'"),
        ("- a\n", "is not a policy"),
        ("{", "cannot be read"),
    ],
)
def test_policy_that_is_none_is_rejected(kits, tmp_path, policy, words):
    path = tmp_path / "policy.yaml"
    path.write_text(policy)
    done = invoke(site, "--data", tmp_path, "--kit", kits / "birch", "--policy", path)
    assert done.exit_code == 2
    assert words in done.output


def test_missing_folder_or_the_wrong_kit_is_rejected(kits, tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY)
    done = invoke(site, "--data", tmp_path / "none", "--kit", kits / "birch", "--policy", path)
    assert "is not a folder" in done.output
    done = invoke(site, "--data", tmp_path, "--kit", kits / "server", "--policy", path)
    assert "expected a kit of a hospital" in done.output
