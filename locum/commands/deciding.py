"""Decide what serves a hospital, and keep the connection to a service."""

from __future__ import annotations

import getpass
import os
import sys

from locum.answers import Assignment
from locum.client import Client
from locum.commands.terminal import Terminal
from locum.connection import KEY, URL, Connection, forget, remember
from locum.errors import ScanInvalid, SettingInvalid

_console = Terminal(highlight=False, soft_wrap=True, markup=False)
_ADAPTED = ".at-"


def assign(
    version: str, hospital: str | None, model: str | None, reason: str, actor: str | None, override: bool
) -> None:
    """Assign `name@number`; an adapted version's name has the model and the hospital. Raises LocumError."""
    name, _, number = version.partition("@")
    if not name or not number:
        raise ScanInvalid(f"{version}: expected name@number, such as phantom.at-dune@1")
    parent, adapted, its_hospital = name.rpartition(_ADAPTED)
    model = model or (parent if adapted else name)
    hospital = hospital or (its_hospital if adapted else None)
    if hospital is None:
        raise ScanInvalid(f"{version}: say which hospital it is to serve, with --hospital")
    with Client() as client:
        # The model's own version goes by its number; any other by its name.
        given: int | str = int(number) if name == model and number.isdigit() else version
        _say(
            client.assign(hospital, model, given, reason, actor=actor_of(client, actor), override=override),
            hospital,
        )


def roll_back(hospital: str, model: str, reason: str, actor: str | None) -> None:
    """Return to what served before. Raises LocumError."""
    with Client() as client:
        _say(client.roll_back(hospital, model, reason, actor=actor_of(client, actor)), hospital)


def history(hospital: str, model: str) -> None:
    """Print the decisions, the oldest first, and what serves now. Raises LocumError."""
    with Client() as client:
        for entry in client.history(hospital, model):
            _console.print(_line(entry))
        now = client.serving(hospital, model)
    withdrawn = ", but was withdrawn: assign another" if now.withdrawn else ""
    _console.print(f"now: {now.artefact or 'nothing'} ({now.because}){withdrawn}")
    if now.newer:
        _console.print(f"newer: {now.newer}; it serves once it is assigned")


def login(url: str | None, forgotten: bool) -> None:
    """Check a connection and keep it; with `forgotten`, delete what is kept. Raises LocumError."""
    if forgotten:
        _console.print(f"deleted what {forget(url)} had of {url or 'every service'}")
        return
    url = url or os.environ.get(URL)
    if not url:
        raise SettingInvalid(f"expected the service's address, as an argument or in {URL}")
    connection = Connection.find(url, _key())
    with Client(connection.url, connection.key) as client:
        who = client.session()
    path = remember(connection)
    if connection.in_the_open and connection.key:
        Terminal(stderr=True, markup=False).print(
            f"warning: {connection.url} is no HTTPS: others can read the key"
        )
    _console.print(f"you are {who.actor} ({', '.join(who.roles)}) at {connection.url}; kept in {path}")


def _key() -> str | None:
    """The key, from the environment, a pipe or the keyboard; None for a service without authentication."""
    if given := os.environ.get(KEY):
        return given
    if sys.stdin.isatty():
        return getpass.getpass("API key (empty for a service without): ").strip() or None
    return sys.stdin.readline().strip() or None


def actor_of(client: Client, actor: str | None) -> str | None:
    """Who decides: named, or, where the service knows no caller, the user of this machine."""
    if actor or client.session().authenticated:
        return actor
    return getpass.getuser()


def _say(entry: Assignment, hospital: str) -> None:
    _console.print(f"{hospital} is served {entry.artefact}, by {entry.actor}: {entry.reason}")


def _line(entry: Assignment) -> str:
    marks = [f"restores {entry.restores}"] if entry.restores else []
    marks += ["override"] if entry.override else []
    marks += ["by default"] if entry.by_default else []
    mark = f" ({', '.join(marks)})" if marks else ""
    when = f"{entry.at:%Y-%m-%d %H:%M}"
    return f"{entry.sequence:>3}  {when}  {entry.artefact}  {entry.actor}: {entry.reason}{mark}"
