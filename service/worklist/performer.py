"""Claim work items, have them done by jobs on the PACS, and report progress, results or why there are none.

What was claimed is in a file before the worklist is asked for it, with the Transaction UID that alone may
change the item from then on. A performer that was killed goes on with its items: the job is found by its
idempotency key, and an item that is in progress by another Transaction UID is another performer's.
"""

from __future__ import annotations

import json
import logging
import os
import ssl
import threading
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import httpx

from model_store.digest import sha256
from model_store.durable import write_durably
from service.errors import PacsRefused, PacsUnavailable
from service.pacs.configuration import PacsServer
from service.worklist import ups
from service.worklist.configuration import Workitem, Worklist, WorklistConfiguration
from service.worklist.ups import NotOurs, Scheduled, WorklistClient

_log = logging.getLogger("locum.worklist")

# The operator mends a key, a role, a hospital or a model, or answers an alarm of the watch (409).
_MENDED: Final = frozenset({401, 403, 404, 408, 409, 421, 425, 429})
_ENDED: Final = ("COMPLETED", "CANCELED")
_SECONDS: Final = 60.0


class _NotNow(Exception):
    """It may succeed later."""


@dataclass(frozen=True)
class Claim:
    """An item of this performer. `job` is "" before its job was made."""

    worklist: str
    item: str
    transaction: str
    code: tuple[str, str]
    began: str
    study: str
    series: str
    job: str = ""
    percent: int = -1

    @property
    def id(self) -> str:
        """What the log calls it: a UID would lead to the patient."""
        return sha256(self.item.encode())[7:19]


