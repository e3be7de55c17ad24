"""Runs that start from a version of the store, or from a file of weights, instead of a draw."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from model_store.manifest import WEIGHTS, Lineage
from model_store.store import Store
from personalization.networks import build, initialise
from personalization.state import from_safetensors
from tests.helpers.personalization.efficientnet import published
from tests.helpers.training.backbones import publish, unet
from training.choices import start
from training.choices.fedavg import FedAvgConfig
from training.choices.start import StartConfig
from training.data.federation import load_federation
from training.errors import ConfigurationError
from training.federate import federate
from training.methods.registry import method
from training.phantom import write_federation

# A rate of nothing: what is trained is what it started from.
STILL = """\
method: {width: 2, rounds: 1, batch_size: 8, learning_rate: 1.0e-30, statistics: averaged}
run: {seed: 4}
"""
MOVES = "method: {width: 2, rounds: 1, batch_size: 8}\nrun: {seed: 4}\n"
app = typer.Typer()
app.command()(federate)


@pytest.fixture(autouse=True)
def no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the overlays, which are drawn in processes of their own."""
    monkeypatch.setattr("training.report.write_site_pages", lambda result, folder: {})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("phantom")
    return write_federation(root, ("aster", "birch"), patients_per_site=4, size=32)


@pytest.fixture(scope="module")
def task(data: Path):
    return load_federation(data).task


@pytest.fixture
def store(tmp_path: Path, task) -> Store:
    """A store with a model that distinguishes images."""
    publish(tmp_path / "store", task, unet(task), "base")
    return Store(tmp_path / "store")


def run(data: Path, store: Store, name: str, config: str, *options: str) -> str:
    """Run the command; returns its output."""
    folder = Path(store.root).parent
    (folder / "config.yaml").write_text(config)
    command = ["--method", name, "--data", str(data), "--out", str(store.root), "--name", "made"]
    command += ["--workers", "0", "--config", str(folder / "config.yaml"), *options]
    answer = CliRunner().invoke(app, command)
    assert answer.exit_code in (0, 2), answer.output
    return answer.output


def weights(store: Store, name: str) -> dict[str, torch.Tensor]:
    return dict(from_safetensors(store.open(name).read(WEIGHTS)))


def test_a_run_that_learns_nothing_publishes_the_version_that_it_started_from(data, store) -> None:
    run(data, store, "fedavg", STILL, "--from", "base@1")
    made, base = weights(store, "made"), weights(store, "base")
    assert all(
        torch.allclose(made[name].double(), base[name].double(), atol=1e-6)
        for name in base
        if "num_b" not in name
    )
    manifest = store.open("made").manifest
    assert manifest.lineage.parents == (store.open("base").digest,)
    assert [str(each) for each in store.lineage.descendants(store.open("base").digest)] == ["made@1"]
    judged = manifest.lineage.details["judged"]
    assert judged["all"]["change"] == pytest.approx(0, abs=1e-6)
    assert judged["parent"] == f"base@{store.open('base').digest}"


@pytest.mark.parametrize(
    "name",
    ["fedavg", "scaffold", "fedadam", "iop-fl", "ditto", "fedbn", "fedper", "local-only", "centralised"],
)
def test_every_method_of_one_network_starts_judges_and_reports(data, store, name: str) -> None:
    output = run(data, store, name, MOVES, "--from", "base@1", "--consent", "all")
    assert "made@1" in output, output
    assert "  parent  Dice" in output
    manifest = store.open("made").manifest
    assert manifest.lineage.parents == (store.open("base").digest,)
    judged = manifest.lineage.details["judged"]
    assert judged["sites"].keys() == {"aster", "birch"}
    every = judged["all"]
    assert every["count"] == sum(site["count"] for site in judged["sites"].values()) >= 2
    assert every["change"] == pytest.approx(every["version"] - every["parent"])
    (report,) = Path(store.root).parent.glob("runs/*/report.html")
    page = report.read_text()
    assert "Against its parent" in page
    assert "change of Dice" in page


