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
# A service that asks for more is not waited for longer.
_LONGEST_RETRY_AFTER = 900.0
_MIB = 1 << 20
# Bytes of an answer in words, and of one with a mask.
MOST_WORDS, MOST_FILE = 64 * _MIB, 1024 * _MIB
# A body that comes more slowly is given up: the first seconds, and bytes per second after them.
_PATIENCE, _SLOWEST = 60.0, 16 << 10
# Locum's answers are a few levels deep.
_DEEPEST = 32
_TOO_DEEP = f"nested deeper than {_DEEPEST} levels"
_MOST_PAGES = 10_000
# Characters of a line of a job's events, and of all.
_LONGEST_LINE, _MOST_EVENTS = _MIB, 256 * _MIB
_OF_EVENTS = ("id", "event", "data")
_TYPE = "urn:locum:problem:"
_SECONDS = re.compile(r"[0-9]{1,300}")


@dataclass(frozen=True)
class Request:
    """A request to send.

    `repeatable`: sending it again after its answer was lost changes nothing: it only reads, or the API makes
    it idempotent. `also`: statuses that are answers here, not problems. `most`: bytes of the answer.
    """

    method: str
    path: str
    params: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    json: object = None
    form: Mapping[str, str] | None = None
    scan: Upload | None = None
    mask: Upload | None = None
    body: Upload | None = None
    repeatable: bool = True
    also: tuple[int, ...] = ()
    most: int = MOST_WORDS


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
        except (Problem, Unreachable, AnswerInvalid) as found:
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
        except httpx.DecodingError as error:
            raise _undecodable(error) from None
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


def _undecodable(error: httpx.DecodingError) -> AnswerInvalid:
    return AnswerInvalid(f"{error.request.url}: the answer is not coded as it says: {error}")


def problem_of(answer: httpx.Response) -> Problem | None:
    """The error of an answer that is none of 2xx."""
    if answer.is_success:
        return None
    kind = NotAllowed if answer.status_code in (401, 403) else Problem
    retry_after = answer.headers.get("Retry-After", "")
    named = _SECONDS.fullmatch(retry_after) is not None
    seconds = min(float(retry_after), _LONGEST_RETRY_AFTER) if named else None
    try:
        found = loads(answer.content)
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
        return loads(answer.content)
    except ValueError:
        found = answer.headers.get("Content-Type", "no type")
        raise AnswerInvalid(
            f"{answer.url}: expected JSON, found {found}: is this the address of Locum's service?"
        ) from None


def loads(content: bytes | str) -> Any:
    """JSON of few levels. Raises ValueError."""
    try:
        found = json.loads(content)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level = [found]
    for _ in range(_DEEPEST):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for values in inner for each in values if isinstance(each, dict | list)]
        if not level:
            return found
    raise ValueError(_TOO_DEEP)


class Body:
    """The body of an answer while it comes in, bounded in bytes and in seconds."""

    def __init__(self, answer: httpx.Response, most: int) -> None:
        self._answer, self._most, self._size = answer, most, 0
        self._pieces: list[bytes] = []

    def take(self, piece: bytes, seconds: float) -> None:
        """Add a decoded piece that came `seconds` after the answer's head.

        Raises AnswerInvalid for a body that is too long, and httpx.ReadTimeout for one that is too slow.
        """
        self._size += len(piece)
        if self._size > self._most:
            raise AnswerInvalid(
                f"{self._answer.url}: expected at most {self._most // _MIB} MiB, found more: is this the "
                "address of Locum's service?"
            )
        if seconds > _PATIENCE + self._size / _SLOWEST:
            raise httpx.ReadTimeout("the answer comes too slowly", request=self._answer.request)
        self._pieces.append(piece)

    def whole(self) -> httpx.Response:
        """The answer with its body, decoded."""
        coded = ("content-encoding", "content-length", "transfer-encoding")
        return httpx.Response(
            self._answer.status_code,
            headers=[(name, value) for name, value in self._answer.headers.items() if name not in coded],
            content=b"".join(self._pieces),
            request=self._answer.request,
            extensions=self._answer.extensions,
        )


def listed(
    path: str, key: str, kind: type[T], params: Mapping[str, str] | None = None, *, most: int | None = None
) -> Generator[Step, Any, list[T]]:
    """The first `most` items of a listing, or all. A page has in `next` what `after` takes for the page
    behind it.
    """
    found: list[T] = []
    params = dict(params or {})
    seen: set[str] = set()
    while True:
        items, after = page_of(json_of((yield from send(Request("GET", path, params=params)))), path, key)
        found += [read(kind, item) for item in items]
        if not after or (most is not None and len(found) >= most):
            return found[:most]
        if after in seen or len(seen) >= _MOST_PAGES:
            raise AnswerInvalid(
                f"{path}: expected a last page, found one more after {len(seen) + 1}: the service is damaged"
            )
        seen.add(after)
        params = {**params, "after": after}


def page_of(page: Any, path: str, key: str) -> tuple[list[Any], str]:
    """The items of a page, and what the page behind it comes after, if there is one. Raises AnswerInvalid."""
    items = page.get(key) if isinstance(page, dict) else None
    if not isinstance(items, list):
        raise AnswerInvalid(f"{path}: expected a list '{key}': is this the address of Locum's service?")
    return items, str(page.get("next") or "")


@dataclass
class EventStream:
    """Server-sent events of a job, over as many connections as it takes."""

    job: str
    retries: Retries
    last: int = 0
    over: bool = False
    _failures: int = 0
    _fields: dict[str, str] = field(default_factory=dict)
    _rest: str = ""
    _read: int = 0

    def request(self) -> Request:
        """The request that continues after the last event."""
        self._fields, self._rest = {}, ""
        headers = {"Accept": "text/event-stream", **({"Last-Event-ID": str(self.last)} if self.last else {})}
        return Request("GET", f"/jobs/{self.job}/events", headers=headers)

    def feed(self, text: str) -> Iterator[Event]:
        """Take in what came; yield the events that it ends. Raises AnswerInvalid."""
        self._read += len(text)
        *lines, self._rest = (self._rest + text).replace("\r\n", "\n").split("\n")
        if len(self._rest) > _LONGEST_LINE or self._read > _MOST_EVENTS:
            raise AnswerInvalid(
                f"/jobs/{self.job}/events: expected lines of at most {_LONGEST_LINE // _MIB} MiB, "
                f"{_MOST_EVENTS // _MIB} MiB in all, found more"
            )
        for line in lines:
            yield from self._event(line)

    def _event(self, line: str) -> Iterator[Event]:
        name, _, value = line.partition(":")
        if line:
            if name in _OF_EVENTS:
                self._fields[name] = value.removeprefix(" ")
            return
        fields, self._fields = self._fields, {}
        if "data" not in fields:
            return
        try:
            data = loads(fields["data"])
            event = Event(int(fields.get("id", 0)), fields.get("event", "message"), data)
            if not isinstance(data, dict):
                raise ValueError("no object")
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
        if isinstance(error, httpx.DecodingError):
            raise _undecodable(error) from None
        # A stream that ended in order: the service has let this follower go.
        return seconds