@dataclass
class Performer:
    """Works off the worklists, one look at a time. `folder` has the claims."""

    configuration: WorklistConfiguration
    servers: Mapping[str, PacsServer]
    folder: Path
    stopping: threading.Event
    _said: dict[str, str] = field(default_factory=dict)

    def run(self) -> None:
        """Look until `stopping` is set. What is in progress then goes on, and is reported after a start."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        while not self.stopping.is_set():
            self.look()
            self.stopping.wait(self.configuration.poll_seconds)

    def look(self) -> None:
        """Report on every item in progress, and claim others where there is room."""
        for name, worklist in self.configuration.worklists.items():
            try:
                with WorklistClient(name, self.servers[worklist.pacs]) as client:
                    for claim in self._claims(name):
                        self._tend(client, worklist, claim)
                    self._take(client, worklist, name)
            except (PacsUnavailable, PacsRefused) as error:
                self._wait(f"worklist {name}", str(error))
            except OSError as error:
                self._wait(f"worklist {name}", f"{type(error).__name__}: {error.strerror}")
            else:
                self._said.pop(f"worklist {name}", None)

    def _wait(self, what: str, why: str) -> None:
        """Say why something waits, once until it is another reason."""
        if self._said.get(what) != why:
            _log.warning("%s waits: %s", what, why)
        self._said[what] = why

    # -------------------------------------------------------------------------------- claims

    def _file(self, claim: Claim) -> Path:
        return self.folder / f"{claim.id}.json"

    def _keep(self, claim: Claim) -> Claim:
        write_durably(self._file(claim), json.dumps(asdict(claim)).encode(), mode=0o600)
        return claim

    def _drop(self, claim: Claim) -> None:
        self._said.pop(f"item {claim.id}", None)
        self._file(claim).unlink(missing_ok=True)

    def _claims(self, worklist: str | None = None) -> list[Claim]:
        found = []
        for path in sorted(self.folder.glob("*.json")):
            said = json.loads(path.read_bytes())
            claim = Claim(**{**said, "code": tuple(said["code"])})
            if worklist is None or claim.worklist == worklist:
                found.append(claim)
        return found

    def _take(self, client: WorklistClient, worklist: Worklist, name: str) -> None:
        known = {claim.item for claim in self._claims()}
        room = self.configuration.most - len(known)
        wanted = {(each.value, each.scheme) for each in worklist.workitems}
        for item in client.scheduled():
            if room <= 0:
                return
            if item.code not in wanted or not item.ready or item.uid in known:
                continue
            study, series = item.inputs[0] if len(item.inputs) == 1 else ("", "")
            began = datetime.now(UTC).isoformat()
            transaction = f"2.25.{uuid.uuid4().int}"
            claim = self._keep(Claim(name, item.uid, transaction, item.code, began, study, series))
            try:
                client.change_state(item.uid, transaction, "IN PROGRESS")
            except NotOurs:
                # Another performer was faster.
                self._drop(claim)
                continue
            room -= 1
            _log.info("item %s of worklist %s is claimed", claim.id, name)
            self._tend(client, worklist, claim)

    # -------------------------------------------------------------------------------- one item

    def _tend(self, client: WorklistClient, worklist: Worklist, claim: Claim) -> None:
        """Take an item one step on. Raises PacsUnavailable, PacsRefused, OSError."""
        try:
            self._step(client, worklist, claim)
        except _NotNow as error:
            self._wait(f"item {claim.id}", str(error))

    def _step(self, client: WorklistClient, worklist: Worklist, claim: Claim) -> None:
        try:
            now = client.item(claim.item)
            if now.state in _ENDED:
                raise NotOurs
            if now.state == "SCHEDULED":
                # The process ended between its file and the claim.
                client.change_state(claim.item, claim.transaction, "IN PROGRESS")
            if not claim.job:
                # Who else may have claimed it is found out before there is a job.
                client.update(claim.item, claim.transaction, ups.progress(0, "claimed"))
            job = self._job(worklist, claim, now)
            if job is None:
                why = f"expected one series as input, found {len(now.inputs)}"
                if len(now.inputs) == 1:
                    why = "expected a series as input, found a study without one"
                self._cancel(client, claim, why)
                return
            claim = claim if claim.job else self._keep(replace(claim, job=job["id"]))
            self._report(client, worklist, claim, job)
        except NotOurs:
            if claim.job:
                self._api(worklist, "DELETE", f"/jobs/{claim.job}")
            self._drop(claim)
            _log.info("item %s is not Locum's any more; its job was cancelled", claim.id)
        except _Rejected as error:
            self._cancel(client, claim, str(error))

    def _job(self, worklist: Worklist, claim: Claim, now: Scheduled) -> dict[str, Any] | None:
        """The item's job, which is made once; None where the item has no one series."""
        if claim.job:
            return self._api(worklist, "GET", f"/jobs/{claim.job}")
        if len(now.inputs) != 1 or not all(now.inputs[0]):
            return None
        asked: Workitem = next(each for each in worklist.workitems if (each.value, each.scheme) == claim.code)
        body = {
            "hospital": worklist.hospital,
            "study": claim.study,
            "series": claim.series,
            "model": asked.model,
            "output": asked.output,
            "store": True,
        }
        key = sha256(f"{claim.item} {claim.transaction}".encode())[7:]
        return self._api(worklist, "POST", f"/pacs/{worklist.pacs}/segment", body, key)

    def _report(self, client: WorklistClient, worklist: Worklist, claim: Claim, job: dict[str, Any]) -> None:
        state = job["state"]
        if state == "succeeded":
            stored = self._api(worklist, "GET", f"/jobs/{claim.job}/result")
            root = str(self.servers[worklist.pacs].wado_url)
            found = [each for each in (stored, stored.get("report")) if each]
            self._end(client, claim, "COMPLETED", [ups.output(each, root) for each in found])
        elif state in ("failed", "cancelled"):
            self._cancel(client, claim, job.get("reason") or f"the job was {state}")
        else:
            percent = _percent(job["progress"])
            if percent != claim.percent:
                said = str((job.get("status") or {}).get("doing") or state)
                client.update(claim.item, claim.transaction, ups.progress(percent, said))
                self._keep(replace(claim, percent=percent))

    def _cancel(self, client: WorklistClient, claim: Claim, why: str) -> None:
        client.update(claim.item, claim.transaction, ups.discontinued(datetime.now(UTC), why))
        self._end(client, claim, "CANCELED", [])
        _log.warning("item %s is cancelled: %s", claim.id, why)

    def _end(self, client: WorklistClient, claim: Claim, state: str, outputs: list[Any]) -> None:
        began, ended = datetime.fromisoformat(claim.began), datetime.now(UTC)
        done = ups.performed(self.configuration.station, claim.code, began, ended, outputs)
        client.update(claim.item, claim.transaction, done)
        client.change_state(claim.item, claim.transaction, state)
        self._drop(claim)
        _log.info("item %s is %s", claim.id, state)

    # -------------------------------------------------------------------------------- the API

    @cached_property
    def _context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.configuration.ca)

    def _api(
        self,
        worklist: Worklist,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> dict[str, Any]:
        """What the API answers. Raises _NotNow, _Rejected."""
        headers = {} if key is None else {"Idempotency-Key": key}
        if (secret := _key(worklist)) is not None:
            headers["Authorization"] = f"Bearer {secret}"
        url = f"{self.configuration.service.rstrip('/')}{path}"
        try:
            with httpx.Client(
                timeout=_SECONDS, verify=self._context, trust_env=False, headers=headers
            ) as client:
                answer = client.request(method, url, json=body)
        except httpx.HTTPError as error:
            raise _NotNow(f"the API does not answer ({type(error).__name__})") from None
        if answer.is_success:
            return dict(answer.json()) if answer.content else {}
        said = f"the API answers {answer.status_code}: {_detail(answer)}"
        # A job that has ended cannot be cancelled.
        if method == "DELETE" and answer.status_code in (404, 409, 410):
            return {}
        # A job that is not there any more never comes back; a hospital or a model may.
        mended = answer.status_code in _MENDED and not (answer.status_code == 404 and method == "GET")
        if mended or answer.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
            raise _NotNow(said)
        raise _Rejected(said)


class _Rejected(Exception):
    """The API will never do it."""


def _percent(progress: Mapping[str, Any]) -> int:
    """The share of a job's windows that are done; a job that began has begun."""
    done, total = progress.get("window"), progress.get("windows")
    if not (isinstance(done, int) and isinstance(total, int) and total > 0):
        return 0
    return min(99, 100 * done // total)


def _key(worklist: Worklist) -> str | None:
    """The hospital's API key; None if none is configured. Raises _NotNow."""
    if worklist.key_file is not None:
        try:
            return worklist.key_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            said = f"the API key of '{worklist.hospital}' cannot be read ({type(error).__name__})"
            raise _NotNow(said) from None
    if worklist.key_env is not None:
        if not (found := os.environ.get(worklist.key_env, "").strip()):
            raise _NotNow(f"the API key of '{worklist.hospital}' is missing: set {worklist.key_env}")
        return found
    return None


def _detail(answer: httpx.Response) -> str:
    """The API's own reason, which says nothing of the patient; another server's answer is left out."""
    if answer.headers.get("content-type", "").startswith("application/problem+json"):
        return str(answer.json().get("detail", ""))[:500]
    return "no problem document"
