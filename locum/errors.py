"""What can go wrong in the client and the command.

    LocumError
    ├── Problem            the service rejected the request: its sentence, its status, its kind
    │   └── NotAllowed     401 or 403: no key, an invalid one, or one without the role
    ├── Unreachable        no service answers at this address, or the connection broke
    ├── AnswerInvalid      the answer is none of Locum's service, or of one that is too new or too old
    ├── ScanInvalid        the client's own input is no scan, or names none
    ├── SettingInvalid     the address, the file of `locum login` or an environment variable cannot be used
    └── JobFailed          a job ended without the candidate or mask that was asked for

A message names the thing, what was expected, what was found, and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class LocumError(Exception):
    """Base of every error that `locum` raises on purpose."""


class Problem(LocumError):
    """The service rejected a request (RFC 9457).

    Attributes:
        status: of the HTTP answer.
        slug: names the kind for programs, such as `gate-refused`; empty for an answer that is no problem
            document.
        title: names the kind for people.
        request: id of the request, by which the service's log and audit trail name it.
        members: further members of the document, such as `choices`.
        retry_after: seconds after which a retry makes sense; None where the service does not say.
    """

    def __init__(
        self,
        detail: str,
        *,
        status: int,
        slug: str = "",
        title: str = "",
        request: str = "",
        members: Mapping[str, Any] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(detail)
        self.status, self.slug, self.title, self.request = status, slug, title, request
        self.members = dict(members or {})
        self.retry_after = retry_after


class NotAllowed(Problem):
    """The caller is not known, or may not do this."""


class Unreachable(LocumError):
    """No answer: nothing listens there, or the connection broke too often."""


class AnswerInvalid(LocumError):
    """An answer that this client cannot read."""


class ScanInvalid(LocumError):
    """Input that is no scan, found before anything is sent."""


class SettingInvalid(LocumError):
    """An address, a key or the file that holds them cannot be used."""


class JobFailed(LocumError):
    """A job ended without a result."""
