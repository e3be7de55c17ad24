"""Find the words that docs/style.md bans, in Markdown, docstrings, comments and texts of Python files.

python -m tests.helpers.style service docs/how-to      # every hit, and a count per folder
"""

from __future__ import annotations

import io
import re
import subprocess
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
    r"|(?:is|are|has|have) none to|(?:it|that|which|they|what|file|files|scan|scans) lies? (?:in|at|on)"
    r"|owed|beware|hearsay)\b",
    re.IGNORECASE,
)
# Made by `python -m benchmarks report`, and this file's own list.
EXEMPT = ("docs/results/", "tests/helpers/style.py", "shared/")


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """(line number, line) of all prose in a file: every line of Markdown, comments and strings of Python."""
    content = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from enumerate(content.splitlines(), start=1)
        return
    # Since Python 3.12 an f-string is several tokens.
    kinds = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
    for token in tokenize.generate_tokens(io.StringIO(content).readline):
        if token.type in kinds:
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
        for match in BANNED.finditer(line)
    ]


def tracked(*paths: str) -> list[Path]:
    """The repository's Markdown, Python, YAML, HTML and TOML files below `paths`, exempt ones left out."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return [
        ROOT / name
        for name in listed
        if name.endswith((".md", ".py", ".yaml", ".html", ".toml"))
        and not name.startswith(EXEMPT)
        and (ROOT / name).is_file()
    ]


if __name__ == "__main__":
    counts: Counter[str] = Counter()
    for file in tracked(*(sys.argv[1:] or ["."])):
        for number, word, line in hits(file):
            name = file.relative_to(ROOT)
            counts["/".join(name.parts[:2])] += 1
            print(f"{name}:{number}: {word}: {line[:120]}")
    for folder, count in counts.most_common():
        print(f"{count:5} {folder}")
