"""The part of the client without input and output: requests, answers, retries.

An operation is a generator: it yields the next `Request` or `Pause`, receives the answer, and returns its
result. `Client` and `AsyncClient` only send and sleep, so both do the same.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import httpx

from locum.answers import Event
from locum.errors import AnswerInvalid, NotAllowed, Problem, Unreachable
from locum.reading import read
from locum.scans import Upload

T = TypeVar("T")

# What the service says is over soon; every other rejection is final ("A client should retry only where the
# table says so").
_TRANSIENT = {
    "busy",
    "database-unavailable",
    "files-unavailable",
    "provider-unavailable",
    "queue-unavailable",
    "store-unavailable",
    "too-many-requests",
}
# A proxy before the service answers so, without a problem document.
_BY_PROXY = {502, 503, 504}
# Nothing of the request has left.
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
# How often a request is sent again before anything has answered: to where nothing listens, and to where
# nothing can be reached, which takes the whole timeout to learn.
_AT_FIRST = {httpx.ConnectError: 2, httpx.ConnectTimeout: 0}
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_TYPE = "urn:locum:problem:"


@dataclass(frozen=True)
class Request:
    """A request to send.

    `repeatable`: sending it again after its answer was lost changes nothing: it only reads, or the API makes
    it idempotent. `also`: statuses that are answers here, not problems.
    """

    method: str
    path: str
    params: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    json: object = None
    form: Mapping[str, str] | None = None
    scan: Upload | None = None
    body: Upload | None = None
    repeatable: bool = True
    also: tuple[int, ...] = ()


@dataclass(frozen=True)
class Pause:
    """Seconds to wait."""

    seconds: float


@dataclass
class Retries:
    """How often a client sends a request again: `most` times.

    Until something has answered the client, a connection that is refused is tried only three times, and one
    that is not made once: more likely than a service that restarts is a wrong address, which a person should
    learn at once.
    """

    most: int
    answered: bool = False

    def end(self, attempt: int, error: httpx.TransportError | None = None) -> bool:
        """Whether attempt number `attempt`, from 0, was the last one."""
        few = self.most if self.answered or error is None else _AT_FIRST.get(type(error), self.most)
        return attempt >= min(self.most, few)


Step: TypeAlias = Request | Pause
Operation: TypeAlias = Generator[Step, Any, T]


def send(request: Request) -> Generator[Step, Any, httpx.Response]:
    """One request of an operation. Raises Problem, NotAllowed, Unreachable."""
    answer: httpx.Response = yield request
    return answer


def pause(seconds: float) -> Generator[Step, Any, None]:
    """A pause of an operation."""
    yield Pause(seconds)


def with_retries(operation: Operation[T], retries: Retries) -> Operation[T]:
    """The operation, with every request retried where that is safe and makes sense."""
    answer: Any = None
    error: Exception | None = None
    while True:
        try:
            step = operation.send(answer) if error is None else operation.throw(error)
        except StopIteration as end:
            result: T = end.value
            return result
        answer, error = None, None
        if isinstance(step, Pause):
            yield step
            continue
        try:
            answer = yield from _attempts(step, retries)
        except (Problem, Unreachable) as found:
            error = found


def _attempts(request: Request, retries: Retries) -> Generator[Step, Any, httpx.Response]:
    attempt = 0
    while True:
        seconds = _backoff(attempt)
        try:
            answer: httpx.Response = yield request
        except httpx.TransportError as error:
            if retries.end(attempt, error) or not (request.repeatable or isinstance(error, _NOT_SENT)):
                # The sentence has all that a person needs of httpx's traceback.
                raise unreachable(error) from None
        else:
            retries.answered = True
            problem = None if answer.status_code in request.also else problem_of(answer)
            if problem is None:
                return answer
            by_proxy = not problem.slug and problem.status in _BY_PROXY and request.repeatable
            if retries.end(attempt) or not (by_proxy or problem.slug in _TRANSIENT):
                raise problem
            seconds = max(seconds, problem.retry_after or 0)
        yield Pause(seconds)
        attempt += 1


def _backoff(attempt: int) -> float:
    # With jitter, so that clients that were rejected together do not come back together.
    return min(_FIRST_PAUSE * 2.0**attempt, _LONGEST_PAUSE) * random.uniform(0.5, 1.0)


def unreachable(error: httpx.TransportError) -> Unreachable:
    """The sentence for a connection that failed."""
    try:
        url = error.request.url
        where = f"{url.scheme}://{url.netloc.decode('ascii')}"
    except RuntimeError:
        where = "the service"
    if isinstance(error, httpx.TimeoutException) and not isinstance(error, _NOT_SENT):
        return Unreachable(f"{where}: the service did not answer in time ({type(error).__name__}): try again")
    found = re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
    return Unreachable(
        f"{where}: expected Locum's service, found: {found}; start it with "
        "`locum serve`, or name its address in LOCUM_URL"
    )


def problem_of(answer: httpx.Response) -> Problem | None:
    """The error of an answer that is none of 2xx."""
    if answer.is_success:
        return None
    kind = NotAllowed if answer.status_code in (401, 403) else Problem
    retry_after = answer.headers.get("Retry-After", "")
    seconds = float(retry_after) if retry_after.isdigit() else None
    try:
        found = json.loads(answer.content)
        detail = str(found["detail"])
    except (ValueError, KeyError, TypeError, AttributeError):
        text = f"{answer.url}: {answer.status_code} {answer.reason_phrase}, and not from Locum's service"
        return kind(text, status=answer.status_code, title=answer.reason_phrase, retry_after=seconds)
    known = ("type", "title", "status", "detail", "instance")
    return kind(
        detail,
        status=answer.status_code,
        slug=str(found.get("type", "")).removeprefix(_TYPE),
        title=str(found.get("title", "")),
        request=str(found.get("instance", "")).removeprefix("urn:uuid:"),
        members={name: value for name, value in found.items() if name not in known},
        retry_after=seconds,
    )


def parsed(kind: type[T], answer: httpx.Response) -> T:
    """Read a JSON answer. Raises AnswerInvalid."""
    return read(kind, json_of(answer))


def json_of(answer: httpx.Response) -> Any:
    """The JSON of an answer. Raises AnswerInvalid."""
    try:
        return json.loads(answer.content)
    except ValueError:
        found = answer.headers.get("Content-Type", "no type")
        raise AnswerInvalid(
            f"{answer.url}: expected JSON, found {found}: is this the address of Locum's service?"
        ) from None


def listed(
    path: str, key: str, kind: type[T], params: Mapping[str, str] | None = None
) -> Generator[Step, Any, list[T]]:
    """All items of a listing. A page has in `next` what `after` takes for the page behind it."""
    found: list[T] = []
    params = dict(params or {})
    while True:
        page = json_of((yield from send(Request("GET", path, params=params))))
        items = page.get(key) if isinstance(page, dict) else None
        if not isinstance(items, list):
            raise AnswerInvalid(f"{path}: expected a list '{key}': is this the address of Locum's service?")
        found += [read(kind, item) for item in items]
        after = page.get("next")
        if not after:
            return found
        params = {**params, "after": str(after)}


@dataclass
class EventStream:
    """Server-sent events of a job, over as many connections as it takes."""

    job: str
    retries: Retries
    last: int = 0
    over: bool = False
    _failures: int = 0
    _fields: dict[str, str] = field(default_factory=dict)

    def request(self) -> Request:
        """The request that continues after the last event."""
        self._fields = {}
        headers = {"Accept": "text/event-stream", **({"Last-Event-ID": str(self.last)} if self.last else {})}
        return Request("GET", f"/jobs/{self.job}/events", headers=headers)

    def feed(self, line: str) -> Iterator[Event]:
        """Take in one line; yield the event that it ends."""
        name, _, value = line.partition(":")
        if line and name:
            self._fields[name] = value.removeprefix(" ")
            return
        if line or "data" not in self._fields:
            return
        fields, self._fields = self._fields, {}
        try:
            event = Event(
                int(fields.get("id", 0)), fields.get("event", "message"), json.loads(fields["data"])
            )
        except ValueError:
            raise AnswerInvalid(f"/jobs/{self.job}/events: expected an event, found {fields!r:.80}") from None
        self.retries.answered = True
        self.last, self._failures, self.over = event.id, 0, event.last
        yield event

    def broken(self, error: Exception | None) -> float:
        """Return the seconds to wait after a connection that ended before the job. Raises what is final."""
        attempt, self._failures = self._failures, self._failures + 1
        seconds = _backoff(attempt)
        if isinstance(error, Problem):
            if self.retries.end(attempt) or error.slug not in _TRANSIENT:
                raise error
            return max(seconds, error.retry_after or 0)
        if isinstance(error, httpx.TransportError) and self.retries.end(attempt, error):
            raise unreachable(error) from None
        # A stream that ended in order: the service has let this follower go.
        return seconds
