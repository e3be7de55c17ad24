"""Print what a service says: its words cannot move the cursor, hide lines or become a formula.

Every command prints by `Terminal`, and writes tables by `table`.
"""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

# Unicode's categories: codes for terminals, directions of text, halves of characters, ends of lines.
_CONTROLS = ("Cc", "Cf", "Cs", "Zl", "Zp")
_KEPT = "\n\t"
# Parameters of a request that are flags of the commands.
_PARAMETER = re.compile(r"(?<![\w&?])(guard|personalization|site|hospital)=([\w.-]+)")
_ANSWERS = re.compile(r"POST /hospitals/(\S+)/watch/MODEL/answers")
# How a cell begins that a spreadsheet computes.
_FORMULA = ("=", "+", "-", "@")


def plain(text: str) -> str:
    """The text without control characters, but for ends of lines and tabs."""
    return "".join(each for each in text if each in _KEPT or unicodedata.category(each) not in _CONTROLS)


def in_flags(text: str) -> str:
    """A sentence of the service, with the command's flags in place of the request's parameters."""
    text = text.replace("override=true", "--override").replace("option unlike=", "--option unlike=")
    text = text.replace("the option `series`", "--series")
    text = _ANSWERS.sub(r"`locum watch answer \1 MODEL`", text)
    return _PARAMETER.sub(r"--\1 \2", text)


class Terminal(Console):
    """rich's console, for plain text."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Make text of a string, as rich does."""
        return super().render_str(plain(text), **options)


def table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> bytes:
    """A CSV file. A text that a spreadsheet would compute gets an apostrophe before it."""
    content = io.StringIO(newline="")
    writer = csv.writer(content, lineterminator="\n")
    writer.writerow(map(_cell, columns))
    writer.writerows([_cell(row.get(column, "")) for column in columns] for row in rows)
    return content.getvalue().encode()


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines of aligned columns. Lines are as long as their words: a pipe has no width."""
    clean = [[plain(" ".join(cell.split())) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*clean, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in clean]


def _cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = plain(" ".join(value.split()))
    return f"'{text}" if text.startswith(_FORMULA) else text
