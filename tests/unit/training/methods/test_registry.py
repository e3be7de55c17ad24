"""Methods are found by their files, and by almost their names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import training.methods
from model_store.task import Task
from training.choices.fedavg import FedAvgConfig
from training.errors import ConfigurationError
from training.methods.fedavg import FedAvg
from training.methods.registry import method, methods, register

ONE_FILE = """
from training.methods.fedavg import FedAvg
from training.choices.fedavg import FedAvgConfig
from training.methods.registry import register


@register("fedtoy", FedAvgConfig)
class FedToy(FedAvg):
    pass
"""


def test_every_method_is_found() -> None:
    assert {"fedavg", "fedbicross", "fedins", "fedoap", "iop-fl"} < {*methods()}
    assert {"fedbn", "fedper", "fedprox", "fedrep"} < {*methods()}
    assert {"fedadagrad", "fedadam", "fedavgm", "fedyogi", "scaffold"} < {*methods()}
    assert {"dense", "ditto", "fedsoup", "pfedme"} < {*methods()}
    assert {"co-boosting", "dafl", "feddc", "fedisca", "moon"} < {*methods()}
    assert list(methods()) == sorted(methods())


@pytest.mark.process
def test_a_new_file_in_the_package_is_a_method_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "fedtoy.py").write_text(ONE_FILE)
    code = (
        "import training.methods\n"
        f"training.methods.__path__.append({str(tmp_path)!r})\n"
        "from training.federate import federate\n"
        "import typer\n"
        "typer.run(federate)\n"
    )
    command = [sys.executable, "-c", code, "--method", "fedtoy", "--rounds", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "method fedtoy (its fields: rounds, width" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("misspelt", "nearest"),
    [
        *(("fedpros", "fedprox"), ("FedProx", "fedprox"), ("iop_fl", "iop-fl"), ("fedbicros", "fedbicross")),
        *(("coboosting", "co-boosting"), ("FedISCA", "fedisca"), ("MOON", "moon"), ("feddcc", "feddc")),
    ],
)
def test_a_misspelt_method_is_answered_with_the_nearest_name(misspelt: str, nearest: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        method(misspelt)
    assert str(raised.value) == (
        f"unknown method '{misspelt}': did you mean '{nearest}'?\n  - known methods: {', '.join(methods())}"
    )


def test_a_name_like_no_other_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError) as raised:
        method("zzz")
    assert str(raised.value) == f"unknown method 'zzz'\n  - known methods: {', '.join(methods())}"


def test_two_classes_of_one_name_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"method 'fedavg': registered by .*FedAvg.* and by .*Another"):

        @register("fedavg", FedAvgConfig)
        class Another(FedAvg):
            pass

    assert method("fedavg").build is FedAvg


def test_no_step_of_a_method_asks_in_which_phase_it_is() -> None:
    folder = Path(training.methods.__file__).parent
    asking = [path.name for path in folder.rglob("*.py") if "context.phase" in path.read_text()]
    assert asking == []


def test_every_step_of_a_plan_has_a_name_of_its_own() -> None:
    task = Task(name="shapes", kind="classification", class_names=("a", "b"), size=(28, 28))
    plain = ("fedavg", "fedbicross", "dense", "ditto", "local-only", "centralised")
    for name in (*plain, "moon", "feddc", "dafl", "fedisca", "co-boosting"):
        chosen = method(name)
        names = [step.name for step in chosen.build(chosen.config(), task).plan()]
        assert len({*names}) == len(names)
