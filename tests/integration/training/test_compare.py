"""A comparison on a folder: the scores of its runs, failures as rows, and a table that resumes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

import training.compare.run as comparing
from tests.helpers.training.acme_methods import acme_methods
from training.compare import Comparison, Request, compare
from training.compare.__main__ import compare as command
from training.compare.cells import BudgetSpent, Rows, Trainer
from training.config import RunConfig
from training.data.federation import load_federation
from training.engine.history import RoundEntry, final_scores
from training.errors import ConfigurationError, RunMismatch
from training.methods.registry import method
from training.options import DataOptions
from training.phantom import write_federation
from training.record import RunRecord

SITES = ("aster", "birch", "cedar")
CONFIG = "method: {width: 4, batch_size: 8, least_steps: 12, learning_rate: 0.02, keep: 0.99}\n"
METHODS = ("fedavg", "fedbn", "acme.shrink", "acme.broken", "acme.refuses", "acme.local", "dense")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_federation(tmp_path_factory.mktemp("compare") / "kidneys", SITES, 5, 32)


@pytest.fixture(scope="module")
def compared(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Request, Comparison]]:
    """A comparison in a worker process, as by default, with another package's methods, some of which fail."""
    root = tmp_path_factory.mktemp("acme")
    (root / "run.yaml").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch, acme_methods(root / "site-packages", patch) as install:
        install()
        request = Request(
            methods=METHODS,
            data=DataOptions(data=data),
            seeds=(4,),
            rounds=2,
            config=root / "run.yaml",
            out=root / "out",
            workers=1,
        )
        yield request, compare(request, say=lambda _: None)


def test_scores_are_those_of_the_runs_and_of_the_same_patients(
    compared: tuple[Request, Comparison],
) -> None:
    request, found = compared
    rows = Rows(request.out / "rows.jsonl")
    assert [line.method for line in found.lines] == ["fedavg", "fedbn", "acme.shrink"]
    for line in found.lines:
        means = []
        for seed in request.seeds:
            row = rows.get((line.method, seed))
            assert row is not None
            record = RunRecord.read(request.out / "records" / f"{line.method}-{seed}.json")
            model = "personal" if line.method == "fedbn" else ""
            (stated,) = (
                score
                for score in final_scores(record.rounds)
                if (score.model, score.split, score.label) == (model, "test", "")
            )
            assert set(stated.sites) == set(SITES)
            for site, (mean, count) in stated.sites.items():
                scores = [score for own in row.answering[site].values() for score in own if score is not None]
                assert len(scores) == count
                assert np.mean(scores) == pytest.approx(mean)
            means.append(np.mean([mean for mean, _ in stated.sites.values()]))
            assert record.config["rounds"] == 2
            assert record.seconds > row.seconds > 0
            other = rows.get(("fedavg", seed))
            assert other is not None
            assert {s: [*p] for s, p in row.answering.items()} == {
                s: [*p] for s, p in other.answering.items()
            }
        assert line.score == pytest.approx(np.mean(means))
        assert line.score > 0.2
        assert line.sent > 0
    assert found.lines[0].answers == "global"
    assert found.lines[1].answers == "own"
    # Batch norm stays at the sites, and no model of theirs is counted that is only exported.
    assert found.lines[1].sent < found.lines[0].sent


def test_failures_are_rows_with_a_sentence_and_the_others_go_on(
    compared: tuple[Request, Comparison],
) -> None:
    request, found = compared
    assert found.missing == {}
    assert set(found.failed) == {"acme.broken", "acme.refuses", "acme.local", "dense"}
    reasons = {name: by_seed[4] for name, by_seed in found.failed.items()}
    assert reasons["acme.broken"].startswith(
        "phase 'train', round 1: no site delivered (aster: ArithmeticError at acme_methods.py:"
    )
    assert reasons["acme.refuses"].startswith("ValueError: the mean is not there yet (acme_methods.py:")
    assert "Local" in reasons["acme.local"]
    assert reasons["dense"] == "it is for classification, and 'phantom' is a segmentation"
    for reason in reasons.values():
        assert "\n" not in reason
        assert "Doe" not in reason
    # A hospital's own words are in the log, which stays here.
    log = (request.out / "failures/acme.broken-4.log").read_text()
    assert "ArithmeticError: Doe_John has no such gradient" in log
    assert f"acme.refuses failed (seed 4): {reasons['acme.refuses']}" in found.verdict
    assert [*(request.out / "runs").iterdir()] == []


