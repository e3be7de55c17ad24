"""The notebook of the documentation, run cell by cell against a running service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from tests.integration.locum.conftest import Served

NOTEBOOK = Path(__file__).parents[3] / "docs/notebooks/adapt.ipynb"


def test_notebook_goes_from_a_folder_to_a_version_with_a_plot(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    matplotlib.use("agg")
    monkeypatch.setenv("LOCUM_URL", served.url)
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    (parameters,) = (cell for cell in code if "parameters" in cell["metadata"].get("tags", ()))
    # As papermill injects them: after the cell of this tag. The model here is smaller, and its job shorter.
    given = {"MODEL": "organ", "SCANS": tmp_path / "ember", "HOSPITAL": "notebook", "PATIENTS": range(50, 53)}
    names: dict[str, Any] = {}
    for cell in code:
        exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}:{cell['id']}", "exec"), names)
        if cell is parameters:
            names.update(given)
        assert cell["outputs"] == [], "commit the notebook without its outputs"
    told = capsys.readouterr().out
    assert "3 scans in" in told
    assert names["job"].candidate.reference == "organ.at-notebook@1"
    assert f"organ.at-notebook@1 {'passed' if names['job'].gate.passed else 'did not pass'} its gate" in told
    assert len(names["figure"].axes) == 3
    assert 0 < names["scores"]["before"] <= 1
    served_now = "organ.at-notebook@1" if names["job"].gate.passed else "organ@1"
    assert told.rstrip().endswith(f"serves now: {served_now}")
    matplotlib.pyplot.close(names["figure"])
