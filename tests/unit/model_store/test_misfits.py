"""What is said of a file's wrong fields."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_store.errors import TaskError
from model_store.task import Task
from training.config import RunConfig, parse
from training.errors import ConfigurationError
from training.methods.registry import method


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (
            "normalization: {method: none}",
            "normalization: there is no such field; did you mean 'normalisation'?",
        ),
        ("lables: {organ: [1]}", "lables: there is no such field; did you mean 'labels'?"),
        (
            "normalisation: {methd: none}",
            "normalisation.methd: there is no such field; did you mean 'method'?",
        ),
    ],
)
def test_misspelt_field_of_a_task_names_the_one_that_is_meant(
    tmp_path: Path, written: str, words: str
) -> None:
    path = tmp_path / "task.yaml"
    path.write_text(f"name: t\nsize: [32, 32]\n{written}\n")
    with pytest.raises(TaskError) as caught:
        Task.load(path)
    assert words in str(caught.value)


def test_field_like_no_other_names_none(tmp_path: Path) -> None:
    path = tmp_path / "task.yaml"
    path.write_text("name: t\nsize: [32, 32]\nlabels: {organ: [1]}\nzzz: 1\n")
    with pytest.raises(TaskError, match=r"zzz: there is no such field$"):
        Task.load(path)


def test_misspelt_option_of_a_run_is_found_below_its_section() -> None:
    with pytest.raises(
        ConfigurationError, match=r"defence.reducton: there is no such field; did you mean 'reduction'"
    ):
        parse(RunConfig, {"defence": {"reducton": "mean"}}, "run.yaml")
    with pytest.raises(ConfigurationError, match=r"egres: there is no such field; did you mean 'egress'"):
        parse(RunConfig, {"egres": {}}, "run.yaml")
    with pytest.raises(ConfigurationError, match=r"round: there is no such field; did you mean 'rounds'"):
        parse(method("fedavg").config, {"round": 3}, "run.yaml")


def test_bad_value_is_shown_as_before() -> None:
    with pytest.raises(ConfigurationError, match=r"seed: .* \(found -1\)"):
        parse(RunConfig, {"seed": -1}, "run.yaml")
