"""Every kind of artefact is declared once, and no other module of the service decides by a kind."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from inspect import isabstract, signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

import service
from model_store import manifest
from service.kinds import ADAPTABLE, ADAPTING_ITSELF, BY_MASKS, DESCRIPTION, KINDS, SCAN_BY_JOB
from service.worker.cohort_job import CohortWork

SERVICE = Path(next(iter(service.__path__)))
MANIFESTS = {"AnyManifest", "BaseManifest", "NetworkManifest"} | {
    found.__name__ for found in manifest.KINDS.values()
}


@pytest.mark.parametrize("name", manifest.KINDS)
def test_every_manifest_kind_has_a_declaration(name: str) -> None:
    declared = KINDS[name]
    assert declared.manifest is manifest.KINDS[name]
    assert declared.name == name
    assert f"`{name}`" in DESCRIPTION
    assert declared.summary
    (SERVICE / "kinds" / f"{name.replace('-', '_')}.py").read_bytes()


def test_only_manifest_kinds_are_declared() -> None:
    assert list(KINDS) == list(manifest.KINDS)
    modules = {path.stem.replace("_", "-") for path in (SERVICE / "kinds").glob("*.py")}
    assert modules - {*manifest.KINDS} == {"--init--", "kind", "lens", "masks"}


def test_description_names_every_kind_and_groups_equal_ones() -> None:
    assert DESCRIPTION.startswith(
        "`model` is one network; `routing-space` and `cross-attention` a global one with one per site; "
        "`clusters` one per cluster of sites; `ssf-pool` one that adapts itself to every scan; "
        "`personal-models` one per site, with a global one where the method has one"
    )
    assert DESCRIPTION.endswith(".")
    assert (ADAPTING_ITSELF, SCAN_BY_JOB) == ("an ssf-pool", "a model or a routing-space")


@pytest.mark.parametrize("name", ADAPTABLE)
def test_worker_of_each_kind_is_found_by_its_name(name: str) -> None:
    adaptation = ADAPTABLE[name]
    work = resolve_name(adaptation.work)
    assert issubclass(work, CohortWork)
    assert not isabstract(work)
    if adaptation.scan is not None:
        assert [*signature(resolve_name(adaptation.scan.run)).parameters] == ["attempt", "store", "parent"]


def test_worker_of_an_adaptation_by_masks_is_found_by_its_name() -> None:
    work = resolve_name(BY_MASKS.work)
    assert issubclass(work, CohortWork)
    assert not isabstract(work)
    by_masks = {name for name, kind in KINDS.items() if kind.masks is BY_MASKS}
    assert by_masks == {"model", "routing-space", "personal-models"}


def asks_for_kind(tree: ast.AST) -> Iterator[int]:
    """Lines that ask for a manifest's class, or compare a manifest's kind with a name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            names = {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
            if names & MANIFESTS:
                yield node.lineno
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            literals = {side.value for side in sides if isinstance(side, ast.Constant)}
            if any(isinstance(side, ast.Attribute) and side.attr == "kind" for side in sides) and literals & {
                *manifest.KINDS
            }:
                yield node.lineno


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("isinstance(m, ModelManifest)", [1]),
        ("isinstance(a.manifest, RoutingSpaceManifest | ClustersManifest)", [1]),
        ("isinstance(m, (SsfPoolManifest, int))", [1]),
        ("a.manifest.kind == 'clusters'", [1]),
        ("'ssf-pool' != kind.kind", [1]),
        ("isinstance(m, Mapping) and job.kind == 'scan'", []),
    ],
)
def test_asks_for_kind_finds_kind_comparisons(line: str, found: list[int]) -> None:
    assert list(asks_for_kind(ast.parse(line))) == found


def test_no_module_outside_the_declarations_compares_kinds() -> None:
    found: dict[str, Any] = {}
    for path in SERVICE.rglob("*.py"):
        if path.parent == SERVICE / "kinds":
            continue
        lines = list(asks_for_kind(ast.parse(path.read_text(encoding="utf-8"))))
        if lines:
            found[str(path.relative_to(SERVICE))] = lines
    assert found == {}


def test_page_takes_what_can_be_adapted_from_the_api_and_has_no_list_of_kinds() -> None:
    """What it does specially for a kind stays: joining by masks, the drift of a pool."""
    sources = (SERVICE.parent / "web/src").rglob("*.ts*")
    text = "".join(path.read_text(encoding="utf-8") for path in sources if path.name != "schema.d.ts")
    named = {name for name in manifest.KINDS if name != "model" and f'"{name}"' in text}
    assert named <= {"cross-attention", "ssf-pool"}
    assert "model.adaptable" in text
