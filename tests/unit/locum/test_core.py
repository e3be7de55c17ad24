"""Retries, listings and event streams, without a network: operations are generators."""

from __future__ import annotations

import asyncio
import json
import random
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from locum import AsyncClient, Client, core, operations
from locum.core import Body, EventStream, Operation, Pause, Request, Retries, with_retries
from locum.errors import AnswerInvalid, JobFailed, NotAllowed, Problem, ScanInvalid, Unreachable
from locum.reading import read

# Nothing listens there.
NOWHERE = "http://127.0.0.1:1"
COHORT = {
    **{"id": "c", "hospital": "h", "note": None, "scans": 0, "bytes": 0},
    **{"created_at": "2026-01-01T00:00:00Z", "expires_at": "2026-01-02T00:00:00Z", "deleted_at": None},
}
JOB_GONE = {
    "type": "urn:locum:problem:job-unknown",
    "title": "No such job",
    "status": 404,
    "detail": "No job.",
}


def answer(status: int, body: Any = None, **headers: str) -> httpx.Response:
    request = httpx.Request("GET", "http://service/path")
    return httpx.Response(status, json={} if body is None else body, headers=headers, request=request)


def problem(slug: str, status: int = 503, **headers: str) -> httpx.Response:
    body = {
        "type": f"urn:locum:problem:{slug}",
        "title": slug,
        "status": status,
        "detail": f"the {slug} sentence",
    }
    return answer(status, body, **headers)


def broken(kind: type[httpx.TransportError] = httpx.ReadError) -> httpx.TransportError:
    return kind("cut", request=httpx.Request("GET", "http://service/path"))


def played(
    operation: Operation[Any], *answers: httpx.Response | Exception, retries: int = 3
) -> tuple[Any, Any, Any]:
    """Run an operation on prepared answers: its result or error, the requests, the pauses."""
    steps, rest = with_retries(operation, Retries(retries)), list(answers)
    requests: list[Request] = []
    pauses: list[float] = []
    given: Any = None
    try:
        step = next(steps)
        while True:
            if isinstance(step, Pause):
                pauses.append(step.seconds)
                step = steps.send(None)
                continue
            requests.append(step)
            given = rest.pop(0)
            step = steps.throw(given) if isinstance(given, Exception) else steps.send(given)
    except StopIteration as end:
        result: Any = end.value
    except (Problem, Unreachable) as error:
        result = error
    assert not rest, "not every answer was used"
    return result, requests, pauses


def test_transient_rejection_is_retried_after_the_time_that_it_names() -> None:
    result, requests, pauses = played(
        operations.create_cohort("h"), problem("busy", **{"Retry-After": "7"}), answer(201, COHORT)
    )
    assert result.id == "c"
    assert len(requests) == 2
    assert pauses == [7.0]


@pytest.mark.parametrize("slug", ["database-damaged", "run-too-long", "graph-refused", "artefact-damaged"])
def test_rejection_that_an_operator_must_mend_is_final(slug: str) -> None:
    result, requests, _ = played(operations.models(), problem(slug))
    assert isinstance(result, Problem)
    assert (str(result), result.slug, len(requests)) == (f"the {slug} sentence", slug, 1)


def test_lost_answer_is_asked_for_again_only_where_that_changes_nothing() -> None:
    result, requests, pauses = played(operations.cohort("h", "c"), broken(), broken(), answer(200, COHORT))
    assert (result.id, len(requests)) == ("c", 3)
    # Doubled, each with its jitter of a half.
    assert 0.25 <= pauses[0] <= 0.5 <= pauses[1] <= 1.0
    # A second cohort would be made, and a second decision rejected as outdated.
    for operation, before in (
        (operations.create_cohort("h"), []),
        (operations.assign("h", "m", 1, "why"), [answer(200, ETag='"4"')]),
        (operations.roll_back("h", "m", "why"), [answer(200, ETag='"4"')]),
    ):
        result, requests, _ = played(operation, *before, broken())
        assert isinstance(result, Unreachable)
        assert len(requests) == 1 + len(before)


def test_connection_that_was_refused_has_sent_nothing_and_is_tried_again() -> None:
    result, requests, _ = played(
        operations.create_cohort("h"), broken(httpx.ConnectError), answer(201, COHORT), retries=1
    )
    assert (result.id, len(requests)) == ("c", 2)


def test_retried_adaptation_has_one_idempotency_key() -> None:
    _, requests, _ = played(operations.adapt("h", "m", "c"), broken(), answer(404, JOB_GONE))
    keys = {request.headers["Idempotency-Key"] for request in requests}
    assert (len(requests), len(keys)) == (2, 1)
    _, others, _ = played(operations.adapt("h", "m", "c"), answer(404, JOB_GONE))
    assert others[0].headers["Idempotency-Key"] not in keys


