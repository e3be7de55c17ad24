"""The roster of a consortium: what the operator last heard of each hospital, and what is missing there.

It is `roster.json` in the operator's kit. A run writes it, and `listen` between runs. A hospital says what
its policy permits (`About`), nothing of a patient.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from model_store.durable import write_durably
from training.network.cell import Rejected, printable
from training.network.kits import Certified, Kit
from training.network.messages import PROTOCOL, About, Planned, PlannedRun, check_wire, pack, unpack
from training.progress.format import duration

FILE = "roster.json"
# Heard within it, a hospital is here.
HERE = timedelta(minutes=2)
# Between writes of what was heard alone.
_WRITE_EVERY = timedelta(seconds=10)
# Reasons that are said of a hospital until it is heard: nothing proves who says them.
_MOST_SAID = 20
_CLOCKS_DIFFER = timedelta(minutes=5)


class Entry(BaseModel):
    """What is known of a hospital.

    `refused` is the last reason for which the operator turned it away, `kept_out` that for which TLS did, as
    far as something that has its name said at the door: it stands until the hospital is heard.
    """

    model_config = ConfigDict(frozen=True)

    heard: datetime | None = None
    about: About | None = None
    # The operator's clock less the hospital's, when it said `about`.
    clock_ahead: float = 0.0
    refused_at: datetime | None = None
    refused: str | None = None
    kept_out_at: datetime | None = None
    kept_out: str | None = None


class Roster:
    """The file of a kit, safe from any thread. A damaged file begins again: it only says what was heard."""

    def __init__(self, kit: Kit) -> None:
        self._path = kit.folder / FILE
        self._lock = threading.Lock()
        self._entries = read(kit)
        self._written = datetime.min.replace(tzinfo=UTC)
        self._said: dict[str | None, set[str]] = {}

    def heard(self, site: str, about: About | None = None) -> None:
        """Note that a hospital spoke, and what it said of itself."""
        now = datetime.now(UTC)
        with self._lock:
            entry = self._entries.get(site, Entry())
            self._said.pop(site, None)
            change: dict[str, Any] = {"heard": now, "kept_out": None, "kept_out_at": None}
            if about is not None:
                ahead = (now - about.clock).total_seconds()
                change |= {"about": about, "clock_ahead": ahead, "refused": None, "refused_at": None}
            self._entries[site] = entry.model_copy(update=change)
            self._write(now, at_once=about is not None or entry.kept_out is not None)

    def refused(self, site: str, reason: str) -> bool:
        """Note why a hospital was turned away; returns whether that is news."""
        now = datetime.now(UTC)
        with self._lock:
            before = self._entries.get(site, Entry()).refused
            change = {"heard": now, "refused_at": now, "refused": printable(reason)}
            self._entries[site] = self._entries.get(site, Entry()).model_copy(update=change)
            self._write(now, at_once=True)
            return before != printable(reason)

    def kept_out(self, site: str | None, why: str) -> str | None:
        """Note that TLS keeps out a hospital, None for one of no consortium; returns a line that is news."""
        now = datetime.now(UTC)
        with self._lock:
            said = self._said.setdefault(site, set())
            if news := why not in said and len(said) < _MOST_SAID:
                said.add(why)
            if site is not None:
                change = {"kept_out_at": now, "kept_out": why}
                self._entries[site] = self._entries.get(site, Entry()).model_copy(update=change)
                self._write(now, at_once=news)
        if not news:
            return None
        return why if site is None else f"{site} cannot connect: {why}"

    def _write(self, now: datetime, *, at_once: bool) -> None:
        if at_once or now - self._written >= _WRITE_EVERY:
            content = {site: entry.model_dump(mode="json") for site, entry in self._entries.items()}
            write_durably(self._path, json.dumps(content).encode())
            self._written = now


def read(kit: Kit) -> dict[str, Entry]:
    """What the roster of an operator's kit holds."""
    try:
        content = json.loads((kit.folder / FILE).read_bytes())
        return {site: Entry.model_validate(entry) for site, entry in content.items()}
    except (FileNotFoundError, ValueError, AttributeError, ValidationError):
        return {}


def between_runs(
    roster: Roster,
    sites: tuple[str, ...],
    planned: Callable[[str], tuple[PlannedRun, ...]],
    say: Callable[[str], None],
) -> Callable[[str, str, bytes], bytes]:
    """The handler of a cell between runs: it hears the hospitals of the consortium.

    `planned` gives the runs of the calendar that a hospital is in, `say` gets lines for the operator.
    """

    def handle(peer: str, topic: str, content: bytes) -> bytes:
        if peer not in sites:
            raise Rejected(f"'{peer}' is no hospital of this consortium", "stranger")
        if topic == "hello":
            roster.heard(peer, unpack(About, content)[0])
            return pack(Planned(runs=planned(peer)))
        if topic == "invite":
            try:
                check_wire(peer, content)
            except Rejected as error:
                if roster.refused(peer, str(error)):
                    say(f"{peer} cannot take part: {error}")
                raise
        roster.heard(peer)
        raise Rejected("no run has begun yet", "idle")

    return handle


