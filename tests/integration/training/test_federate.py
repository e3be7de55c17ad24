"""The federate command, run as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import nibabel as nib
import numpy as np
import onnxruntime
import pytest
import torch
import typer
from typer.testing import CliRunner

from model_store import graphs
from model_store.manifest import SHIFT_GRAPH
from model_store.store import Store
from personalization.dose import FILE, Playbook, Practice
from personalization.iop_fl.spread import FILE as SPREAD
from personalization.networks import build
from personalization.state import from_safetensors
from training.choices.fedavg import FedAvgConfig
from training.command import _locum
from training.config import RunConfig
from training.data.federation import load_federation
from training.errors import ConfigurationError, FederationError
from training.exit_codes import FAILED
from training.federate import federate
from training.methods.iop_fl import IopFlConfig
from training.phantom import write_federation
from training.phantom.federation import nifti_bytes
from training.playbook import Made, make_playbook
from training.run import Run, execute

app = typer.Typer()
app.command()(federate)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("phantom")
    return write_federation(root, sites=("aster", "birch", "cedar"), patients_per_site=3, size=16)


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Members that train on three patients, so that each has a spread and a fingerprint."""
    root = tmp_path_factory.mktemp("several")
    return write_federation(root, sites=("aster", "birch", "cedar"), patients_per_site=5, size=16)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text("method: {width: 2, rounds: 2, batch_size: 8, least_steps: 2}\nrun: {seed: 4}\n")
    return path


@pytest.fixture
def paper(config):
    """The paper's recipe, in which every site has a model of its own."""
    config.write_text(
        "method: {recipe: paper, width: 2, rounds: 2, batch_size: 8, least_steps: 2}\nrun: {seed: 4}\n"
    )
    return config


