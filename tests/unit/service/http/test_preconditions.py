from __future__ import annotations

import pytest

from service.http.conditions import entity_tag, expected_sequence
from service.http.problems import Problem


@pytest.mark.parametrize(
    ("current", "if_match", "if_none_match"),
    [
        (0, '"0"', None),
        (0, None, "*"),
        (3, '"3"', None),
        (3, '"2", "3"', None),
        (3, ' W/"9" , "3"', None),
        (3, "*", None),
    ],
)
def test_matching_precondition_returns_the_current_sequence(
    current: int, if_match: str | None, if_none_match: str | None
) -> None:
    assert expected_sequence(current, if_match, if_none_match) == current


@pytest.mark.parametrize(
    ("current", "if_match", "if_none_match", "status", "tag"),
    [
        (3, None, None, 428, '"3"'),
        (0, None, None, 428, '"0"'),
        (3, '"2"', None, 412, '"3"'),
        (0, "*", None, 412, '"0"'),
        (1, None, "*", 412, '"1"'),
        (3, '"3"', "*", 412, '"3"'),
        (3, 'W/"3"', None, 412, '"3"'),
        (3, "3", None, 400, None),
        (3, '"3', None, 400, None),
        (3, "", None, 400, None),
        (3, None, '"3"', 400, None),
    ],
)
def test_failed_or_invalid_precondition_is_rejected_with_its_status(
    current: int, if_match: str | None, if_none_match: str | None, status: int, tag: str | None
) -> None:
    with pytest.raises(Problem) as refused:
        expected_sequence(current, if_match, if_none_match)
    assert refused.value.status == status
    assert refused.value.headers.get("ETag") == tag


def test_entity_tag_is_quoted() -> None:
    assert entity_tag(12) == '"12"'


@pytest.mark.parametrize(
    ("if_match", "if_none_match", "said"),
    [
        (
            '"1"',
            None,
            'The state in force is "3", which is not what the request was made for (If-Match: "1")',
        ),
        (None, "*", "(If-None-Match: *)"),
        ("3", None, "If-Match: expected the ETag that GET gave, quotes included, or *; found '3'."),
        (None, '"3"', "If-None-Match: expected *, for a first assignment; found"),
    ],
)
def test_rejected_precondition_names_found_and_expected_values(
    if_match: str | None, if_none_match: str | None, said: str
) -> None:
    with pytest.raises(Problem) as refused:
        expected_sequence(3, if_match, if_none_match)
    assert said in str(refused.value)
