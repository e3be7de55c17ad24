"""The words that docs/style.md bans stay out of the tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.style import ROOT, hits, prose_files


def test_banned_word_in_new_text_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.py"
    # style: example
    text = '"""Fine."""\n\n\ndef f():\n    """Answer\n    whose scan it is."""  # nobody\n'
    page.write_text(text)
    assert [(number, word) for number, word, _ in hits(page)] == [(6, "whose"), (6, "nobody")]


@pytest.mark.parametrize(
    ("text", "opening"),
    [
        ('"""FedAvg\'s; in training, the mean."""', '"""FedAvg\'s'),
        ('"""The sites\', of every round."""', '"""The sites\''),
        ('"""FedAvg\'s step, with momentum."""', None),
        # style: example
        ('"""A round. Of the sites that are left, the mean."""', "Of the"),
        ('"""The mean of the sites that are left."""', None),
        ('"""Wait as long as the limit allows."""', None),
        # style: example
        ('"""As many jobs wait as may."""', "as may"),
    ],
)
def test_opening_genitive_without_a_noun_is_found(tmp_path: Path, text: str, opening: str | None) -> None:
    page = tmp_path / "page.py"
    page.write_text(f"{text}\n")
    assert [word for _, word, _ in hits(page)] == ([opening] if opening else [])


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