def invoke(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def options(data, config, tmp_path, *more):
    return ("--data", data, "--config", config, "--out", tmp_path / "store", "--workers", 0, *more)


@pytest.fixture
def no_pages(monkeypatch):
    """Skip the overlays: they are drawn in separate processes, which take seconds to start."""
    monkeypatch.setattr("training.report.write_site_pages", lambda result, folder: {})


@pytest.fixture
def practice(monkeypatch):
    """A practice behind two scanners in place of six."""
    short = Practice(severities=(0.0, 2.0))
    monkeypatch.setattr("training.command.DEFAULT", short)
    return short


def test_federate_iop_fl_publishes_space_parts_graphs_and_reports(data, paper, tmp_path):
    command = [sys.executable, "-m", "training.federate", "--method", "iop-fl", "--leave-out", "cedar"]
    command += ["--data", str(data), "--config", str(paper), "--out", str(tmp_path / "store")]
    command += ["--consent", "aster", "--workers", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    store = Store(tmp_path / "store")
    assert store.versions.names() == ["phantom", "phantom.aster", "phantom.global"]
    space = store.open("phantom").manifest
    parts = {name: store.open(f"phantom.{name}") for name in ("global", "aster")}
    assert space.global_model == parts["global"].digest
    assert space.inside == {"aster": parts["aster"].digest}
    manifest = parts["aster"].manifest
    assert (manifest.role, manifest.site, manifest.part_of) == ("inside", "aster", "phantom")
    assert manifest.lineage.sites == ("aster", "birch")
    assert (manifest.lineage.method, manifest.lineage.rounds, manifest.lineage.seed) == ("iop-fl", 2, 4)
    assert manifest.lineage.details["config"]["tau"] == 0.9
    assert manifest.statistics.count == sum(  # the training scans of both sites
        len(site.of_split("train")) for site in sites_of(data, leave_out=("cedar",))
    )
    # The graph gives the same result as the weights.
    network = build(manifest.network.name, **manifest.network.arguments)
    network.load_state_dict(from_safetensors(parts["aster"].read("weights.safetensors")))
    image = np.random.default_rng(0).normal(size=(3, 1, 16, 16)).astype(np.float32)
    expected = torch.softmax(network.eval()(torch.from_numpy(image)), dim=1).detach().numpy()
    session = onnxruntime.InferenceSession(
        parts["aster"].read("graph.onnx"), providers=["CPUExecutionProvider"]
    )
    np.testing.assert_allclose(session.run(None, {"image": image})[0], expected, atol=1e-5)
    (folder,) = (tmp_path / "runs").iterdir()
    assert {"record.json", "report.html", "run.json"} <= {path.name for path in folder.iterdir()}
    assert {path.parent.name for path in folder.rglob("overlays.html")} == {"aster", "birch"}
    assert store.report(store.open("phantom")) == (folder / "report.html").read_bytes()
    record = json.loads((folder / "record.json").read_text())
    assert record["rounds"][-1]["absent"] == {"birch": "no consent to 'export'"}
    serve = f"serve it  {_locum()} serve --store {tmp_path / 'store'}"
    for said in ("phantom@1", str(folder / "record.json"), str(folder / "report.html"), serve):
        assert said in done.stdout


@pytest.mark.parametrize(("path", "said"), [("bin", "locum"), ("other", "env/bin/locum")])
def test_locum_is_named_by_its_path_where_the_shell_does_not_find_it(
    path: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("env/bin", "bin"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "locum").touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env/bin/python"))
    monkeypatch.setenv("PATH", str(tmp_path / path))
    assert _locum() == said


def sites_of(data: Path, **settings: object):
    return Run(load_federation(data), "fedavg", FedAvgConfig(), RunConfig(seed=4, **settings)).sites()


@pytest.mark.usefixtures("no_pages")
def test_federate_with_a_playbook_practises_on_every_member_and_publishes_it(
    several, config, practice, tmp_path
):
    """The same by any number of workers, and after a resume."""
    more = ("--consent", "all", "--playbook", "--rounds", 1)
    done = invoke("--method", "iop-fl", *options(several, config, tmp_path, *more))
    assert done.exit_code == 0, done.output
    artefact = Store(tmp_path / "store").open("phantom")
    playbook = Playbook.model_validate_json(artefact.read(FILE))
    assert playbook.members == ("aster", "birch", "cedar")
    assert playbook.severities == practice.severities
    assert playbook.by_shift is not None
    assert playbook.by_shift.episodes == 3 * len(practice.severities)
    assert playbook.by_shift.lensed
    assert {SPREAD, SHIFT_GRAPH} <= artefact.manifest.files.keys()
    cost = artefact.manifest.lineage.details["playbook"]
    assert cost["rounds"] == 3 * (1 + 6)
    # From a member, three numbers for the scans' targets and three for each of its episodes, as JSON.
    assert cost["sent"]["targets"] == 3 * 3 * 8
    assert 0 < cost["sent"]["episodes"] < 100 * playbook.by_shift.episodes
    (folder,) = (tmp_path / "runs").iterdir()
    assert sorted(path.name for path in (folder / "rotations").iterdir()) == ["aster", "birch", "cedar"]
    # The models are those of the run without a playbook.
    plain = tmp_path / "plain" / "store"
    command = ("--data", several, "--config", config, "--out", plain, "--workers", 0)
    assert invoke("--method", "iop-fl", *command, *more[:2], *more[3:]).exit_code == 0
    practised, unpractised = Store(tmp_path / "store"), Store(plain)
    assert len(unpractised.versions.names()) > 1
    assert practised.versions.names() == unpractised.versions.names()
    for name in set(practised.versions.names()) - {"phantom"}:
        assert practised.open(name).manifest.files == unpractised.open(name).manifest.files

    before = artefact.digest
    again = invoke("--method", "iop-fl", *options(several, config, tmp_path, *more, "--resume"))
    assert again.exit_code == 0, again.output
    assert Store(tmp_path / "store").open("phantom").digest == before

    (tmp_path / "two").mkdir()
    two = invoke("--method", "iop-fl", *options(several, config, tmp_path / "two", *more, "--workers", 2))
    assert two.exit_code == 0, two.output
    assert Store(tmp_path / "two" / "store").open("phantom").digest == before


@pytest.mark.usefixtures("no_pages")
def test_a_report_that_cannot_be_drawn_leaves_the_record(data, config, tmp_path, monkeypatch):
    def failing(*_: object) -> Path:
        raise OverflowError("cannot convert float infinity to integer")

    monkeypatch.setattr("training.report.write_report", failing)
    done = invoke("--method", "fedavg", *options(data, config, tmp_path))
    assert isinstance(done.exception, OverflowError), done.output
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "record.json").read_text())["published"]


@pytest.mark.usefixtures("no_pages", "practice")
def test_a_rotation_that_fails_costs_its_own_episodes_only(several, config, tmp_path, monkeypatch):
    def failing(run: Run, folder: Path, **options: object) -> object:
        if run.settings.leave_out == ("birch",):
            raise FederationError("birch's turn", ["no site finished round 1"])
        return execute(run, folder, **options)

    monkeypatch.setattr("training.playbook.execute", failing)
    more = ("--consent", "all", "--playbook")
    done = invoke("--method", "iop-fl", *options(several, config, tmp_path, *more))
    assert done.exit_code == 0, done.output
    assert "no playbook without birch" in " ".join(done.output.split())
    playbook = Playbook.model_validate_json(Store(tmp_path / "store").open("phantom").read(FILE))
    assert playbook.members == ("aster", "cedar")


def test_a_playbook_that_is_resumed_with_more_members_is_that_of_a_run_that_had_them(several, tmp_path):
    practice = Practice(severities=(0.0,))

    def made(folder: Path, consent: tuple[str, ...]) -> Made:
        config = IopFlConfig(width=2, rounds=1, batch_size=8, least_steps=1)
        run = Run(load_federation(several), "iop-fl", config, RunConfig(seed=4, consent=consent))
        return make_playbook(
            run, lambda each: folder / f"without-{each.settings.leave_out}", practice, workers=0
        )

    first = made(tmp_path / "resumed", ("aster", "birch"))
    assert first.playbook.members == ("aster", "birch")
    resumed, fresh = (made(tmp_path / folder, ("aster", "birch", "cedar")) for folder in ("resumed", "fresh"))
    assert resumed.playbook.targets == fresh.playbook.targets != first.playbook.targets
    assert resumed == fresh


@pytest.mark.parametrize(
    ("consent", "policies", "found"),
    [
        ((), "{}", "found none"),
        (("--consent", "birch"), "{}", "found birch"),
        (("--consent", "all"), "{aster: [weights], cedar: [weights, images]}", "found birch"),
    ],
)
def test_a_playbook_that_fewer_than_two_members_can_make_is_rejected_before_training(
    data, tmp_path, consent, policies, found
):
    (tmp_path / "config.yaml").write_text(f"method: {{width: 2}}\nrun: {{egress: {policies}}}\n")
    refused = invoke(
        "--method", "iop-fl", *options(data, tmp_path / "config.yaml", tmp_path, *consent, "--playbook")
    )
    assert refused.exit_code == 2
    said = " ".join(refused.output.split())
    assert f"expected at least 2 members that consent and let statistics out, {found}" in said
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("method", "run", "said"),
    [
        ("width: 2", "leave_out: [cedar]", "expected 2 members that let statistics out beside each"),
        ("width: 2", "egress: {cedar: [weights]}", "found aster, birch; use wider policies"),
        ("recipe: paper, width: 2", "seed: 1", "expected batch norm with statistics: estimated"),
        ("network: monai.unet, network_arguments: {norm: instance}", "seed: 1", "expected batch norm"),
    ],
)
def test_a_playbook_of_members_that_cannot_say_how_far_they_are_apart_is_rejected_before_training(
    data, tmp_path, method, run, said
):
    (tmp_path / "config.yaml").write_text(f"method: {{{method}}}\nrun: {{{run}}}\n")
    more = ("--consent", "all", "--playbook")
    refused = invoke("--method", "iop-fl", *options(data, tmp_path / "config.yaml", tmp_path, *more))
    assert refused.exit_code == 2, refused.output
    assert said in " ".join(refused.output.split())
    assert not (tmp_path / "store").exists()


