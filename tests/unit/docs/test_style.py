"""The words that docs/style.md bans stay out of the tree."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.style import ROOT, hits, prose_files


def test_banned_word_in_new_text_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.py"
    # style: example
    text = '"""Fine."""\n\n\ndef f():\n    """Answer\n    whose scan it is."""  # nobody\n'
    page.write_text(text)
    assert [(number, word) for number, word, _ in hits(page)] == [(6, "whose"), (6, "nobody")]


def test_marked_example_is_no_hit(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("| caller | whoever | <!-- style: example -->\n")
    assert hits(page) == []


def test_no_text_has_a_banned_word() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {word}: {line}"
        for path in prose_files()
        for number, word, line in hits(path)
    ]
    assert not found, "\n".join(found)
