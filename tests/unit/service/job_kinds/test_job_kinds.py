"""Every kind of job is declared once, and no other module of the service decides by its name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from pkgutil import resolve_name

import pytest
import yaml
from pydantic import BaseModel

import service
from service.job_kinds import KINDS, names_where
from service.openapi import description

SERVICE = Path(next(iter(service.__path__)))
MODULES = {name.replace("-", "_") for name in KINDS}


def test_every_module_declares_the_kind_of_its_name() -> None:
    found = {path.stem for path in (SERVICE / "job_kinds").glob("*.py")} - {"__init__", "kind"}
    assert found == MODULES
    for name, kind in KINDS.items():
        assert resolve_name(f"service.job_kinds.{name.replace('-', '_')}:KIND") is kind
        assert kind.name == name


def test_description_has_the_kinds_in_order() -> None:
    schemas = yaml.safe_load(description())["components"]["schemas"]
    for view in ("JobSummary", "JobView"):
        assert schemas[view]["properties"]["kind"]["enum"] == [*KINDS]


@pytest.mark.parametrize("name", KINDS)
def test_what_a_kind_names_is_there(name: str) -> None:
    kind = KINDS[name]
    assert [*signature(resolve_name(kind.run)).parameters] == ["attempt"]
    assert len(signature(resolve_name(kind.card)).parameters) == 1
    assert kind.options is None or issubclass(resolve_name(kind.options), BaseModel)
    assert {"waiting", "preparing"} <= {*kind.stages}
    assert all(kind.stages.values())


def test_names_where_asks_the_declarations() -> None:
    assert names_where(lambda kind: kind.answers) == ("scan", "segment", "pacs-segment", "pacs-follow-up")
    assert names_where(lambda kind: kind.of_its_maker) == ("scan", "segment")
    assert names_where(lambda kind: kind.adds_scans) == ("pacs-cohort",)
    assert names_where(lambda kind: kind.of_candidate) == ("mask-check", "mask-verdict")


def stages_of(tree: ast.AST) -> Iterator[str]:
    """The stages that a worker's module names: of `set_stage`, and of an `EpochReports`."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        place = {"set_stage": 0, "EpochReports": 1}.get(function)
        if place is not None and isinstance(stage := call.args[place], ast.Constant):
            yield stage.value


def test_every_stage_of_the_worker_has_words_and_every_word_a_stage() -> None:
    modules = [ast.parse(path.read_text(encoding="utf-8")) for path in (SERVICE / "worker").glob("*.py")]
    reported = {stage for module in modules for stage in stages_of(module)}
    declared = {stage for kind in KINDS.values() for stage in kind.stages}
    # The lease says that a job waits.
    assert reported == declared - {"waiting"}


_WAYS_TO_ASK = {"in_", "not_in", "is_", "is_not", "get", "__eq__"}


def compares_kind(tree: ast.AST) -> Iterator[int]:
    """Lines that compare a job's kind with a name or a declaration, or look up what belongs to a name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(side, ast.Attribute) and side.attr == "KIND" for side in sides):
                yield node.lineno
                continue
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            sides = [node.func.value, *node.args] if node.func.attr in _WAYS_TO_ASK else []
        elif isinstance(node, ast.Subscript):
            sides = [node.value, node.slice]
        elif isinstance(node, ast.Match):
            sides = [node.subject, *(case.pattern for case in node.cases)]  # type: ignore[list-item]
        else:
            continue
        if any(_is_kind(side) for side in sides) and any(_names(side) for side in sides):
            yield node.lineno


def _is_kind(side: ast.AST) -> bool:
    """Whether it is `job.kind`, or a `kind` of its own. That of a manifest or a task is not a job's."""
    if isinstance(side, ast.Attribute):
        return side.attr == "kind" and not ast.unparse(side.value).endswith(("manifest", "task"))
    return isinstance(side, ast.Name) and side.id in ("kind", "job_kind")


def _names(side: ast.AST) -> bool:
    """Whether it has a job kind's name, or a declaration."""
    return any(
        (isinstance(part, ast.Constant) and part.value in KINDS)
        or (isinstance(part, ast.Attribute) and part.attr == "KIND")
        for part in ast.walk(side)
    )


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("job.kind == 'scan'", [1]),
        ("'mask-check' != found.kind", [1]),
        ("job.kind in ('scan', 'segment')", [1]),
        ("kind in {'adaptation'}", [1]),
        ("job.kind == quantisation.KIND.name", [1]),
        ("KINDS[job.kind] is scan.KIND", [1]),
        ("select(Job).where(Job.kind != 'pacs-cohort')", [1]),
        ("select(Job).where(Job.kind.in_(('mask-check', 'mask-verdict')))", [1]),
        ("{'scan': run_scan}[job.kind]", [1]),
        ("{'scan': run_scan}.get(job.kind)", [1]),
        ("match job.kind:\n    case 'scan':\n        pass", [1]),
        ("KINDS[job.kind].answers", []),
        ("Job.kind.in_(names_where(lambda kind: kind.of_candidate))", []),
        ("parent.manifest.task.kind == 'segmentation'", []),
        ("options.personalization == 'scan'", []),
    ],
)
def test_comparison_with_a_name_is_found(line: str, found: list[int]) -> None:
    assert list(compares_kind(ast.parse(line))) == found


def test_no_module_outside_the_declarations_compares_kinds() -> None:
    found = {}
    for path in SERVICE.rglob("*.py"):
        lines = [*compares_kind(ast.parse(path.read_text(encoding="utf-8")))]
        if lines and path.parent != SERVICE / "job_kinds":
            found[str(path.relative_to(SERVICE))] = lines
    assert found == {}