@pytest.mark.usefixtures("no_pages", "practice")
def test_a_practice_without_a_spread_makes_no_playbook(data, config, tmp_path):
    """Members that train on one patient cannot say how far they are apart."""
    done = invoke("--method", "iop-fl", *options(data, config, tmp_path, "--consent", "all", "--playbook"))
    assert done.exit_code == FAILED, done.output
    said = " ".join(done.output.split())
    assert "the federation's practice came to no playbook" in said
    assert "no playbook without aster: the others do not know how far they are apart" in said


def test_a_playbook_with_a_reduction_that_needs_all_members_is_rejected_before_training(data, tmp_path):
    defence = "defence: {reduction: trimmed-mean}"
    (tmp_path / "config.yaml").write_text(f"method: {{width: 2}}\nrun: {{{defence}}}\n")
    refused = invoke(
        *("--method", "iop-fl", "--consent", "all", "--playbook"),
        *options(data, tmp_path / "config.yaml", tmp_path),
    )
    assert refused.exit_code == 2
    assert "trimmed-mean needs 3 sites, found 2" in " ".join(refused.output.split())
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("privacy", "found"),
    [
        ("privacy: {groups: {weights: {clip: 1, noise: 5}}}", "aster, birch, cedar"),
        ("privacy_demands: {birch: {kinds: {weights: {clip: 1, noise: 5}}, epsilon: 3}}", "birch"),
    ],
)
@pytest.mark.parametrize("resume", [(), ("--resume",)])
def test_a_playbook_is_rejected_for_a_run_with_differential_privacy(data, tmp_path, privacy, found, resume):
    (tmp_path / "config.yaml").write_text(f"method: {{width: 2}}\nrun: {{{privacy}}}\n")
    more = ("--consent", "all", "--playbook", *resume)
    refused = invoke("--method", "iop-fl", *options(data, tmp_path / "config.yaml", tmp_path, *more))
    assert refused.exit_code == 2
    assert f"found updates with noise from {found}: each member" in " ".join(refused.output.split())
    assert not (tmp_path / "store").exists()


