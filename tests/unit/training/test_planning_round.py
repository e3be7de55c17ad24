"""Planning with real files in process: who is planned with, what follows, and what cannot be planned."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from model_store.task import Task
from personalization.networks import outline
from personalization.networks.capabilities import traits_of
from tests.helpers.training.ct_volumes import SITES, write_volumes
from training.config import RunConfig
from training.data.federation import load_federation
from training.data.segmentation.infer_task import task_of_dataset_json
from training.errors import ConfigurationError, FederationError
from training.methods.registry import method
from training.plan import load_hospitals
from training.planning.planner import BUDGETS
from training.planning.proposal import Proposal, budget_of
from training.planning_round import plan_federation, planning_run, replanned

LAPTOP = BUDGETS["laptop"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_volumes(tmp_path_factory.mktemp("federation"))


def planned(root: Path, place: Path, **settings: object) -> Proposal:
    federation = load_federation(root, by_value=True)
    return plan_federation(federation, RunConfig.model_validate(settings), LAPTOP, place)


def test_plan_of_a_folder_is_a_task_of_volumes_and_a_network(root: Path, tmp_path: Path) -> None:
    found = planned(root, tmp_path / "plan")
    assert found.told.sites == ("A", "B", "C")
    geometry = found.task.geometry
    assert geometry is not None
    # Medians of 4, 5 and 4 training cases.
    assert geometry.spacing == (0.8, 0.8, 2.5)
    assert found.task.labels == {"label-1": (1,), "label-2": (2,)}
    strides = found.options["network_arguments"]["strides"]
    assert all(
        side % 2 ** sum(s[axis] == 2 for s in strides) == 0 for axis, side in enumerate(geometry.patch)
    )
    assert strides[1] == [2, 2, 1]
    normalisation = found.task.normalisation
    assert normalisation.method == "fixed"
    assert normalisation.window is not None
    assert normalisation.window[0] == pytest.approx(35, abs=12)
    assert normalisation.mean == pytest.approx(62, abs=6)
    assert normalisation.std == pytest.approx(14, abs=4)


def test_plan_depends_on_training_patients_alone(root: Path, tmp_path: Path) -> None:
    federation = load_federation(root, by_value=True)
    first = planning_run(federation, RunConfig()).sites()
    # Test and validation cases get a spacing that a plan would notice.
    assigned = replace(federation, sites=first)
    kept = {site.name: len(site.of_split("train")) for site in first}
    found = plan_federation(assigned, RunConfig(), LAPTOP, tmp_path / "plan")
    assert found.summary.cases == sum(kept.values()) < sum(site.size for site in first)


def test_site_that_refuses_statistics_is_planned_for_and_not_with(root: Path, tmp_path: Path) -> None:
    found = planned(root, tmp_path / "plan", egress={"B": ["weights"]})
    assert found.told.sites == ("A", "C")
    assert found.told.silent == {"B": "its policy refuses statistics"}
    assert "B sent nothing (its policy refuses statistics): planned for, not with" in found.sentences[0]


def test_site_below_its_own_minimum_of_patients_sends_nothing(root: Path, tmp_path: Path) -> None:
    found = planned(root, tmp_path / "plan", feature_bounds={"B": {"minimum_patients": 7}})
    assert found.told.sites == ("A", "C")
    assert "fewer than" in found.told.silent["B"]


def test_federation_without_a_fingerprint_is_refused_with_each_reason(root: Path, tmp_path: Path) -> None:
    refused = {site: ["weights"] for site in SITES}
    with pytest.raises(ConfigurationError, match="no site tells") as raised:
        planned(root, tmp_path / "plan", egress=refused)
    assert "site 'C': its policy refuses statistics" in str(raised.value)
    assert "with --task in place of --plan" in str(raised.value)


def test_site_with_most_cases_is_said_to_count_as_half(tmp_path: Path) -> None:
    sites = {"A": (5, (0.8, 0.8, 2.5)), "B": (5, (0.8, 0.8, 2.5)), "C": (24, (2.0, 2.0, 2.0))}
    found = planned(write_volumes(tmp_path / "federation", sites), tmp_path / "plan")
    assert "C announces" in found.sentences[1]
    assert "so that no site decides a plan alone." in found.sentences[1]
    assert found.task.geometry is not None
    assert found.task.geometry.spacing == (0.8, 0.8, 2.5)


def test_finished_plan_is_not_repeated_on_resume(root: Path, tmp_path: Path) -> None:
    before = planned(root, tmp_path / "plan")
    federation = load_federation(root, by_value=True)
    gone = [
        replace(site, cases=tuple(replace(c, image=root / "gone" / c.name) for c in site.cases))
        for site in federation.sites
    ]
    unreadable = replace(federation, sites=tuple(gone))
    again = plan_federation(unreadable, RunConfig(), LAPTOP, tmp_path / "plan", resume=True)
    assert again == before


def test_planned_task_and_options_are_read_back(root: Path, tmp_path: Path) -> None:
    found = planned(root, tmp_path / "plan")
    task, config = found.write(tmp_path / "out")
    assert Task.load(task) == found.task
    assert yaml.safe_load(config.read_text()) == {"method": found.options}
    federation = load_federation(root, by_value=True)
    again = replanned(federation, found)
    assert again.task == found.task
    assert again.inferred
    assert again.digest != federation.digest


def test_method_builds_the_planned_network_from_options_or_from_the_task_alone(
    root: Path, tmp_path: Path
) -> None:
    found = planned(root, tmp_path / "plan")
    config = method("fedavg").config
    spec = config.model_validate(found.options).network_for(found.task)
    alone = config(width=LAPTOP.features).network_for(found.task)
    for name in ("kernel_size", "strides", "filters"):
        assert spec.arguments[name] == alone.arguments[name] == found.options["network_arguments"][name]
    network = outline(spec.name, **spec.arguments)
    assert found.task.geometry is not None
    traits_of(network).check_sides(found.task.geometry.patch, spec.name)


def test_few_thick_slices_stay_slices(tmp_path: Path) -> None:
    sites = dict.fromkeys("AB", (5, (0.8, 0.8, 8.0)))
    root = write_volumes(tmp_path / "thick", sites, shape=(40, 36, 6))
    found = planned(root, tmp_path / "plan")
    assert found.dimensions == 2
    assert not found.task.is_volume
    assert found.options == {}
    assert "6 slices 10.0 times as far apart" in found.sentences[1]
    federation = load_federation(root, by_value=True)
    with pytest.raises(ConfigurationError, match="too small for a 3-D network"):
        plan_federation(
            load_federation(write_volumes(tmp_path / "tiny", sites, shape=(12, 12, 8)), by_value=True),
            RunConfig(),
            LAPTOP,
            tmp_path / "plan3",
            dimensions=3,
        )
    forced = plan_federation(federation, RunConfig(), LAPTOP, tmp_path / "plan4", dimensions=3)
    assert forced.task.is_volume
    assert "volumes were asked for, though slices may do better" in forced.sentences[1]


def test_budget_may_be_a_name_or_gigabytes() -> None:
    assert budget_of("gpu-8gb").gigabytes == 8
    assert budget_of("11").gigabytes == 11
    for wrong in ("gpu", "0", "-3", "nan", "inf"):
        with pytest.raises(ConfigurationError, match="expected one of laptop"):
            budget_of(wrong)


NO_SIZE = "name: organ\nlabels: {organ: [1], core: [2]}\n"


def test_task_with_labels_and_no_size_is_planned_and_the_data_decide(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "volumes")
    (tmp_path / "volumes/task.yaml").write_text(NO_SIZE)
    found = planned(tmp_path / "volumes", tmp_path / "plan")
    assert found.task.labels == {"organ": (1,), "core": (2,)}
    assert found.task.geometry is not None
    assert found.task.geometry.spacing == (0.8, 0.8, 2.5)
    with pytest.raises(FederationError, match=r"task.yaml: size: expected"):
        load_federation(tmp_path / "volumes")

    sites = dict.fromkeys("AB", (5, (0.8, 0.8, 8.0)))
    thick = write_volumes(tmp_path / "thick", sites, shape=(40, 36, 6))
    (thick / "task.yaml").write_text(f"{NO_SIZE}modality: CT\n")
    found = planned(thick, tmp_path / "plan2")
    assert (found.dimensions, found.task.size, found.task.modality) == (2, (48, 48), "CT")
    assert "The task gets slices of 48 x 48 pixels" in found.sentences[-1]
    assert Task.load(found.write(tmp_path / "out")[0]) == found.task


def test_command_plans_a_task_that_names_labels_alone(root: Path, tmp_path: Path) -> None:
    import typer

    from training.plan import plan

    (tmp_path / "labels.yaml").write_text(NO_SIZE)
    app = typer.Typer()
    app.command()(plan)
    result = CliRunner().invoke(app, [str(root), "--task", str(tmp_path / "labels.yaml")])
    assert result.exit_code == 0, result.output
    assert "name: organ" in result.output
    assert "geometry:" in result.output


def test_hospitals_folders_make_one_federation(root: Path) -> None:
    found = load_hospitals([root / "A", root / "C"])
    assert [site.name for site in found.sites] == ["A", "C"]
    with pytest.raises(ConfigurationError, match="several hospitals are called A"):
        load_hospitals([root / "A", root])


def test_command_prints_the_plan_and_writes_it(root: Path, tmp_path: Path) -> None:
    import typer

    from training.plan import plan

    app = typer.Typer()
    app.command()(plan)
    out = tmp_path / "out"
    result = CliRunner().invoke(app, [str(root), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "Planned with" in result.output
    assert "monai.dynunet" in result.output
    assert Task.load(out / "task.yaml").is_volume
    failed = CliRunner().invoke(app, [str(tmp_path / "none")])
    assert failed.exit_code == 2


def test_folder_of_nnunet_is_planned_with_its_labels_and_channels(tmp_path: Path) -> None:
    root = write_volumes(tmp_path / "Dataset001_Organ", {"site": (6, (1.0, 1.0, 1.2))})
    for old, new in (("images", "imagesTr"), ("masks", "labelsTr")):
        (root / "site" / old).rename(root / new)
    for image in sorted((root / "imagesTr").iterdir()):
        stem = image.name.removesuffix(".nii.gz")
        (root / "imagesTr" / f"{stem}_0001.nii.gz").write_bytes(image.read_bytes())
        image.rename(root / "imagesTr" / f"{stem}_0000.nii.gz")
    said = {
        "channel_names": {"0": "CT", "1": "ct late (2)"},
        "labels": {"background": 0, "organ": [1, 2], "core": 2},
    }
    (root / "dataset.json").write_text(json.dumps(said))
    found = planned(root, tmp_path / "plan")
    assert found.task.labels == {"organ": (1, 2), "core": (2,)}
    assert [channel.name for channel in found.task.channel_list] == ["CT", "ct-late-2"]
    assert {channel.normalisation.method for channel in found.task.channel_list} == {"fixed"}
    assert found.task.geometry is not None
    assert found.task.geometry.spacing == (1, 1, 1.2)

    said["channel_names"] = {"0": "CT", "1": "PET"}
    (root / "dataset.json").write_text(json.dumps(said))
    methods = [each.normalisation.method for each in planned(root, tmp_path / "pet").task.channel_list]
    assert methods == ["fixed", "zscore"]

    (root / "dataset.json").write_text(json.dumps({"labels": {"0": "background", "1": "organ", "2": "core"}}))
    with pytest.raises(FederationError, match="expected labels and channel_names"):
        load_federation(root, by_value=True)
    (root / "task.yaml").write_text("name: organ\nlabels: {organ: [1, 2]}\nsize: [32, 32]\n")
    with pytest.raises(FederationError):
        # Its files are those of two channels, and the task has one.
        load_federation(root, by_value=True)


def test_channels_of_which_the_keys_are_no_numbers_have_the_order_of_the_file(tmp_path: Path) -> None:
    said = {"channel_names": {"t2": "T2", "flair": "FLAIR"}, "labels": {"background": 0, "organ": 1}}
    (tmp_path / "dataset.json").write_text(json.dumps(said), encoding="utf-8-sig")
    task = task_of_dataset_json(tmp_path)
    assert task is not None
    assert [channel.name for channel in task.channel_list] == ["T2", "FLAIR"]


def test_dataset_json_of_the_decathlon_maps_values_to_names(tmp_path: Path) -> None:
    said = {"modality": {"0": "MRI"}, "labels": {"0": "background", "1": "Anterior", "2": "Posterior"}}
    (tmp_path / "dataset.json").write_text(json.dumps(said))
    task = task_of_dataset_json(tmp_path)
    assert task is not None
    assert task.labels == {"Anterior": (1,), "Posterior": (2,)}
    assert (task.channels, task.modality) == (1, None)