def test_a_version_without_a_start_has_neither_parent_nor_judgement(data, store) -> None:
    run(data, store, "fedavg", MOVES)
    lineage = store.open("made").manifest.lineage
    assert lineage.parents == ()
    assert "judged" not in lineage.details
    assert not {"start", "start_new", "store"} & lineage.details["config"].keys()
    (report,) = Path(store.root).parent.glob("runs/*/report.html")
    assert "Against its parent" not in report.read_text()


def test_a_resumed_run_starts_from_the_version_that_was_named(data, store) -> None:
    run(data, store, "fedavg", MOVES, "--from", "base@1")
    again = run(data, store, "fedavg", MOVES, "--from", "base@1", "--resume")
    assert "made@1" in again
    assert store.versions.numbers("made") == [1]
    output = run(data, store, "fedavg", MOVES, "--from", "base")
    assert "expected NAME@VERSION, found 'base'; the newest is base@1" in output


def test_a_file_of_weights_keeps_its_source_and_leaves_the_head_to_the_seed(
    data, store, task, tmp_path
) -> None:
    network = initialise(build("unet", **unet(task, classes=5).arguments), torch.Generator().manual_seed(9))
    save_file(network.state_dict(), tmp_path / "w.safetensors")
    run(data, store, "fedavg", STILL, "--from", str(tmp_path / "w.safetensors"))
    made, start = weights(store, "made"), store.open("made.start").manifest
    assert start.lineage.details["new"] == ["conv"]
    assert torch.allclose(made["encoder1.enc1_conv1.weight"], network.encoder1.enc1_conv1.weight, atol=1e-6)
    lineage = store.open("made").manifest.lineage
    assert lineage.weights == start.lineage.weights
    assert lineage.weights.file == "w.safetensors"
    assert lineage.parents == (store.open("made.start").digest,)
    # A head of another size answers nothing: there is no parent to judge against.
    assert "judged" not in lineage.details
    (report,) = Path(store.root).parent.glob("runs/*/report.html")
    assert "Began with weights from elsewhere: w.safetensors" in report.read_text()
    # Another seed draws another head on the same body.
    run(data, store, "fedavg", STILL.replace("seed: 4", "seed: 5"), "--from", str(tmp_path / "w.safetensors"))
    second = weights(store, "made@2")
    assert not torch.allclose(second["conv.weight"], made["conv.weight"], atol=1e-3)
    # A version of that version still says where its weights began.
    run(data, store, "fedavg", MOVES, "--from", "made@1")
    assert store.open("made@3").manifest.lineage.weights == lineage.weights


def test_weights_of_the_same_network_are_taken_wholly_and_judged(data, store, task, tmp_path) -> None:
    save_file(weights(store, "base"), tmp_path / "w.safetensors")
    run(data, store, "fedavg", MOVES, "--from", str(tmp_path / "w.safetensors"))
    assert store.open("made.start").manifest.lineage.details["new"] == []
    assert store.open("made").manifest.lineage.details["judged"]["all"]["count"] >= 2
    body = {n: t for n, t in load_file(tmp_path / "w.safetensors").items() if not n.startswith("encoder2")}
    save_file({**body, "extra": torch.zeros(2)}, tmp_path / "w.safetensors")
    output = run(data, store, "fedavg", MOVES, "--from", str(tmp_path / "w.safetensors"))
    assert "no tensor 'encoder2.enc2_conv1.weight'" in output


def test_weights_of_a_version_are_of_the_network_that_its_manifest_says(data, store, task, tmp_path) -> None:
    """Names and shapes are equal with another activation."""
    path = store.open("base").path_of(WEIGHTS)
    wider = MOVES.replace("width: 2", "width: 3")
    run(data, store, "fedavg", wider, "--from", str(path))
    assert store.open("made").manifest.network.arguments["width"] == 2
    other = MOVES.replace("width: 2", "width: 2, network: unet, network_arguments: {width: 3}")
    said = " ".join(run(data, store, "fedavg", other, "--from", str(path)).split())
    assert "width: expected 2, with which the file was trained, found 3; leave it out" in said