def test_a_playbook_is_rejected_for_a_method_of_other_models(data, config, tmp_path):
    refused = invoke("--method", "fedbn", *options(data, config, tmp_path, "--playbook"))
    assert refused.exit_code == 2
    assert "expected --method fedavg or iop-fl" in " ".join(refused.output.split())


@pytest.mark.usefixtures("no_pages")
def test_federate_without_consent_publishes_the_global_model_only(data, paper, tmp_path):
    alone = invoke("--method", "iop-fl", *options(data, paper, tmp_path, "--leave-out", "cedar"))
    assert alone.exit_code == 0, alone.output
    assert "--consent all" in alone.output
    store = Store(tmp_path / "store")
    assert store.versions.names() == ["phantom"]
    assert store.open("phantom").manifest.kind == "model"
    more = ("--leave-out", "cedar", "--resume", "--consent", "all")
    later = invoke("--method", "iop-fl", *options(data, paper, tmp_path, *more))
    assert later.exit_code == 0, later.output
    assert store.versions.names() == ["phantom", "phantom.aster", "phantom.birch", "phantom.global"]
    assert store.open("phantom").manifest.kind == "routing-space"


@pytest.mark.usefixtures("no_pages")
def test_federate_fedavg_resumed_after_its_end_publishes_one_version(data, config, tmp_path):
    arguments = ("--method", "fedavg", *options(data, config, tmp_path, "--name", "organ", "--rounds", 1))
    first = invoke(*arguments)
    assert first.exit_code == 0, first.output
    again = invoke(*arguments)
    assert again.exit_code == 2
    assert "holds this run already" in again.output
    resumed = invoke(*arguments, "--resume")
    assert resumed.exit_code == 0, resumed.output
    versions = Store(tmp_path / "store").versions
    assert [str(version.artefact) for version in versions.of("organ")] == ["organ@1"]
    taken_back = invoke(*arguments, "--resume-before", "test:1")
    assert taken_back.exit_code == 0, taken_back.output
    versions = Store(tmp_path / "store").versions
    assert [str(version.artefact) for version in versions.of("organ")] == ["organ@1"]
    for wrong, says in (("train:1", "these can: test:1"), ("7", "expected PHASE:ROUND")):
        refused = invoke(*arguments, "--resume-before", wrong)
        assert refused.exit_code == 2
        assert says in refused.output


@pytest.mark.usefixtures("no_pages")
def test_federate_without_out_and_data_uses_the_service_store_and_a_phantom(config, tmp_path, monkeypatch):
    # The service reads the same setting.
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOCUM_STORE", "~/served")
    fewer = [part for site in ("birch", "cedar", "dune") for part in ("--leave-out", site)]
    done = invoke("--method", "fedavg", "--config", config, "--rounds", 1, "--workers", 0, *fewer)
    assert done.exit_code == 0, done.output
    assert Store(tmp_path / "served").versions.names() == ["phantom"]
    assert {"phantom", "runs", "served"} <= {entry.name for entry in tmp_path.iterdir()}


def test_execute_with_an_invalid_name_is_rejected_before_training(data, tmp_path):
    run = Run(load_federation(data), "iop-fl", IopFlConfig(width=2, rounds=1), RunConfig(consent=("aster",)))
    with pytest.raises(ConfigurationError, match=r"'b{123}\.global', of 130"):
        execute(run, tmp_path / "run", workers=0, store=Store(tmp_path / "store"), name="b" * 123)
    assert not (tmp_path / "run").exists()


