"""The client's classes against the service's own description, and what of an answer is not read."""

from __future__ import annotations

import types
from dataclasses import fields, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
import yaml

from locum import answers
from locum.errors import AnswerInvalid
from locum.reading import RAW, read

NAMES = {
    answers.Artefact: "ModelReceipt",
    answers.Receipt: "Receipt",
    answers.Label: "LabelReport",
    answers.Report: "SegmentationReport",
    answers.Classification: "ClassificationReport",
    answers.Cohort: "CohortView",
    answers.CohortScan: "ScanView",
    answers.CohortMask: "MaskView",
    answers.Candidate: "CandidateView",
    answers.Status: "Status",
    answers.Section: "Section",
    answers.JobSummary: "JobSummary",
    answers.Job: "JobView",
    answers.Hospital: "HospitalView",
    answers.Assignment: "Entry",
    answers.Serving: "ServingView",
    answers.ObservedLabel: "ObservedLabelView",
    answers.Observation: "ObservationView",
    answers.Alarm: "AlarmView",
    answers.Watch: "WatchView",
    answers.Tombstone: "Tombstone",
    answers.Version: "VersionSummary",
    answers.Model: "ModelSummary",
    answers.Session: "SessionView",
    answers.Part: "PartView",
    answers.Readiness: "Ready",
}
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", datetime: "string"}


@pytest.fixture(scope="module")
def schemas() -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    document = yaml.load((Path(__file__).parents[3] / "openapi.yaml").read_text(), Loader=loader)
    found: dict[str, Any] = document["components"]["schemas"]
    return found


def differs(kind: Any, schema: dict[str, Any]) -> str | None:
    """Why a value of this schema might not be read as `kind`."""
    if kind is Any:
        return None
    alternatives = schema.get("anyOf", [schema])
    nullable = any(each.get("type") == "null" for each in alternatives)
    (schema,) = (each for each in alternatives if each.get("type") != "null")
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(each for each in get_args(kind) if each is not type(None))
    elif nullable:
        return "may be null"
    if is_dataclass(kind):
        if kind is answers.Gate:
            return None  # any object; its form is the gate's, and a test of the command reads one
        reference = schema.get("$ref", "").rpartition("/")[2]
        return None if reference == NAMES[kind] else f"{reference} is no {kind.__name__}"
    if get_origin(kind) is tuple:
        return "no array" if schema.get("type") != "array" else differs(get_args(kind)[0], schema["items"])
    if get_origin(kind) is dict:
        more = schema.get("additionalProperties", True)
        if schema.get("type") != "object":
            return "no object"
        return None if more is True else differs(get_args(kind)[1], more)
    found = schema.get("type")
    return (
        None
        if found == TYPES[kind] or (kind is float and found == "integer")
        else f"{found} is no {kind.__name__}"
    )


@pytest.mark.parametrize("kind", NAMES, ids=lambda kind: kind.__name__)
def test_class_is_what_the_service_describes(kind: type[Any], schemas: dict[str, Any]) -> None:
    schema = schemas[NAMES[kind]]
    hints = get_type_hints(kind)
    for each in fields(kind):
        if each.name == RAW:
            continue
        assert each.name in schema["properties"], each.name
        problem = differs(hints[each.name], schema["properties"][each.name])
        assert problem is None, f"{each.name}: {problem}"
        optional = each.name not in schema["required"]
        defaulted = "default" in schema["properties"][each.name]
        # Pydantic writes what has a default, too.
        assert not optional or defaulted or not _required(each), each.name


def _required(field: Any) -> bool:
    from dataclasses import MISSING

    return field.default is MISSING and field.default_factory is MISSING


def test_newer_members_are_ignored_and_kept_in_raw() -> None:
    value = {"passed": True, "checks": [], "newer": 1}
    gate = read(answers.Gate, value)
    assert gate.raw["newer"] == 1
    assert gate.checks == ()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"name": "a"}, "Hospital: expected a member 'id', found name"),
        ({"id": "a", "name": 3, "site": None}, "Hospital.name: expected str, found 3"),
        ([], r"Hospital: expected dict, found \[\]"),
    ],
)
def test_answer_of_another_form_is_named(value: object, words: str) -> None:
    with pytest.raises(AnswerInvalid, match=words):
        read(answers.Hospital, value)


def test_integer_is_a_number_and_a_bool_is_none() -> None:
    label = {"classes": [1], "voxels": 3, "fraction": 0, "volume_ml": None, "confidence": 1, "review": None}
    assert read(answers.Label, label).fraction == 0.0
    with pytest.raises(AnswerInvalid, match="voxels"):
        read(answers.Label, label | {"voxels": True})
