"""Expressions for patients: RE2's, which cannot backtrack, with Python's classes of characters."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from model_store.patient_pattern import patient_in
from model_store.task import Task
from training.config import parse
from training.errors import ConfigurationError
from training.network.policy import Policy


def _task(pattern: str) -> Task:
    return Task(name="t", labels={"x": (1,)}, size=(32, 32), patient=pattern)


@pytest.mark.parametrize(
    "pattern", [r"^(?P<patient>(\w+-?)+)_[0-9]$", r"^(?P<patient>(a|a)*)$", r"(?P<patient>(.*)*,)\d"]
)
def test_expression_with_nested_quantifiers_matches_a_long_name_in_linear_time(pattern: str) -> None:
    # `re` needs centuries for the first of these.
    assert patient_in(pattern, "hospitalpatientscanaxialbrain" * 8 + "!") is None


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (r"^(?P<patient>1(?=[3-7]\d\d$))", r"\(\?=.*Lookarounds .* write what surrounds the patient outside"),
        (r"(?<!x)(?P<patient>\d+)", "Lookarounds"),
        (r"(?P<patient>\d+)_(?P=patient)", "backreferences"),
        (r"(?P<patient>(a)\1)", "backreferences"),
        (r"(?P<patient>[0-9]+", "missing"),
        (r"(?P<patient>x{1,2000})", "repetition size"),
        (r"(?P<patient>[\W_]+)", r"\\PL"),
        (r"(?P<name>\d+)", "needs a group named 'patient'"),
        (r"(?P<patient_2>\d+)", "needs a group named 'patient'"),
    ],
)
def test_expression_that_re2_does_not_know_is_refused_with_what_to_write(pattern: str, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        _task(pattern)
    with pytest.raises(ConfigurationError, match="patient"):
        parse(Policy, {"allows": ["weights"], "consents": True, "patient": pattern}, "policy.yaml")


def test_refused_expression_writes_nothing_to_the_process_s_output(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValidationError):
        _task(r"(?P<patient>(?!x)\d+)")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "patient"), [("A-17_mri", "17"), ("B-ct-9", "9"), ("loose", "loose"), ("A-_mri", "A-_mri")]
)
def test_first_group_for_the_patient_that_is_not_empty_is_taken(name: str, patient: str) -> None:
    task = _task(r"^(?:A-(?P<patient>\d+)_|B-ct-(?P<patient_2>\d+)$|(?P<patient_3>.+))")
    assert task.patient_of(name) == patient


@pytest.mark.parametrize(
    ("pattern", "name", "patient"),
    [
        (r"^(?P<patient>\w+)-\d+\Z", "Müller-1", "Müller"),
        (r"^(?P<patient>\w+)-\d+$", "山田太郎-2", "山田太郎"),
        (r"^(?P<patient>[\w.]+)-", "Иван.П-2", "Иван.П"),
        (r"^\W*(?P<patient>[^]\s]+)", "#x1 b", "x1"),
        (r"(?i)^(?P<patient>p\d+)", "P12_a", "P12"),
        (r"^(?P<patient>\\w[a\[]+[\]\w-])", r"\w[[é-", r"\w[[é"),
        (r"^[]\d]+(?P<patient>\w+)", "]1é", "é"),
    ],
)
def test_expression_gives_what_python_s_re_gives(pattern: str, name: str, patient: str) -> None:
    assert patient_in(pattern, name) == patient == re.search(pattern, name)["patient"]  # type: ignore[index]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(
        [
            r"^(?P<patient>\w+)[-_.]\d+",
            r"^(?P<patient>[^_]+)_",
            r"(?P<patient>p\d+)(?:_|$)",
            r"^(?P<patient>TCGA_[A-Z0-9]+_[A-Z0-9]+)_",
            r"^(?P<patient>.+?)(?:_\d+)?$",
        ]
    ),
    st.text(alphabet="ab1p2_-.TCGAé山 ", min_size=1, max_size=24),
)
def test_usual_expressions_agree_with_python_s_re(pattern: str, name: str) -> None:
    found = re.search(pattern, name)
    assert patient_in(pattern, name) == ((found["patient"] or None) if found else None)