def test_weights_of_a_version_answer_as_when_they_were_published(data, store, task, monkeypatch) -> None:
    path = store.open("base").path_of(WEIGHTS)

    class Other(torch.nn.Module):
        """The network, as a later version of its package has it: of the same names and shapes."""

        def __init__(self, network: torch.nn.Module) -> None:
            super().__init__()
            self.__dict__["network"] = network

        def load_state_dict(self, state):
            self.network.load_state_dict(state)

        def forward(self, image):
            return self.network.eval()(image.abs())

    made = start.new_network
    monkeypatch.setattr(start, "new_network", lambda *given: Other(made(*given)))
    said = " ".join(run(data, store, "fedavg", MOVES, "--from", str(path)).split())
    assert "the file's weights do not answer as when they were published" in said


def test_a_published_encoder_becomes_a_unet_that_is_routed_and_moved(data, store, task, tmp_path) -> None:
    torch.save(published(), tmp_path / "w.pth")
    config = MOVES.replace("width: 2", "width: 2, local_steps: 1, least_steps: 1")
    options = ("--from", str(tmp_path / "w.pth"), "--consent", "all")
    output = run(data, store, "iop-fl", config, *options)
    assert "made@1" in output, output
    start, made = store.open("made.start").manifest, store.open("made").manifest
    assert start.network.name == "efficientnet_unet"
    assert start.lineage.details["new"][0] == "upconv5"
    assert "encoder" not in start.lineage.details["new"]
    assert made.lineage.weights.sha256 == start.lineage.weights.sha256
    # The graph that moves batch norm by the dose of a scan's shift.
    assert "shift.onnx" in made.files
    sized = task.model_copy(update={"size": (48, 32)})
    sized.dump(tmp_path / "sized.yaml")
    refused = run(data, store, "fedavg", MOVES, *options, "--task", str(tmp_path / "sized.yaml"))
    assert "expected sides that are multiples of 32, found 48x32" in refused
    shutil.copy(tmp_path / "w.pth", tmp_path / "w.weights")
    assert "found '.weights'" in run(data, store, "fedavg", MOVES, "--from", str(tmp_path / "w.weights"))


def test_a_start_that_does_not_fit_is_refused_with_what_to_do(data, store, task) -> None:
    publish(Path(store.root), task.model_copy(update={"labels": {"other": (1,)}}), unet(task), "strange")
    publish(Path(store.root), task, unet(task), "mine", hospital="dune", role="hospital")
    for asked, config, message in (
        ("absent@1", MOVES, "'absent@1' is not in the store; names: base, mine, strange"),
        ("strange@1", MOVES, "expected the labels organ as the task has, found other"),
        ("strange@1", MOVES, "start from the file of its weights, --from STORE/strange/"),
        ("mine@1", MOVES, "it was adapted to 'dune' and belongs to that hospital"),
        (
            "base@1",
            MOVES.replace("width: 2", "network: resnet18"),
            "network: expected unet, which the start has",
        ),
    ):
        output = run(data, store, "fedavg", config, "--from", asked)
        assert message in output.replace("\n", " "), output
    output = run(data, store, "fedoap", "method: {rounds: 1}", "--from", "base@1")
    assert "method 'fedoap' does not start from a version" in output
    assert "fedavg" in output


def test_only_sites_with_a_part_of_their_own_need_a_store(task) -> None:
    pinned = FedAvgConfig(start=f"base@sha256:{'0' * 64}", network="unet", network_arguments={"width": 2})
    there = pinned.at_hospital(None)
    assert isinstance(there, StartConfig)
    assert method("fedavg").build(there, task).plan()[-2].name == "judge"
    with pytest.raises(ConfigurationError, match=r"give this hospital's store, .*with --store"):
        method("fedbn").build(there, task)


def test_lineage_of_versions_without_imported_weights_keeps_its_bytes() -> None:
    lineage = Lineage(method="m", run="r", sites=(), rounds=1, seed=0)
    assert "weights" not in json.loads(lineage.model_dump_json(exclude_none=True))