def test_pauses_stop_growing_at_half_a_minute_but_for_a_service_that_names_a_longer_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(random, "uniform", lambda _least, most: most)
    _, _, pauses = played(operations.models(), *(broken() for _ in range(9)), retries=8)
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30]
    busy = problem("busy", **{"Retry-After": "600"})
    _, _, pauses = played(operations.models(), busy, answer(200, {"models": [], "next": None}))
    assert pauses == [600.0]


def test_retries_end() -> None:
    result, requests, pauses = played(operations.models(), *(broken() for _ in range(4)), retries=3)
    assert isinstance(result, Unreachable)
    assert (len(requests), len(pauses)) == (4, 3)


def test_refused_connection_ends_soon_until_something_has_answered() -> None:
    refused = [broken(httpx.ConnectError) for _ in range(7)]
    result, requests, _ = played(operations.models(), *refused[:3], retries=6)
    assert (type(result), len(requests)) == (Unreachable, 3)
    # A firewall that drops everything costs the whole timeout to notice.
    result, requests, _ = played(operations.models(), broken(httpx.ConnectTimeout), retries=6)
    assert (type(result), len(requests)) == (Unreachable, 1)
    # A service that answered, if only that it is busy, is one that starts again.
    result, requests, _ = played(operations.models(), problem("busy"), *refused[:6], retries=6)
    assert (type(result), len(requests)) == (Unreachable, 7)
    stream = EventStream("j", Retries(6))
    waited = [stream.broken(each) for each in refused[:2]]
    assert len(waited) == 2
    with pytest.raises(Unreachable):
        stream.broken(refused[2])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_service_that_is_not_there_is_one_sentence_without_a_second_traceback(asynchronous: bool) -> None:
    async def asked() -> None:
        async with AsyncClient(NOWHERE, "key", retries=0) as client:
            await client.models()

    def followed() -> None:
        with Client(NOWHERE, "key", retries=0) as client:
            list(client.events("j"))

    def listed() -> None:
        with Client(NOWHERE, "key", retries=0) as client:
            client.models()

    for call in (lambda: asyncio.run(asked()),) if asynchronous else (listed, followed):
        with pytest.raises(Unreachable) as found:
            call()
        printed = "".join(traceback.format_exception(found.value))
        assert printed.count("Traceback") == 1
        assert printed.splitlines()[-1].startswith(f"locum.errors.Unreachable: {NOWHERE}: expected Locum's")
        assert "Errno" not in printed


def test_answer_of_another_server_is_one_sentence_too() -> None:
    page = httpx.Response(200, text="<html>", request=httpx.Request("GET", "http://service/models"))
    steps = with_retries(operations.models(), Retries(0))
    next(steps)
    with pytest.raises(AnswerInvalid, match="is this the address of Locum's service") as found:
        steps.send(page)
    assert "".join(traceback.format_exception(found.value)).count("Traceback") == 1


def test_scan_that_is_not_there_is_one_sentence_too(tmp_path: Path) -> None:
    with pytest.raises(ScanInvalid, match="expected a scan or a folder, found: No such file") as missing:
        next(operations.segment(tmp_path / "scan.nii"))
    assert "".join(traceback.format_exception(missing.value)).count("Traceback") == 1


def test_answer_of_a_proxy_is_retried_and_named() -> None:
    gone = httpx.Response(
        502, text="<html>Bad Gateway", request=httpx.Request("GET", "http://service/models")
    )
    result, requests, _ = played(operations.models(), gone, gone, retries=1)
    assert "502 Bad Gateway, and not from Locum's service" in str(result)
    assert len(requests) == 2
    result, _, _ = played(operations.models(), problem("role-missing", 403))
    assert isinstance(result, NotAllowed)


def test_decision_names_the_state_that_it_replaces() -> None:
    entry = answer(404, JOB_GONE)
    _, requests, _ = played(operations.assign("h", "m", 1, "why"), answer(200, ETag='"4"'), entry)
    assert requests[1].headers["If-Match"] == '"4"'
    _, requests, _ = played(operations.assign("h", "m", 1, "why", seen=0), entry)
    assert requests[0].headers["If-Match"] == '"0"'


def test_listing_follows_its_pages() -> None:
    first = {"cohorts": [COHORT], "next": "abc"}
    result, requests, _ = played(
        operations.cohorts("h"),
        answer(200, first),
        answer(200, {"cohorts": [COHORT | {"id": "d"}], "next": None}),
    )
    assert [each.id for each in result] == ["c", "d"]
    assert [dict(request.params) for request in requests] == [{}, {"after": "abc"}]


