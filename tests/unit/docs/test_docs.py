"""The documentation names what there is, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from service.settings import Settings
from training.bounds import FeatureBounds
from training.config import RunConfig
from training.methods.fedbicross.config import LITERAL_READING, PAPER_SIZES, FedBiCrossConfig
from training.methods.registry import method, methods

ROOT = Path(__file__).parents[3]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]
HOW_TO = sorted(ROOT.glob("docs/how-to/*.md"))
CONFIGURATION = (ROOT / "docs/reference/configuration.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_anchor_of_a_link_is_a_heading(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text(encoding="utf-8"))
    targets = [(page.parent / name if name else page, anchor) for name, anchor in links]
    assert [
        f"{target.name}#{anchor}"
        for target, anchor in targets
        if target.suffix == ".md" and anchor not in anchors(target)
    ] == []


@pytest.mark.parametrize("page", HOW_TO, ids=lambda page: page.stem)
def test_how_to_begins_with_its_command(page: Path) -> None:
    title, *blocks = page.read_text(encoding="utf-8").split("\n\n")
    assert title.startswith("# ")
    prose = [] if blocks[0].startswith("    ") else blocks[:1]
    assert sum(len(re.findall(r"[.!?](?=\s|$)", block)) for block in prose) <= 1
    assert blocks[len(prose)].startswith("    ")


def test_every_how_to_is_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8").partition("## All pages")[2]
    assert [page.stem for page in HOW_TO if f"](how-to/{page.name})" not in index] == []


def test_every_setting_of_the_service_is_documented() -> None:
    assert [n for n in Settings.model_fields if f"LOCUM_{n.upper()}`" not in CONFIGURATION] == []


@pytest.mark.parametrize("config", [FeatureBounds, RunConfig, *(method(name).config for name in methods())])
def test_every_field_of_a_run_is_documented(config: type[BaseModel]) -> None:
    assert [n for n in config.model_fields if f"`{n}`" not in CONFIGURATION] == []


@pytest.mark.parametrize("name", methods())
def test_every_method_is_in_the_guide_to_training(name: str) -> None:
    assert f"| `--method {name}` |" in (ROOT / "docs/how-to/train.md").read_text(encoding="utf-8")


def test_no_setting_is_documented_that_does_not_exist() -> None:
    named = set(re.findall(r"LOCUM_([A-Z_]+)`", CONFIGURATION))
    assert named <= {name.upper() for name in Settings.model_fields}


@pytest.mark.parametrize("room", ["model_store", "personalization", "training", "service"])
def test_every_folder_of_a_room_is_in_the_architecture(room: str) -> None:
    page = (ROOT / "docs/explanation/architecture.md").read_text(encoding="utf-8")
    _, _, tree = page.partition(f"\n    {room}/\n")
    named = re.findall(r"(\w+)/", tree.partition("\n\n")[0])
    assert {path.parent.name for path in ROOT.glob(f"{room}/*/__init__.py")} <= set(named)


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {
        target
        for page in PAGES
        for target in re.findall(r"^ +make ([a-z]+)|`make ([a-z]+)`", page.read_text(encoding="utf-8"), re.M)
        for target in target
        if target
    }
    assert named <= targets
    assert {"demo", "test", "check", "install"} <= named


def test_the_papers_fedbicross_is_documented_as_it_is_coded() -> None:
    table = CONFIGURATION.split("`method`, for `fedbicross`")[1].split("\n\n")[1]
    documented = {}
    for line in table.splitlines()[2:]:
        fields, _, _, paper = (cell.strip() for cell in line.strip("|").split("|"))
        values = [yaml.safe_load(value.strip(" `")) for value in paper.split(",") if value]
        # Fields share a line; those that the paper leaves open come last.
        documented |= dict(zip(re.findall(r"`(\w+)`", fields), values, strict=False))
    defaults = FedBiCrossConfig().model_dump()
    coded = {**PAPER_SIZES, **LITERAL_READING, "outer_steps": defaults["outer_steps"]}
    assert documented == {name: [*v] if isinstance(v, tuple) else v for name, v in coded.items()}
    assert FedBiCrossConfig(**{**PAPER_SIZES, **LITERAL_READING}).personal_rate == 0.001


def test_every_test_that_the_threat_model_names_exists() -> None:
    text = (ROOT / "docs/explanation/threat-model.md").read_text()
    named = set(re.findall(r"test_\w+\.py", text))
    assert len(named) > 5
    assert named <= {path.name for path in (ROOT / "tests").rglob("test_*.py")}


def test_glossary_of_the_page_is_in_the_docs_word_by_word() -> None:
    source = (ROOT / "web/src/app/glossary.tsx").read_text(encoding="utf-8")
    words = re.findall(r'\{ word: "(.+?)", meaning: "(.+?)" \}', source)
    assert len(words) == source.count("word: ") - source.count("word: string") > 20
    assert words == sorted(words, key=lambda pair: pair[0].lower())
    lines = (ROOT / "docs/reference/glossary.md").read_text(encoding="utf-8").splitlines()
    assert [word for word, meaning in words if f"- **{word}**: {meaning}" not in lines] == []


def test_changelog_has_at_most_twelve_points_per_release() -> None:
    releases = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1:]
    assert releases
    assert [each.splitlines()[0] for each in releases if each.count("\n- ") > 12] == []
