"""The table of formats in docs/reference/formats.md, of the registry.

python -m tests.helpers.model_store.formats_page      writes it
"""

from __future__ import annotations

from pathlib import Path

from model_store.scans.formats import FORMATS, Format

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "formats.md"
_BEGIN, _END = "<!-- formats: begin -->\n", "<!-- formats: end -->"
_HEAD = (
    "format",
    "what is read",
    "sent, and in a cohort, as",
    "in a federation's folder as",
    "as a mask",
    "compared with",
)


def table() -> str:
    """A row for each format."""
    rows = [_HEAD, ["---"] * len(_HEAD), *map(_row, FORMATS)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def page() -> str:
    """The page with the table as the registry has it."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    return f"{before}{_BEGIN}{table()}{_END}{rest.partition(_END)[2]}"


def _row(known: Format) -> list[str]:
    parts = "several parts or a zip"
    sent = "one file" if known.series is None else parts if known.beside else f"one file, {parts}"
    folder = "one file"
    if known.beside:
        folder = "two files of one name, a folder or a zip of them"
    elif known.series is not None:
        folder = "one file, a folder or a zip"
    return [
        ", ".join(known.labels),
        known.about.reads,
        sent,
        folder,
        known.about.mask,
        known.about.oracle,
    ]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
