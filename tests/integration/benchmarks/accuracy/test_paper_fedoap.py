from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.accuracy.papers.fedoap import (
    ARMS,
    PROFILES,
    SECOND_STAGE,
    SITES,
    TWO_EPOCHS,
    ZERO_SHOT,
    PaperFedOap,
)
from benchmarks.harness.cells import Rows
from benchmarks.harness.experiment import Options


def test_all_arms_see_the_same_number_of_batches() -> None:
    steps = set()
    for cell in PaperFedOap(Options("cpu", Path("data"))).cells():
        if cell["part"] == "unseen":
            continue
        method = cell["method"]
        rounds = method["rounds"] + method.get("fine_tune_rounds", 0) + cell.get("tuned", 0)
        if cell["arm"].endswith(", twice the rounds"):
            rounds -= PROFILES["cpu"].method["rounds"]
        steps.add((rounds * method["local_steps"], method["batch_size"]))
    planned = PROFILES["cpu"].method
    assert steps == {((planned["rounds"] + SECOND_STAGE) * planned["local_steps"], planned["batch_size"])}


def test_an_arm_is_scored_at_every_site_and_compared_with_the_first(real_data: Path, tmp_path: Path) -> None:
    rows = tmp_path / "table.jsonl"
    command = ["run", "paper-fedoap", "--profile", "smoke", "--data", str(real_data), "--rows", str(rows)]
    chosen = [("arm=FedAvg",), ("arm=FedOAP",), ("arm=FedDP, [tz]*", "site=bladder_mri")]
    for only in chosen:
        options = ["--state-dir", str(tmp_path / "state"), "--workers", "0"]
        answer = CliRunner().invoke(app, [*command, *options, *(t for o in only for t in ("--only", o))])
        assert answer.exit_code == 0, answer.output
    first, second, *unseen = Rows(rows).read()
    for row in (first, second):
        assert set(row["result"]["sites"]) == set(SITES)
        assert row["result"]["cost"]["sent"] > 0
    # The same federation without the organ answers before and after two epochs, which change the answer.
    assert {row["cell"]["part"] for row in unseen} == {"unseen"}
    assert [row["cell"]["arm"] for row in unseen] == [f"FedDP, {after}" for after in (ZERO_SHOT, TWO_EPOCHS)]
    before, after = (row["result"] for row in unseen)
    assert set(before["sites"]) == set(after["sites"]) == {"bladder_mri"}
    assert before["cost"] == after["cost"]
    published = next(arm.published for arm in ARMS["comparison"] if arm.name == "FedOAP")
    page = rows.with_suffix(".md").read_text()
    assert "| FedOAP |" in page
    assert all(f"{value:.1f}" in page for value in published.values())
    assert "table.comparison.svg" in page
    lacking = page.split("## Not computed yet")[1]
    assert all(f"{arm} (" in lacking for arm in ("Single-site", "FedAvg, twice the rounds", "FedAvgM"))