def test_resume_with_another_configuration_is_rejected_by_field(data, config, tmp_path):
    config_of_folder = FedAvgConfig(width=2, rounds=1, least_steps=2)
    run = Run(load_federation(data), "fedavg", config_of_folder, RunConfig())
    execute(run, tmp_path / "run", workers=0)
    more = ("--run", tmp_path / "run", "--rounds", 1, "--resume")
    refused = invoke("--method", "fedavg", *options(data, config, tmp_path, *more))
    assert refused.exit_code == 2
    lines = [line.strip() for line in refused.output.splitlines() if line.strip().startswith("- ")]
    assert lines[0] == "- config.batch_size: this run 8, the folder's 16"
    assert lines[1] == "- run.seed: this run 4, the folder's 0"
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--method", "FedPros"),
            ["unknown method 'FedPros': did you mean 'fedprox'?", "methods: centralised, "],
        ),
        (("--method", "fedavg", "--leave-out", "zinnia"), ["leave_out", "zinnia", "aster, birch, cedar"]),
        (("--method", "iop-fl", "--consent", "aster,oak"), ["consent", "oak"]),
        (("--method", "fedavg", "--rounds", "0"), ["rounds", "greater than or equal to 1"]),
        (("--method", "fedavg", "--name", "Brain MRI"), ["'Brain MRI', of 9 characters", "another --name"]),
        (("--method", "iop-fl", "--name", "b@3"), ["'b@3'", "beginning with a letter or digit"]),
        (("--method", "iop-fl", "--name", "b" * 122), [f"'{'b' * 122}.global', of 129 characters"]),
        (
            ("--method", "iop-fl", "--consent", "birch", "--name", "b" * 123),
            [f"'{'b' * 123}.birch', of 129 characters"],
        ),
    ],
)
def test_federate_with_invalid_options_exits_with_a_reason(data, config, tmp_path, arguments, said):
    result = invoke(*arguments, *options(data, config, tmp_path))
    assert result.exit_code == 2
    assert all(words in " ".join(result.output.split()) for words in said), result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("method: {wdith: 2, batch_size: 0}", ["wdith", "batch_size", "its fields: rounds, width"]),
        ("rounds: 3", ["'rounds'", "expected a section 'method' or 'run'"]),
        ("method: [", ["cannot be read"]),
        ("run: {egress: {aster: [weights]}, participation: 2}", ["participation"]),
        ("run: {egress: {aster: [statistics]}}", ["site aster", "'weights'", "egress policy refuses"]),
    ],
)
def test_federate_with_invalid_configuration_exits_with_a_reason(data, tmp_path, content, said):
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    result = invoke("--method", "fedavg", *options(data, path, tmp_path))
    assert result.exit_code == 2
    assert all(words in " ".join(result.output.split()) for words in said), result.output


@pytest.mark.parametrize("option", ["--out", "--run"])
def test_federate_with_an_unwritable_folder_exits_before_training(data, config, tmp_path, option):
    (tmp_path / "file").write_text("in the way")
    more = (option, tmp_path / "file" / "below")
    result = invoke("--method", "fedavg", *options(data, config, tmp_path, *more))
    assert result.exit_code == 2
    assert "Not a directory" in result.output
    assert not list(tmp_path.rglob("checkpoint.json"))


def test_federate_with_a_broken_federation_lists_every_problem(tmp_path, config, data):
    root = write_federation(tmp_path / "broken", sites=("aster", "birch"), patients_per_site=2, size=16)
    (root / "aster" / "masks" / "aster-01.nii.gz").unlink()
    (root / "birch" / "images" / "birch-02.nii.gz").write_bytes(b"no scan")
    result = invoke("--method", "fedavg", *options(root, config, tmp_path))
    assert result.exit_code == 2
    assert "aster-01.nii.gz" in result.output
    assert "birch-02.nii.gz" in result.output


