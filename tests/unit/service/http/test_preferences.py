"""`Prefer: wait=N` and `Prefer: respond-async`."""

from __future__ import annotations

import pytest

from service.http.conditions import preferred_wait, prefers_async


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ([], None),
        (["wait=7"], 7),
        (["respond-async, wait=7"], 7),
        (["respond-async", "Wait = 7 ; strict"], 7),
        (['wait="7"'], 7),
        (["wait=7, wait=9"], 7),
        (["wait=0"], 0),
        (["wait=999999"], 60),
        (["wait=soon"], None),
        (["wait=-1"], None),
        (["wait=1.5"], None),
        (["await=7"], None),
        (["wait=99999999999999999999"], None),
    ],
)
def test_preferred_wait_is_the_first_valid_wait_up_to_the_limit(
    headers: list[str], seconds: int | None
) -> None:
    assert preferred_wait(headers, 60) == seconds


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], False),
        (["wait=7"], False),
        (["wait=7, Respond-Async"], True),
        (["wait=7", "respond-async; strict"], True),
        (["respond-asynchronously"], False),
    ],
)
def test_respond_async_is_found_among_other_preferences(headers: list[str], expected: bool) -> None:
    assert prefers_async(headers) is expected