@dataclass(frozen=True)
class Row:
    """A hospital of the roster. `open` are the steps that it has yet to do, a sentence each."""

    site: str
    heard: str
    here: bool
    ends: str
    entry: Entry
    open: tuple[str, ...]

    @property
    def state(self) -> str:
        """Ready, or what is missing first, in a sentence."""
        if not self.open:
            return "ready"
        more = f" (and {len(self.open) - 1} more)" if len(self.open) > 1 else ""
        return f"{self.open[0]}{more}"

    def cells(self) -> tuple[str, ...]:
        """For a table: hospital, heard, locum, device, free disk, patients, certificate, state."""
        about = self.entry.about
        free = "" if about is None or about.free_gib is None else f"{about.free_gib:.0f} GiB"
        patients = "" if about is None or about.patients is None else str(about.patients)
        device = "" if about is None else about.device or ""
        heard = "now" if self.here else self.heard
        return (self.site, heard, about.locum if about else "", device, free, patients, self.ends, self.state)

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "hospital": self.site,
            "here": self.here,
            "state": self.state,
            "open": [*self.open],
            "certificate": self.ends,
            **self.entry.model_dump(mode="json"),
        }


def rows(kit: Kit, certificates: Mapping[str, Certified], now: datetime | None = None) -> list[Row]:
    """A row for each hospital of the operator's kit. `certificates` are the newest of each."""
    now, known = now or datetime.now(UTC), read(kit)
    return [_row(site, known.get(site, Entry()), certificates.get(site), now) for site in kit.content.sites]


def mail(row: Row, kit: Kit) -> str:
    """The text of a mail to a hospital, with the steps that are open there."""
    if not row.open:
        return f"To {row.site}: everything is in order for the next run of {kit.content.project}."
    steps = "\n".join(f"  {number}. {step}" for number, step in enumerate(row.open, 1))
    return (
        f"To {row.site}: before the next run of {kit.content.project}, please\n\n{steps}\n\n"
        "`locum site check --data FOLDER --kit KIT --policy policy.yaml` then says whether all is in order; "
        "the operator sees its answer when `locum site` connects."
    )


def _row(site: str, entry: Entry, certificate: Certified | None, now: datetime) -> Row:
    left = None if certificate is None else (certificate.ends - now).days
    quiet = None if entry.heard is None else now - entry.heard
    heard = "never" if quiet is None else f"{duration(max(0.0, quiet.total_seconds()))} ago"
    here = quiet is not None and quiet < HERE
    words = "unknown" if left is None else f"{left} days"
    newest = None if certificate is None else certificate.fingerprint
    return Row(site, heard, here, words, entry, tuple(_missing(site, entry, left, newest, here)))


def _missing(site: str, entry: Entry, left: int | None, newest: str | None, here: bool) -> list[str]:
    found, renewal = [], f"the operator: `locum federation renew --site {site}`"
    if left is not None and left < 0:
        found.append(f"renew its certificate, which ended ({renewal})")
    elif left is not None and left < 30:
        found.append(f"renew its certificate, which ends in {left} days ({renewal})")
    if entry.refused:
        found.append(f"mend why it was turned away: {entry.refused}")
    if entry.kept_out:
        found.append(f"mend why it cannot connect: {entry.kept_out}")
    elif entry.heard is None:
        found.append("start `locum site` with its kit: it was never heard")
    elif not here:
        found.append(f"start `locum site`: it is silent since {entry.heard:%Y-%m-%d %H:%M} UTC")
    if (about := entry.about) is None:
        return found
    if newest is not None and about.kit != newest:
        found.append("put the renewed client.crt and rootCA.pem into its kit: it uses an earlier certificate")
    if about.protocol != PROTOCOL:
        whom = "it" if about.protocol < PROTOCOL else "the operator"
        found.append(
            f"upgrade {whom}: it speaks version {about.protocol} of the wire, the operator {PROTOCOL}"
        )
    if abs(entry.clock_ahead) > _CLOCKS_DIFFER.total_seconds():
        found.append(f"set its clock, which differs by {duration(abs(entry.clock_ahead))}")
    found += [f"mend the {each.part}: {each.words}" for each in about.findings if each.state == "wrong"]
    return found