@pytest.mark.usefixtures("no_pages")
def test_federate_warns_of_images_shared_by_two_patients(config, tmp_path):
    root = write_federation(tmp_path / "data", sites=("aster", "birch"), patients_per_site=3, size=16)
    images = root / "aster" / "images"
    (images / "aster-02.nii.gz").write_bytes((images / "aster-01.nii.gz").read_bytes())
    result = invoke("--method", "fedavg", *options(root, config, tmp_path, "--rounds", 1))
    assert result.exit_code == 0, result.output
    (record,) = (tmp_path / "runs").glob("*/record.json")
    warnings = json.loads(record.read_text())["warnings"]
    words = "2 images are the same file as another patient's, first aster/images/aster-01"
    assert any(warning.startswith(words) for warning in warnings)
    assert (
        "site 'aster' validates on 1 patient: its validation scores say little of other patients" in warnings
    )


@pytest.mark.usefixtures("no_pages")
def test_federate_warns_of_a_site_that_can_hardly_be_meant(config, tmp_path):
    """Before training, and in the record and the report: one patient, empty masks, one site, most weight."""
    root = write_federation(tmp_path / "data", ("aster", "birch"), patients_per_site=3, size=16)
    write_federation(root, ("cedar",), patients_per_site=1, size=16)
    for mask in (root / "birch" / "masks").iterdir():
        found = nib.load(mask)
        mask.write_bytes(nifti_bytes(np.zeros(found.shape, np.uint8), found.affine))
    result = invoke("--method", "fedavg", *options(root, config, tmp_path, "--rounds", 1))
    assert result.exit_code == 0, result.output
    shown = " ".join(result.output.split())
    assert shown.index("site 'birch': no mask has a pixel of any label") < shown.index("train 1/1")
    assert shown.index("site 'cedar' has one patient, on which it trains and validates") < shown.index(
        "train 1/1"
    )
    manifest = Store(tmp_path / "store").open("phantom").manifest
    assert {"test_dice", "test_dice/organ", "test_n", "test_n/organ"} <= manifest.metrics.keys()
    assert manifest.metrics["test_n/organ"] <= 2  # aster and birch have one each
    assert "validation organ" in shown
    more = ("--rounds", 1, "--leave-out", "birch", "--leave-out", "cedar")
    alone = invoke("--method", "fedavg", *options(root, config, tmp_path / "alone", *more))
    assert "'aster' is the only site: nothing is federated" in " ".join(alone.output.split())
    pair = invoke("--method", "fedavg", *options(root, config, tmp_path / "pair", *more[:4]))
    (record,) = (tmp_path / "pair" / "runs").glob("*/record.json")
    warnings = json.loads(record.read_text())["warnings"]
    assert sum("of all weight, more than all others together" in warning for warning in warnings) >= 1
    assert "more than all others together" in (record.parent / "report.html").read_text()
    assert "more than all others together" in " ".join(pair.output.split())


@pytest.mark.usefixtures("no_pages")
def test_site_that_withholds_statistics_still_trains(data, tmp_path):
    path = tmp_path / "shy.yaml"
    path.write_text("method: {width: 2, rounds: 1}\nrun: {egress: {aster: [weights]}}\n")
    result = invoke("--method", "fedavg", *options(data, path, tmp_path))
    assert result.exit_code == 0, result.output
    (record,) = (tmp_path / "runs").rglob("record.json")
    rounds = json.loads(record.read_text())["rounds"]
    train = next(entry for entry in rounds if entry["phase"] == "train")
    assert train["sites"]["aster"]["withheld"] == ["scores", "metrics"]
    assert set(train["sites"]["aster"]["sent"]) == {"weights"}
    assert {"val_dice", "loss"} <= train["sites"]["birch"]["metrics"].keys()


def test_federate_publishes_a_network_with_further_operators_where_they_are_allowed(
    data, config, tmp_path, no_pages, monkeypatch
):
    monkeypatch.setattr(graphs, "EXPORTED", graphs.EXPORTED - {"MaxPool"})
    arguments = ("--method", "fedavg", *options(data, config, tmp_path, "--rounds", 1))
    refused = invoke(*arguments)
    assert refused.exit_code == FAILED
    assert "found MaxPool" in refused.stderr
    assert "LOCUM_GRAPH_OPERATORS" in refused.stderr
    invalid = invoke(*arguments, "--resume", "--graph-operators", "Max Pool")
    assert invalid.exit_code == FAILED
    assert "--graph-operators cannot be used" in invalid.stderr
    # The training is not lost.
    allowed = invoke(*arguments, "--resume", "--graph-operators", "MaxPool")
    assert allowed.exit_code == 0, allowed.stderr
    assert Store(tmp_path / "store").versions.names() == ["phantom"]
