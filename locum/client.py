"""The clients: `Client` blocks, `AsyncClient` awaits. Every method is an operation of `locum.operations`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import httpx

from locum import operations
from locum.answers import Event, Job
from locum.connection import Connection
from locum.core import (
    MOST_WORDS,
    Body,
    EventStream,
    Operation,
    Pause,
    Request,
    Retries,
    problem_of,
    with_retries,
)
from locum.errors import AnswerInvalid, Problem

T = TypeVar("T")
P = ParamSpec("P")

RETRIES = 6
"""Retries of a request by default: some thirty seconds in all."""

# A volume may wait for a slot and then run for minutes; the service itself ends what takes too long.
_TIMEOUT = httpx.Timeout(30.0, connect=10.0, read=900.0, write=300.0)
# The service sends a comment every 15 s, so a silence of a minute is a broken connection.
_EVENTS_TIMEOUT = httpx.Timeout(30.0, connect=10.0, read=60.0)


def _blocking(operation: Callable[P, Operation[T]]) -> Callable[Concatenate[Client, P], T]:
    @wraps(operation)
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(operation(*args, **kwargs))

    return method


def _awaited(operation: Callable[P, Operation[T]]) -> Callable[Concatenate[AsyncClient, P], Awaitable[T]]:
    @wraps(operation)
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(operation(*args, **kwargs))

    return method


class Client:
    """A client of a running service. Threads may share it.

    Requests are retried where the service says that a retry makes sense, and where the connection broke and
    the API makes the request idempotent.
    """

    def __init__(
        self, url: str | None = None, key: str | None = None, *, retries: int = RETRIES, verify: Any = True
    ) -> None:
        """Connect at the first request.

        Args:
            url: of the service; by default that of LOCUM_URL, else of `locum login`, else
                http://127.0.0.1:8000.
            key: an API key or access token; by default that of LOCUM_KEY, else the one that `locum login`
                keeps for the url.
            retries: of each request; a connection that is refused is tried three times at most until the
                service has answered once.
            verify: as httpx has it, for a certificate authority of the hospital's own.

        Raises:
            SettingInvalid: the address or the file of `locum login` cannot be used.
        """
        self.connection = Connection.find(url, key)
        self._retries = Retries(retries)
        self._http = httpx.Client(**_options(self.connection), verify=verify)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    segment = _blocking(operations.segment)
    render = _blocking(operations.render)
    classify = _blocking(operations.classify)
    models = _blocking(operations.models)
    model = _blocking(operations.model)
    versions = _blocking(operations.versions)
    hospitals = _blocking(operations.hospitals)
    register = _blocking(operations.register)
    create_cohort = _blocking(operations.create_cohort)
    describe_cohort = _blocking(operations.describe_cohort)
    cohorts = _blocking(operations.cohorts)
    cohort = _blocking(operations.cohort)
    delete_cohort = _blocking(operations.delete_cohort)
    cohort_scans = _blocking(operations.cohort_scans)
    cohort_file = _blocking(operations.cohort_file)
    add_scan = _blocking(operations.add_scan)
    add_mask = _blocking(operations.add_mask)
    adapt = _blocking(operations.adapt)
    measure_acceptance = _blocking(operations.measure_acceptance)
    acceptance = _blocking(operations.acceptance)
    acceptance_page = _blocking(operations.acceptance_page)
    acceptances = _blocking(operations.acceptances)
    decide_acceptance = _blocking(operations.decide_acceptance)
    demand_acceptances = _blocking(operations.demand_acceptances)
    job = _blocking(operations.get_job)
    jobs = _blocking(operations.jobs)
    cancel = _blocking(operations.cancel)
    card = _blocking(operations.card)
    serving = _blocking(operations.serving)
    history = _blocking(operations.history)
    assign = _blocking(operations.assign)
    roll_back = _blocking(operations.roll_back)
    change_plan = _blocking(operations.change_plan)
    set_change_plan = _blocking(operations.set_change_plan)
    shadows = _blocking(operations.shadows)
    begin_shadow = _blocking(operations.begin_shadow)
    end_shadow = _blocking(operations.end_shadow)
    watches = _blocking(operations.watches)
    set_watch = _blocking(operations.set_watch)
    answer_alarms = _blocking(operations.answer_alarms)
    observations = _blocking(operations.observations)
    observations_csv = _blocking(operations.observations_csv)
    review = _blocking(operations.review)
    correct = _blocking(operations.correct)
    accept_answer = _blocking(operations.accept_answer)
    corrections = _blocking(operations.corrections)
    find_corrections = _blocking(operations.find_corrections)
    follow_up = _blocking(operations.follow_up)
    followed_up = _blocking(operations.followed_up)
    kept_answers = _blocking(operations.kept_answers)
    keep_answers = _blocking(operations.keep_answers)
    answers = _blocking(operations.answers)
    report = _blocking(operations.report)
    report_page = _blocking(operations.report_page)
    version_card = _blocking(operations.version_card)
    version_card_page = _blocking(operations.version_card_page)
    session = _blocking(operations.session)
    ready = _blocking(operations.ready)

    def events(self, job: str, after: int = 0) -> Iterator[Event]:
        """Yield a job's events from the first one (or after one's id) to its last; a broken connection is
        resumed.

        Raises:
            Problem: 404 for no such job, and others.
            Unreachable: the service is gone.
        """
        stream = EventStream(job, self._retries, last=after)
        while not stream.over:
            broken: Exception | None = None
            try:
                with self._http.stream(**_sent(stream.request()), timeout=_EVENTS_TIMEOUT) as answer:
                    if not answer.is_success:
                        answer = _received(answer, MOST_WORDS)
                    if (problem := problem_of(answer)) is not None:
                        raise problem
                    for text in answer.iter_text():
                        yield from stream.feed(text)
            except (httpx.RequestError, Problem) as error:
                broken = error
            if not stream.over:
                time.sleep(stream.broken(broken))

    def wait(self, job: str) -> Job:
        """Follow a job to its end; return it. Errors as `events`."""
        for _ in self.events(job):
            continue
        return self.job(job)

    def _run(self, operation: Operation[T]) -> T:
        steps = with_retries(operation, self._retries)
        answer: Any = None
        error: Exception | None = None
        try:
            while True:
                step = steps.send(answer) if error is None else steps.throw(error)
                answer, error = None, None
                if isinstance(step, Pause):
                    time.sleep(step.seconds)
                    continue
                content = None if step.body is None else step.body.pieces()
                try:
                    with self._http.stream(**_sent(step), content=content) as head:
                        answer = _received(head, step.most)
                except (httpx.RequestError, AnswerInvalid) as failed:
                    error = failed
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            steps.close()


class AsyncClient:
    """`Client` for asyncio: the same methods, awaited, and `events` as an asynchronous iterator."""

    def __init__(
        self, url: str | None = None, key: str | None = None, *, retries: int = RETRIES, verify: Any = True
    ) -> None:
        """Arguments and errors as `Client`."""
        self.connection = Connection.find(url, key)
        self._retries = Retries(retries)
        self._http = httpx.AsyncClient(**_options(self.connection), verify=verify)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    segment = _awaited(operations.segment)
    render = _awaited(operations.render)
    classify = _awaited(operations.classify)
    models = _awaited(operations.models)
    model = _awaited(operations.model)
    versions = _awaited(operations.versions)
    hospitals = _awaited(operations.hospitals)
    register = _awaited(operations.register)
    create_cohort = _awaited(operations.create_cohort)
    describe_cohort = _awaited(operations.describe_cohort)
    cohorts = _awaited(operations.cohorts)
    cohort = _awaited(operations.cohort)
    delete_cohort = _awaited(operations.delete_cohort)
    cohort_scans = _awaited(operations.cohort_scans)
    cohort_file = _awaited(operations.cohort_file)
    add_scan = _awaited(operations.add_scan)
    add_mask = _awaited(operations.add_mask)
    adapt = _awaited(operations.adapt)
    measure_acceptance = _awaited(operations.measure_acceptance)
    acceptance = _awaited(operations.acceptance)
    acceptance_page = _awaited(operations.acceptance_page)
    acceptances = _awaited(operations.acceptances)
    decide_acceptance = _awaited(operations.decide_acceptance)
    demand_acceptances = _awaited(operations.demand_acceptances)
    job = _awaited(operations.get_job)
    jobs = _awaited(operations.jobs)
    cancel = _awaited(operations.cancel)
    card = _awaited(operations.card)
    serving = _awaited(operations.serving)
    history = _awaited(operations.history)
    assign = _awaited(operations.assign)
    roll_back = _awaited(operations.roll_back)
    change_plan = _awaited(operations.change_plan)
    set_change_plan = _awaited(operations.set_change_plan)
    shadows = _awaited(operations.shadows)
    begin_shadow = _awaited(operations.begin_shadow)
    end_shadow = _awaited(operations.end_shadow)
    watches = _awaited(operations.watches)
    set_watch = _awaited(operations.set_watch)
    answer_alarms = _awaited(operations.answer_alarms)
    observations = _awaited(operations.observations)
    observations_csv = _awaited(operations.observations_csv)
    review = _awaited(operations.review)
    correct = _awaited(operations.correct)
    accept_answer = _awaited(operations.accept_answer)
    corrections = _awaited(operations.corrections)
    find_corrections = _awaited(operations.find_corrections)
    follow_up = _awaited(operations.follow_up)
    followed_up = _awaited(operations.followed_up)
    kept_answers = _awaited(operations.kept_answers)
    keep_answers = _awaited(operations.keep_answers)
    answers = _awaited(operations.answers)
    report = _awaited(operations.report)
    report_page = _awaited(operations.report_page)
    version_card = _awaited(operations.version_card)
    version_card_page = _awaited(operations.version_card_page)
    session = _awaited(operations.session)
    ready = _awaited(operations.ready)

    async def events(self, job: str, after: int = 0) -> AsyncIterator[Event]:
        """As `Client.events`."""
        stream = EventStream(job, self._retries, last=after)
        while not stream.over:
            broken: Exception | None = None
            try:
                async with self._http.stream(**_sent(stream.request()), timeout=_EVENTS_TIMEOUT) as answer:
                    if not answer.is_success:
                        answer = await _awaited_body(answer, MOST_WORDS)
                    if (problem := problem_of(answer)) is not None:
                        raise problem
                    async for text in answer.aiter_text():
                        for event in stream.feed(text):
                            yield event
            except (httpx.RequestError, Problem) as error:
                broken = error
            if not stream.over:
                await asyncio.sleep(stream.broken(broken))

    async def wait(self, job: str) -> Job:
        """As `Client.wait`."""
        async for _ in self.events(job):
            continue
        return await self.job(job)

    async def _run(self, operation: Operation[T]) -> T:
        steps = with_retries(operation, self._retries)
        answer: Any = None
        error: Exception | None = None
        try:
            while True:
                # In a thread: a step may read a scan and unpack a mask.
                step, result = await asyncio.to_thread(_advance, steps, answer, error)
                if step is None:
                    return result  # type: ignore[no-any-return]
                answer, error = None, None
                if isinstance(step, Pause):
                    await asyncio.sleep(step.seconds)
                    continue
                content = None if step.body is None else _pieces(step.body.pieces())
                try:
                    async with self._http.stream(**_sent(step), content=content) as head:
                        answer = await _awaited_body(head, step.most)
                except (httpx.RequestError, AnswerInvalid) as failed:
                    error = failed
        finally:
            steps.close()


def _advance(
    steps: Operation[Any], answer: Any, error: Exception | None
) -> tuple[Request | Pause | None, Any]:
    """The next step, or None and the result: a StopIteration cannot leave a thread of asyncio."""
    try:
        return (steps.send(answer) if error is None else steps.throw(error)), None
    except StopIteration as end:
        return None, end.value


def _received(head: httpx.Response, most: int) -> httpx.Response:
    """The answer with its body. Raises AnswerInvalid, httpx.RequestError."""
    body, began = Body(head, most), time.monotonic()
    for piece in head.iter_bytes():
        body.take(piece, time.monotonic() - began)
    return body.whole()


async def _awaited_body(head: httpx.Response, most: int) -> httpx.Response:
    body, began = Body(head, most), time.monotonic()
    async for piece in head.aiter_bytes():
        body.take(piece, time.monotonic() - began)
    return body.whole()


async def _pieces(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece


def _options(connection: Connection) -> dict[str, Any]:
    headers = {"User-Agent": f"locum/{version_of_client()}"}
    if connection.key:
        headers["Authorization"] = f"Bearer {connection.key}"
    return {"base_url": connection.url, "headers": headers, "timeout": _TIMEOUT}


def version_of_client() -> str:
    """The installed version, of Locum or of its client alone."""
    for distribution in ("locum", "locum-client"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return "0"


def _sent(request: Request) -> dict[str, Any]:
    """The request as httpx takes it, without the body."""
    headers = dict(request.headers)
    if request.body is not None:
        headers["Content-Length"] = str(request.body.size)
    parts = {"scan": request.scan, "mask": request.mask}
    files = {name: (part.name, part.rewound()) for name, part in parts.items() if part is not None}
    # Text fields alone would not be multipart.
    fields = {name: (None, value.encode()) for name, value in (request.form or {}).items()}
    return {
        "method": request.method,
        "url": request.path,
        "params": dict(request.params),
        "headers": headers,
        "json": request.json,
        "files": {**fields, **files} or None,
    }