def test_events_are_read_line_by_line_and_resumed_after_the_last() -> None:
    stream = EventStream("j", Retries(2))
    lines = [": ping", "", "id: 4", "event: epoch", 'data: {"epoch": 1}', "", "id: 5", "event: state"]
    found = [event for line in lines for event in stream.feed(f"{line}\n")]
    assert [(event.id, event.type, event.data) for event in found] == [(4, "epoch", {"epoch": 1})]
    stream.broken(broken())
    # The half event is gone with its connection.
    assert stream.request().headers["Last-Event-ID"] == "4"
    (last,) = (
        e
        for text in ("id: 5\r", '\nevent: state\ndata: {"state": "fai', 'led"}\n\n')
        for e in stream.feed(text)
    )
    assert last.last
    assert stream.over


def test_stream_that_breaks_without_an_event_is_given_up() -> None:
    stream = EventStream("j", Retries(2))
    for _ in range(2):
        stream.broken(broken())
    with pytest.raises(Unreachable):
        stream.broken(broken())
    # One that the service ends in order is none of these.
    patient = EventStream("j", Retries(2))
    assert all(patient.broken(None) > 0 for _ in range(10))


@pytest.mark.parametrize(
    ("said", "waited"),
    [("9" * 9, 900), ("9" * 290, 900), ("9" * 301, 0), ("²", 0), ("-1", 0), ("inf", 0), ("1e9", 0)],
)
def test_time_that_a_service_names_is_bounded(said: str, waited: float) -> None:
    busy = problem("busy")
    busy.headers = httpx.Headers([(b"Retry-After", said.encode())])
    _, _, pauses = played(operations.models(), busy, answer(200, {"models": [], "next": None}))
    assert waited <= pauses[0] <= max(waited, 0.5)


def _bytes(content: bytes, status: int = 200, **headers: str) -> httpx.Response:
    request = httpx.Request("GET", "http://service/path")
    return httpx.Response(status, content=content, headers=headers, request=request)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"cohorts": ' + b"[" * 40 + b"]" * 40 + b"}",
        b'{"cohorts": [], "x": ' + b"9" * 5000 + b"}",
        b'{"cohorts": [{"scans": ' + b"9" * 400 + b"}]}",
        b"[]",
        b'"x"',
        b"\xff",
    ],
    ids=lambda content: repr(content[:24]),
)
def test_answer_that_is_none_of_the_service_is_one_sentence(content: bytes) -> None:
    for operation in (operations.cohorts("h"), operations.jobs(limit=3), operations.cohort("h", "c")):
        with pytest.raises(AnswerInvalid):
            played(operation, _bytes(content))
    result, *_ = played(operations.models(), _bytes(content, 500))
    assert isinstance(result, Problem)


def test_number_beyond_all_floats_is_refused() -> None:
    with pytest.raises(AnswerInvalid, match="expected a number"):
        read(float, json.loads("9" * 400))


def test_listing_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def page(after: object) -> httpx.Response:
        return answer(200, {"cohorts": [], "next": after})

    with pytest.raises(AnswerInvalid, match="expected a last page, found one more after 3"):
        played(operations.cohorts("h"), page("a"), page("b"), page("a"))
    monkeypatch.setattr(core, "_MOST_PAGES", 3)
    with pytest.raises(AnswerInvalid, match="expected a last page, found one more after 4"):
        played(operations.cohorts("h"), *map(page, "abcd"))


def test_body_is_bounded_in_bytes_and_seconds() -> None:
    body = Body(_bytes(b""), 3 << 20)
    for seconds in range(3):
        body.take(bytes(1 << 20), seconds)
    assert body.whole().content == bytes(3 << 20)
    with pytest.raises(AnswerInvalid, match="at most 3 MiB"):
        body.take(b"x", 4)
    drip = Body(_bytes(b""), 1 << 20)
    for seconds in range(61):
        drip.take(b"x", seconds)
    with pytest.raises(httpx.ReadTimeout, match="too slowly"):
        drip.take(b"x", 61)
    # A slow line is none of these.
    slow = Body(_bytes(b""), 1 << 30)
    for seconds in range(600):
        slow.take(bytes(20_000), seconds)


def _stalled(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, content=(bytes(1 << 20) for _ in range(100)), request=request)


def _miscoded(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, headers={"Content-Encoding": "gzip"}, content=iter([b"none"]), request=request)


