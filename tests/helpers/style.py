"""Find the words and openings that docs/style.md bans, in Markdown, docstrings, comments and texts.

python -m tests.helpers.style service docs/how-to      # every hit, and a count per folder
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
# A line, or the next one in Markdown, may show a banned word as an example.
ALLOWED_MARK = "style: example"
BANNED = re.compile(
    r"\b(whose|nobody|whoever|anew|meant|(?:is|are|was|were|be|been|being) told|told apart"
    r"|(?:is|are|has|have) none to"
    r"|(?:it|that|which|they|what|file|files|scan|scans) lies? (?:in|at|on|beside|below)"
    r"|owed|beware|hearsay|none the wiser|to be had|as (?:it |they )?may|where that leaves none)\b",
    re.IGNORECASE,
)
_DETERMINERS = "the|an?|all|any|each|every|its|their|these|those|which|what|whom|one|two|several|some|own"
OPENINGS = re.compile(
    # A sentence that begins with a genitive: `Of the sites ...`.
    rf"\bOf (?:{_DETERMINERS})\b"
    # A docstring of which the genitive has no noun: `FedAvg's; in training ...`.
    r"|^[rbf]*\"{3}(?:The |A |Its )?[\w`-]+(?:'s|s')"
    r"(?=[;.,:]|$| (?:of|in|with|where|until|but|and|from|by|at|on|for|that|which|as|when|if|is|are)\b)"
)
FOLDERS = (
    "model_store",
    "personalization",
    "training",
    "service",
    "locum",
    "benchmarks",
    "tests",
    "docs",
)
# This file's own list.
EXEMPT = ("tests/helpers/style.py",)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """(line number, line) of all prose in a file: every line of Markdown, comments and strings of Python."""
    content = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from enumerate(content.splitlines(), start=1)
        return
    # Since Python 3.12 an f-string is several tokens.
    kinds = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
    for token in tokenize.generate_tokens(io.StringIO(content).readline):
        # A string of one word is a value, not prose.
        if token.type in kinds and " " in token.string:
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line


def hits(path: Path) -> list[tuple[int, str, str]]:
    """(line number, banned word, line) of a file; lines beside the mark are examples."""
    lines = list(texts(path))
    examples = {number + 1 for number, line in lines if ALLOWED_MARK in line}
    return [
        (number, match.group(), line.strip())
        for number, line in lines
        if number not in examples and ALLOWED_MARK not in line
        for pattern in (BANNED, OPENINGS)
        for match in pattern.finditer(line)
    ]


def prose_files(*paths: str) -> list[Path]:
    """The files with prose below `paths`, by default everywhere; exempt ones are left out."""
    places = [ROOT / path for path in paths or (*FOLDERS, ".")]
    files = (
        file
        for place in places
        for file in ([place] if place.is_file() else place.glob("*") if place == ROOT else place.rglob("*"))
    )
    return [
        file
        for file in sorted(files)
        if file.is_file()
        and file.suffix in (".md", ".py", ".yaml", ".html", ".toml")
        and not str(file.relative_to(ROOT)).startswith(EXEMPT)
    ]


if __name__ == "__main__":
    counts: Counter[str] = Counter()
    for file in prose_files(*sys.argv[1:]):
        for number, word, line in hits(file):
            name = file.relative_to(ROOT)
            counts["/".join(name.parts[:2])] += 1
            print(f"{name}:{number}: {word}: {line[:120]}")
    for folder, count in counts.most_common():
        print(f"{count:5} {folder}")
