"""What a service says moves no cursor, and computes nothing in a spreadsheet."""

from __future__ import annotations

import ast
import csv
import io
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from locum.commands.app import main
from locum.commands.following import Followed
from locum.commands.terminal import Terminal, plain, table
from locum.errors import AnswerInvalid, Problem

ESCAPES = "\x1b]0;title\x07\x1b[2J\x1b[8mhidden\x9b2J‮txt.exe \u2028end"
COMMANDS = Path(__file__).parents[4] / "locum" / "commands"


@pytest.mark.parametrize("markup", [False, True])
def test_sentences_are_printed_without_control_characters(markup: bool) -> None:
    told = io.StringIO()
    console = Terminal(file=told, markup=markup, soft_wrap=True, width=200)
    console.print(f"✓ scan: {ESCAPES}\n  next line")
    assert told.getvalue().splitlines() == ["✓ scan: ]0;title[2J[8mhidden2Jtxt.exe end", "  next line"]


def test_commands_print_by_one_console() -> None:
    made = {
        path.name: [node.func.id for node in ast.walk(ast.parse(path.read_text())) if _calls(node)]
        for path in COMMANDS.glob("*.py")
    }
    assert not [name for name, calls in made.items() if {"Console", "print"} & {*calls}]


def _calls(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


def test_errors_are_printed_without_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(**_: object) -> None:
        raise Problem(ESCAPES, status=500)

    monkeypatch.setattr("locum.commands.app.app", refuse)
    monkeypatch.setattr(sys, "argv", ["locum", "status"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err == "locum: ]0;title[2J[8mhidden2Jtxt.exe end\n"


def test_table_has_no_formula_and_no_control_character() -> None:
    formulas = ["=HYPERLINK(1)", "+1", "-1", "@x", "\t=1", "\r\n=1", f" {ESCAPES}"]
    rows = [{"scan": each, "=evil": -1.5} for each in formulas]
    header, *cells = csv.reader(io.StringIO(table(["scan", "=evil", "error"], rows).decode()))
    assert header == ["scan", "'=evil", "error"]
    assert [row[0] for row in cells[:-1]] == ["'=HYPERLINK(1)", "'+1", "'-1", "'@x", "'=1", "'=1"]
    assert all(row[1:] == ["-1.5", ""] for row in cells)
    assert cells[-1][0] == plain(ESCAPES)


@pytest.mark.parametrize(
    ("event", "data"),
    [
        ("state", {}),
        ("progress", {"stage": "adapting", "epochs": "x"} | {"against": ESCAPES}),
        ("epoch", {"epoch": "x"}),
        ("epoch", {"epoch": 1, "loss": "x"}),
        ("epoch", {"epoch": 1, "loss": float("nan"), "coefficients": None}),
        ("epoch", {"epoch": 1, "loss": 1.0, "coefficients": {"models": [ESCAPES], "values": [[0]]}}),
        ("epoch", {"epoch": 1, "loss": 1.0, "coefficients": {"models": [ESCAPES], "values": [[1]]}}),
        ("warning", {"message": ESCAPES}),
    ],
)
def test_events_of_another_service_are_shown_plainly_or_refused(event: str, data: dict[str, object]) -> None:
    told = io.StringIO()
    followed = Followed()
    with suppress(AnswerInvalid):
        followed.take(event, data)
        Terminal(file=told, width=200).print(followed)
    assert not {"\x1b", "\x9b", "‮"} & {*told.getvalue()}
