"""`python -m benchmarks`: list, run, report."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.harness.cells import Rows
from benchmarks.registry import EXPERIMENTS, find

RESULTS = Path(__file__).parents[3] / "docs/results"


def answer_of(*arguments: str, exit_code: int = 0) -> str:
    """What the command writes to either output."""
    answer = CliRunner().invoke(app, list(arguments))
    assert answer.exit_code == exit_code, answer.output
    return answer.output


def test_list_names_every_experiment_with_question_profiles_and_rows() -> None:
    text = answer_of("list")
    for name in EXPERIMENTS:
        experiment = find(name)
        for said in (name, experiment.question, ", ".join(experiment.profiles)):
            assert said in text
        assert all(f"docs/results/{table.name}.jsonl" in text for table in experiment.tables)


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    text = answer_of("run", "metod_cost", exit_code=2)
    assert "did you mean 'method_cost'?" in " ".join(text.replace("│", " ").split())


def test_a_run_resumes_and_a_report_writes_the_same_page(tmp_path: Path) -> None:
    rows = tmp_path / "method.jsonl"
    command = ("method_cost", "--profile", "smoke", "--rows", str(rows))
    run = ("run", *command, "--state-dir", str(tmp_path / "state"))
    answer_of(*run, "--only", "mode=inference", "--only", "sites=3")
    assert len(Rows(rows).read()) == 2
    answer_of(*run, "--only", "mode=inf*")
    assert len(Rows(rows).read()) == 5
    page = rows.with_suffix(".md")
    text = page.read_text()
    assert f"python -m benchmarks run {' '.join(command)}" in text
    page.unlink()
    assert answer_of("report", *command).strip() == str(page)
    assert page.read_text() == text


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_recorded_pages_follow_from_the_recorded_rows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "docs/results"
    folder.mkdir(parents=True)
    for table in find(name).tables:
        shutil.copy(RESULTS / f"{table.name}.jsonl", folder)
    monkeypatch.chdir(tmp_path)
    answer_of("report", name)
    for table in find(name).tables:
        written = (folder / f"{table.name}.md").read_text(encoding="utf-8")
        assert written == (RESULTS / f"{table.name}.md").read_text(encoding="utf-8")


def test_the_results_page_has_the_command_of_every_table() -> None:
    text = (RESULTS / "README.md").read_text(encoding="utf-8")
    for name in EXPERIMENTS:
        for table in find(name).tables:
            page = f"[{table.name}]({table.name}.md)"
            assert f"| {page} | `{find(name).of_table(table).command}` |" in text
