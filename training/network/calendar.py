"""The calendar of runs: what is planned, which hospitals agreed and by whom, what runs, and what ended.

It is `calendar.json` in the operator's kit. A hospital hears of a planned run when it connects, and says
whether a person there agreed: agreement is not readiness, which the roster knows.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from model_store.durable import write_durably
from training.errors import ConfigurationError
from training.network.kits import Kit
from training.network.messages import Agreed, Name, PlannedRun
from training.network.roster import Row

FILE = "calendar.json"
AGREED, HEARD = "agreed.json", "planned.json"
_MOST_RUNS = 1000


class Entry(BaseModel):
    """A run of the calendar. `sites` are the hospitals that it is for."""

    model_config = ConfigDict(frozen=True)

    id: Name
    what: Annotated[str, Field(min_length=1, max_length=200)]
    on: date
    sites: tuple[str, ...]
    planned_at: datetime
    began: datetime | None = None
    ended: datetime | None = None

    @property
    def message(self) -> PlannedRun:
        """As a hospital hears it."""
        return PlannedRun(id=self.id, what=self.what, on=self.on)


def read(kit: Kit) -> list[Entry]:
    """The runs of an operator's kit, the earliest first. Raises ConfigurationError for a damaged file."""
    path = kit.folder / FILE
    if not path.exists():
        return []
    try:
        found = [Entry.model_validate(each) for each in json.loads(path.read_bytes())]
    except (ValueError, TypeError, ValidationError) as error:
        raise ConfigurationError(f"{path} is no calendar", [str(error).splitlines()[0]]) from error
    return sorted(found, key=lambda each: (each.on, each.planned_at))


def add(kit: Kit, what: str, on: date, sites: Sequence[str]) -> Entry:
    """Plan a run for hospitals; all of the consortium if none is named. Raises ConfigurationError."""
    known, before = kit.content.sites, read(kit)
    problems = [f"'{site}': expected one of {', '.join(known)}" for site in sites if site not in known]
    if not what.isprintable() or not 1 <= len(what) <= 200:
        problems.append("expected a line of 1 to 200 printable characters that says what the run is")
    if on < datetime.now(UTC).date():
        problems.append(f"expected a day to come, found {on}")
    if len(before) >= _MOST_RUNS:
        problems.append(f"expected at most {_MOST_RUNS} runs: drop those that ended")
    if problems:
        raise ConfigurationError("the run cannot be planned", problems)
    entry = Entry(
        id=secrets.token_hex(3), what=what, on=on, sites=tuple(sites) or known, planned_at=datetime.now(UTC)
    )
    _write(kit, [*before, entry])
    return entry


def drop(kit: Kit, id_: str) -> Entry:
    """Take a run off the calendar. Raises ConfigurationError."""
    entry = find(kit, id_)
    _write(kit, [each for each in read(kit) if each.id != id_])
    return entry


def note(kit: Kit, id_: str, *, ended: bool) -> None:
    """Note that a planned run begins, or has ended. Raises ConfigurationError."""
    entry, now = find(kit, id_), datetime.now(UTC)
    change = {"ended": now} if ended else {"began": now, "ended": None}
    changed = entry.model_copy(update=change)
    _write(kit, [changed if each.id == id_ else each for each in read(kit)])


@contextmanager
def noted(kit: Kit, id_: str | None) -> Iterator[None]:
    """Note that a run of the calendar runs, and its end, unless it failed; None for one that is not in it.

    Raises ConfigurationError for an id that is not in it.
    """
    if id_ is not None:
        note(kit, id_, ended=False)
    yield
    if id_ is not None:
        note(kit, id_, ended=True)


def find(kit: Kit, id_: str) -> Entry:
    """A run by its id. Raises ConfigurationError."""
    entries = read(kit)
    if found := next((each for each in entries if each.id == id_), None):
        return found
    known = ", ".join(each.id for each in entries) or "none"
    raise ConfigurationError(f"there is no planned run '{id_}'", [f"expected one of {known}"])


def ahead(kit: Kit, site: str) -> tuple[PlannedRun, ...]:
    """The runs that a hospital is in and that have not ended."""
    return tuple(each.message for each in read(kit) if site in each.sites and each.ended is None)


@dataclass(frozen=True)
class Standing:
    """Where a run stands: planned, agreed, ready, running or ended, in words; who agreed, by hospital."""

    entry: Entry
    state: str
    agreed: Mapping[str, Agreed]


def standing(entry: Entry, rows: Sequence[Row]) -> Standing:
    """Where a run stands, by the roster's rows."""
    own = {row.site: row for row in rows if row.site in entry.sites}
    agreed = {
        site: row.entry.about.agreed[entry.id]
        for site, row in own.items()
        if row.entry.about is not None and entry.id in row.entry.about.agreed
    }
    waiting = [site for site in entry.sites if site not in agreed]
    unready = [site for site in entry.sites if site not in own or own[site].open]
    if entry.ended is not None:
        state = f"ended on {entry.ended:%Y-%m-%d}"
    elif entry.began is not None:
        state = f"running since {entry.began:%Y-%m-%d %H:%M} UTC"
    elif waiting:
        state = f"planned: waits for the agreement of {', '.join(waiting)}"
    elif unready:
        state = f"agreed: {', '.join(unready)} not ready"
    else:
        state = "ready"
    return Standing(entry, state, agreed)


def agreements(state: Path) -> dict[str, Agreed]:
    """What a person agreed to at a hospital, by the run's id; nothing of a damaged file."""
    try:
        content = json.loads((state / AGREED).read_bytes())
        return {id_: Agreed.model_validate(said) for id_, said in content.items()}
    except (FileNotFoundError, ValueError, AttributeError, ValidationError):
        return {}


def remember(state: Path, runs: Sequence[PlannedRun]) -> None:
    """Keep at a hospital which planned runs it heard of."""
    state.mkdir(parents=True, exist_ok=True)
    content = [each.model_dump(mode="json") for each in runs]
    write_durably(state / HEARD, json.dumps(content).encode())


def agree(state: Path, id_: str, by: str) -> PlannedRun:
    """Note at a hospital that a person agreed to a run of which it heard. Raises ConfigurationError."""
    try:
        heard = [PlannedRun.model_validate(each) for each in json.loads((state / HEARD).read_bytes())]
    except (FileNotFoundError, ValueError, TypeError, ValidationError):
        heard = []
    run = next((each for each in heard if each.id == id_), None)
    if run is None:
        known = ", ".join(each.id for each in heard) or "no run: start `locum site` first"
        raise ConfigurationError(
            "the agreement cannot be noted", [f"this hospital heard of {known}, and not of '{id_}'"]
        )
    try:
        said = Agreed(by=by, at=datetime.now(UTC))
    except ValidationError as error:
        raise ConfigurationError(
            "the agreement cannot be noted", ["expected a name of 1 to 100 printable characters"]
        ) from error
    content = {name: each.model_dump(mode="json") for name, each in agreements(state).items()}
    content[id_] = said.model_dump(mode="json")
    write_durably(state / AGREED, json.dumps(content).encode())
    return run


def _write(kit: Kit, entries: Sequence[Entry]) -> None:
    content = [each.model_dump(mode="json") for each in entries]
    write_durably(kit.folder / FILE, json.dumps(content).encode())