@pytest.mark.parametrize(
    ("serve", "said"), [(_stalled, "at most (64|1) MiB"), (_miscoded, "not coded as it")]
)
def test_clients_read_no_endless_or_miscoded_body(
    serve: Callable[[httpx.Request], httpx.Response], said: str
) -> None:
    with Client("http://service") as client:
        client._http = httpx.Client(base_url="http://service", transport=httpx.MockTransport(serve))
        for call in (client.models, lambda: list(client.events("j")), lambda: client.job("j")):
            with pytest.raises(AnswerInvalid, match=said):
                call()


@pytest.mark.parametrize("text", ["data: " + "x" * (1 << 20), "data: [1]\n\n", "data: " + "[" * 99 + "\n\n"])
def test_events_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(AnswerInvalid):
        list(EventStream("j", Retries(0)).feed(text))


def test_events_have_a_bound_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "_MOST_EVENTS", 99)
    stream = EventStream("j", Retries(0))
    assert not [each for _ in range(12) for each in stream.feed(": ping\n\n")]
    with pytest.raises(AnswerInvalid):
        list(stream.feed(": ping\n\n"))


class TestJobOfAScan:
    """`segment` where the answer is a job."""

    def job(self, state: str, window: int | None = None, job: str = "j") -> httpx.Response:
        progress = {} if window is None else {"stage": "segmenting", "window": window, "windows": 9}
        body = {
            **{"id": job, "kind": "segment", "state": state, "hospital": None, "model": "m", "attempt": 1},
            **{"queue_position": None, "progress": progress, "reason": "because", "cohort": None},
            **{"created_at": "2026-01-01T00:00:00Z", "started_at": None, "finished_at": None},
            **{"options": {}, "candidate": None, "gate": None, "warnings": [], "no_worker": None},
        }
        return answer(
            202 if state == "accepted" else 200, body | {"state": state.replace("accepted", "queued")}
        )

    def mask(self) -> httpx.Response:
        request = httpx.Request("GET", "http://service/path")
        return httpx.Response(200, content=b"mask", headers={"Content-Type": "image/png"}, request=request)

    def asked(self, requests: list[Request]) -> list[str]:
        return [f"{each.method} {each.path}" for each in requests]

    def play(self, *answers: httpx.Response, **more: Any) -> tuple[Any, list[str], list[int | None]]:
        seen: list[int | None] = []
        pixels = np.zeros((4, 4), np.uint8)
        operation = operations.render(
            pixels, "png", follow=lambda job: seen.append(job.progress.get("window")), **more
        )
        try:
            result, requests, _ = played(operation, *answers)
        except JobFailed as error:
            return error, [], seen
        return result, self.asked(requests), seen

    def test_it_is_followed_and_its_files_are_deleted(self) -> None:
        result, asked, seen = self.play(
            self.job("accepted"), self.job("running", 3), self.job("succeeded", 8), self.mask(), answer(204)
        )
        assert (result.content, result.media_type) == (b"mask", "image/png")
        assert asked == [
            "POST /segment", "GET /jobs/j", "GET /jobs/j", "GET /jobs/j/result", "DELETE /jobs/j/files",
        ]  # fmt: skip
        assert seen == [None, 3, 8]

    def test_a_result_that_only_an_operator_deletes_expires(self) -> None:
        result, *_ = self.play(
            self.job("accepted"), self.job("succeeded"), self.mask(), problem("role-missing", 403)
        )
        assert result.content == b"mask"

    @pytest.mark.parametrize("state", ["failed", "cancelled"])
    def test_a_job_without_a_mask_is_an_error_with_its_reason(self, state: str) -> None:
        result, *_ = self.play(self.job("accepted"), self.job(state))
        assert str(result) == f"job j: expected a mask, found state {state}: because"

    def test_an_interrupted_call_goes_on_with_its_job(self) -> None:
        result, asked, _ = self.play(
            self.job("running"), self.job("succeeded"), self.mask(), answer(204), resume="j"
        )
        assert result.content == b"mask"
        assert "POST /segment" not in asked

    @pytest.mark.parametrize("kind", ["unknown", "failed", "deleted"])
    def test_a_job_that_is_gone_is_made_again(self, kind: str) -> None:
        gone = {
            "unknown": [answer(404, JOB_GONE)],
            "failed": [self.job("failed")],
            "deleted": [self.job("succeeded"), problem("files-deleted", 410)],
        }[kind]
        again = [self.job("accepted", job="k"), self.job("succeeded", job="k"), self.mask(), answer(204)]
        result, asked, _ = self.play(*gone, *again, resume="j")
        assert result.content == b"mask"
        assert asked[-4:] == ["POST /segment", "GET /jobs/k", "GET /jobs/k/result", "DELETE /jobs/k/files"]