def test_page_has_no_patient(compared: tuple[Request, Comparison]) -> None:
    request, found = compared
    rows = Rows(request.out / "rows.jsonl")
    row = rows.get(("fedavg", 4))
    assert row is not None
    patients = [patient for own in row.answering.values() for patient in own]
    assert len(patients) == len(SITES)
    for name in ("compare.html", "compare.md", "compare.json"):
        text = (request.out / name).read_text()
        assert "fedbn" in text
        assert not [patient for patient in patients if patient in text]
    assert json.loads((request.out / "compare.json").read_text()) == json.loads(json.dumps(found.content()))


def test_finished_cells_are_not_trained_again_and_those_of_other_data_are_refused(
    compared: tuple[Request, Comparison], data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    request, found = compared
    first = Request(**{**vars(request), "methods": ("fedavg", "fedbn")})

    def train(*_: object, **__: object) -> None:
        raise AssertionError("a finished cell was trained")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train", train)
        again = compare(first, say=lambda _: None)
    assert again.lines == found.lines[:2]
    with pytest.raises(RunMismatch, match=r"fedavg, config.rounds: this run 3, the folder's 2"):
        compare(Request(**{**vars(first), "rounds": 3}), say=lambda _: None)
    other = write_federation(tmp_path / "kidneys", SITES[:2], 5, 32)
    changed = {**vars(request), "methods": ("local-only",), "data": DataOptions(data=other)}
    with pytest.raises(RunMismatch, match=r"fedavg, data: this run .*sha256.*, the folder's"):
        compare(Request(**changed), say=lambda _: None)


def test_budget_stops_after_a_round_and_the_rest_gives_the_same_scores(
    compared: tuple[Request, Comparison], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, _ = compared
    seen: list[tuple[str, int]] = []
    short = Request(
        **{**vars(request), "methods": ("fedavg", "fedbn"), "seeds": (4,), "workers": 0}
        | {"out": tmp_path / "out", "budget": 60.0}
    )
    check, now = comparing._Budget.check, [0.0]

    def later(self: comparing._Budget, cell: tuple[str, int], entry: RoundEntry) -> None:
        seen.append((entry.phase, entry.round))
        now[0] += 100.0 if entry.phase == "train" else 0.0
        check(self, cell, entry)

    lines: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(comparing._Budget, "check", later)
        patch.setattr(comparing.time, "monotonic", lambda: now[0])
        found = compare(short, lines.append, "locum compare …")
    assert seen[-1] == ("train", 0)
    assert lines[-1] == "fedavg, seed 4: stopped after train 1/2, where it goes on"
    assert found.missing == {"fedavg": [4], "fedbn": [4]}
    assert found.markdown().endswith("Go on with\n\n    locum compare …\n")
    found = compare(Request(**{**vars(short), "budget": None}), lines.append)
    assert found.missing == {}
    whole, apart = (Rows(folder / "rows.jsonl") for folder in (request.out, short.out))
    for name in short.methods:
        one, other = whole.get((name, 4)), apart.get((name, 4))
        assert one is not None
        assert other is not None
        assert one.scores == other.scores
        assert one.sent == other.sent
    assert lines[-1].startswith("fedbn, seed 4: Dice 0.")
    assert "1 of 2 cells; the last one takes about " in lines[-2]


def test_spent_budget_trains_nothing_and_names_what_is_missing(data: Path, tmp_path: Path) -> None:
    request = Request(methods=("fedavg",), data=DataOptions(data=data), out=tmp_path / "out", budget=0.0)
    found = compare(request, say=lambda _: None)
    assert found.missing == {"fedavg": [0, 1, 2]}
    assert found.lines == ()
    assert (tmp_path / "out/compare.html").exists()


def started(*arguments: str) -> Result:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)
    return CliRunner().invoke(app, [*arguments])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--methods", "fedavg,fedbm"), "unknown method 'fedbm': did you mean 'fedbn'?"),
        (("--methods", "fedavg,fedavg"), "expected each once, found fedavg, fedavg"),
        (("--methods", "fedavg", "--seeds", "two"), "expected a number or a list as 3,7, found 'two'"),
        (("--methods", "fedavg", "--seeds", "0"), "--seeds cannot be used"),
        (("--methods", "fedavg", "--budget", "soon"), "expected such as 30m, 1h30m or 90s, found 'soon'"),
        (("--methods", "fedavg", "--again", "fedbn"), "not compared: fedbn"),
        (("--methods", "fedavg", "--rounds", "0"), "rounds"),
        (("--methods", "fedavg", "--data", "nowhere"), "nowhere"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_words(
    arguments: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    done = started(*arguments, "--out", str(tmp_path / "out"))
    assert done.exit_code == 2, done.output
    assert done.output.startswith("error "), done.output
    assert words in done.output


def test_command_prints_the_table(data: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("method: {width: 2, local_epochs: 1, least_steps: 2, mu: 0.1}\n")
    out = tmp_path / "out"
    asked = (
        "--methods",
        "fedavg,local-only",
        "--data",
        str(data),
        "--config",
        str(config),
        "--out",
        str(out),
    )
    done = started(*asked, "--seeds", "1", "--rounds", "1", "--workers", "0", "--leave-out", "cedar")
    assert done.exit_code == 0, done.output
    assert "| local-only | own     |" in done.output
    assert "No difference from fedavg can be shown of local-only" in done.output
    assert f"page  {out / 'compare.html'}" in done.output
    assert "cedar" not in (out / "compare.md").read_text()


def test_field_of_no_method_is_refused(data: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("method: {mu: 0.1, widht: 3}\n")
    request = Request(methods=("fedavg", "fedprox"), data=DataOptions(data=data), config=config, out=tmp_path)
    with pytest.raises(ConfigurationError, match="widht: no method has this field"):
        compare(request)


def test_stopped_cell_that_failed_begins_again(data: Path, tmp_path: Path) -> None:
    """A cell without a row goes on at its round; one with a failure is trained from its beginning."""
    federation = load_federation(data)
    config = method("fedavg").config(rounds=2, width=2, least_steps=1, local_epochs=1)
    seen: list[tuple[str, int]] = []

    def stop(_: tuple[str, int], entry: RoundEntry) -> None:
        seen.append((entry.phase, entry.round))
        if len(seen) == 2:
            raise BudgetSpent(entry)

    trainer = Trainer(federation, {"fedavg": config}, RunConfig(consent="all"), tmp_path, 0, stop)
    with pytest.raises(BudgetSpent):
        trainer.train(("fedavg", 0), afresh=False)
    assert trainer.train(("fedavg", 0), afresh=True).failure is None
    assert seen[2] == seen[0]


NOTEBOOK = Path(__file__).parents[3] / "docs/notebooks/compare.ipynb"


def test_notebook_trains_and_compares(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    matplotlib.use("agg")
    code = [c for c in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.replace(", keep: 0.99", ""))
    given = {"DATA": data, "CONFIG": config, "OUT": tmp_path / "out", "WORKERS": 0}
    given |= {"METHODS": ("fedavg", "fedprox"), "SEEDS": (0,), "ROUNDS": 1}
    names: dict[str, Any] = {}
    for cell in code:
        assert cell["outputs"] == [], "commit the notebook without its outputs"
        exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}:{cell['id']}", "exec"), names)
        if "parameters" in cell["metadata"].get("tags", ()):
            names.update(given)
    said = capsys.readouterr().out
    assert "fedprox, seed 0: Dice 0." in said
    assert "| fedprox | global" in said
    assert len(names["scores"].patches) == 2 * len(SITES)
    assert [len(line.get_ydata()) for line in names["rounds"].lines] == [1, 1]
    for each in ("figure", "curves"):
        matplotlib.pyplot.close(names[each])
