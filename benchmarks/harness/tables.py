"""Figures in Markdown: means with their spread, differences with their interval, and pages."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Interval:
    """A mean difference, its bootstrap percentile interval, and the number of pairs."""

    mean: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def verdict(found: Interval, each: Sequence[float]) -> str:
    """The difference in words: the interval covers test patients only, so every training must agree."""
    if found.low > 0 and min(each) > 0:
        return "helps"
    if found.high < 0 and max(each) < 0:
        return "harms"
    return "no difference shown"


def mean_and_spread(values: Sequence[float], digits: int = 3) -> str:
    """`0.712 ± 0.021`: mean and sample standard deviation; the mean alone for one value, a dash for none."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "–"
    mean = f"{np.mean(finite):.{digits}f}"
    return mean if len(finite) == 1 else f"{mean} ± {np.std(finite, ddof=1):.{digits}f}"


def table(header: Sequence[str], body: Sequence[Sequence[object]]) -> str:
    """A Markdown table, its first column to the left and the others to the right, padded to be read raw."""
    lines = [[str(cell).replace("|", "\\|") for cell in line] for line in (header, *body)]
    for line in lines:
        if len(line) != len(header):
            raise ValueError(f"expected {len(header)} columns, found {len(line)}: {line}")
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(header))]

    def padded(line: Sequence[str]) -> str:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        return "| " + " | ".join(cells) + " |"

    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([padded(lines[0]), padded(rule), *map(padded, lines[1:])])


def crossed(corner: str, cells: Mapping[tuple[object, object], object]) -> str:
    """A table with a line for each first key and a column for each second, empty where they have no cell."""
    lines, columns = (list(dict.fromkeys(key[place] for key in cells)) for place in (0, 1))
    body = [[line, *(cells.get((line, column), "") for column in columns)] for line in lines]
    return table([corner, *map(str, columns)], body)


def write_page(
    path: Path, title: str, command: str, rows: Path, sections: Sequence[str], made: Sequence[str] = ()
) -> None:
    """Write a page of results, atomically: title, command, link to the rows, what they were `made` with,
    sections."""
    text = "\n\n".join(
        [
            f"# {title}",
            f"```bash\n{command}\n```",
            f"One row per finished cell: [{rows.name}]({rows.name}).",
            *([f"Measured at {'; '.join(made)}."] if made else []),
            *sections,
        ]
    )
    write_text(path, text + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file atomically; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)
