"""Make, renew and revoke the kits of a consortium, and see its roster.

python -m training.network provision --out KITS --address flare.example.org:8002 --site birch --site cedar
python -m training.network renew --kits KITS
python -m training.network revoke --kits KITS --site cedar
python -m training.network roster --kits KITS
python -m training.network listen --kits KITS
python -m training.network page --kits KITS
python -m training.network calendar --kits KITS --add 'hearts, 25 rounds' --on 2026-12-05
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from training.exit_codes import FAILED

Made = TypeVar("Made")
app = typer.Typer(
    help="Make, renew and revoke the kits of a consortium, and see its roster.",
    no_args_is_help=True,
    add_completion=False,
)
console = Console(highlight=False, soft_wrap=True)
_COLUMNS = ("hospital", "heard", "locum", "device", "free", "patients", "certificate", "state")


@app.command()
def provision(
    address: Annotated[str, typer.Option(help="HOST:PORT at which the hospitals reach the operator.")],
    site: Annotated[list[str], typer.Option(help="A hospital's name; may be repeated.")],
    out: Annotated[Path, typer.Option(help="Folder for the kits; a consortium's own.")] = Path(".locum/kits"),
    project: Annotated[str, typer.Option(help="The consortium's name.")] = "locum",
) -> None:
    """Make the certificate authority and the kits, or kits for further hospitals."""
    from training.network import kits

    made = _run(lambda: kits.provision(out, project, address, site))
    if not made:
        console.print("every hospital has a kit already; nothing was made (`renew` renews certificates)")
    width = max((len(str(folder)) for folder in made.values()), default=0)
    for name, folder in made.items():
        whom = "the operator's own" if name == kits.SERVER else f"hand it over to {name} by a safe channel"
        console.print(f"  {folder!s:{width}}  {whom}")
    console.print(
        f"Keep {out / '.authority'} secret: it signs certificates. Delete a kit here once it is handed over."
    )


KitsFolder = Annotated[Path, typer.Option("--kits", help="The folder of the kits.")]


@app.command()
def renew(
    kits_folder: KitsFolder = Path(".locum/kits"),
    site: Annotated[
        list[str] | None, typer.Option(help="A hospital, may be repeated; all when left out.")
    ] = None,
) -> None:
    """Make the certificates of the operator and the hospitals again, for the keys that they have."""
    from training.network import kits
    from training.network.authority import KIT_DAYS

    made = _run(lambda: kits.renew(kits_folder, site or ()))
    width = max(len(str(folder)) for folder in made.values())
    for name, folder in made.items():
        whom = (
            "the operator's own; the next start of a run reads it"
            if name == kits.SERVER
            else f"hand client.crt and rootCA.pem to {name}, which replaces them in its kit"
        )
        console.print(f"  {folder!s:{width}}  {whom}")
    console.print(f"Valid for {KIT_DAYS} days. Certificates have no secret; the private keys stay.")


@app.command()
def revoke(
    site: Annotated[str, typer.Option(help="The hospital to exclude.")],
    kits_folder: KitsFolder = Path(".locum/kits"),
) -> None:
    """Revoke a hospital's certificate; a running federation rejects it at its next request."""
    from training.network import kits

    serial = _run(lambda: kits.revoke(kits_folder, site))
    console.print(f"revoked the certificate of {site}, serial number {serial:x}")


@app.command()
def roster(
    kits_folder: KitsFolder = Path(".locum/kits"),
    mail: Annotated[str | None, typer.Option(help="Write the mail to this hospital: its open steps.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per hospital, by lines.")] = False,
) -> None:
    """Show what was last heard of each hospital, and what is missing there."""
    from training.network import kits
    from training.network.roster import mail as mail_to
    from training.network.roster import rows

    own = _run(lambda: kits.Kit.open(kits_folder / kits.SERVER, server=True))
    found = rows(own, _run(lambda: kits.certificates(kits_folder)))
    if mail is not None:
        row = next((each for each in found if each.site == mail), None)
        if row is None:
            raise typer.BadParameter(
                f"--mail: expected one of {', '.join(own.content.sites)}, found '{mail}'"
            )
        typer.echo(mail_to(row, own))
    elif as_json:
        for each in found:
            typer.echo(json.dumps(each.to_json()))
    else:
        table = Table(*_COLUMNS, box=None, header_style="dim")
        for each in found:
            table.add_row(*map(escape, each.cells()))
        console.print(table)


@app.command()
def listen(
    kits_folder: KitsFolder = Path(".locum/kits"),
    at: Annotated[
        str | None, typer.Option("--listen", help="HOST:PORT to listen on, if not the kit's address.")
    ] = None,
) -> None:
    """Hear the hospitals between runs, until Ctrl-C: the roster then says who is here and ready."""
    from threading import Event

    from training.network import calendar, kits
    from training.network.operator import Listener
    from training.network.roster import Roster, between_runs

    def hear() -> None:
        own = kits.Kit.open(kits_folder / kits.SERVER, server=True)
        with Listener(own, at) as listener:
            known = Roster(own)

            def say(line: str) -> None:
                console.print(line, markup=False)

            def keep_out(site: str | None, why: str) -> None:
                if said := known.kept_out(site, why):
                    say(said)

            handle = between_runs(known, own.content.sites, partial(calendar.ahead, own), say)
            listener.serve(handle, lambda _: None, keep_out)
            console.print(f"listening on {at or own.content.address}; `roster` shows who was heard")
            Event().wait()

    try:
        _run(hear)
    except KeyboardInterrupt:
        console.print("stopped")


@app.command()
def page(
    kits_folder: KitsFolder = Path(".locum/kits"),
    at: Annotated[
        str, typer.Option(help="HOST:PORT of the page. It has no TLS: leave it on this machine.")
    ] = "127.0.0.1:8003",
) -> None:
    """Serve the roster and the calendar as a page behind a key, until Ctrl-C, beside `listen` or a run."""
    from training.network import kits
    from training.network.page import KEY_FILE, serve

    console.print(
        f"http://{at} asks for a password, of any user: it is in {kits_folder / kits.SERVER / KEY_FILE}"
    )
    try:
        _run(lambda: serve(kits_folder, at))
    except KeyboardInterrupt:
        console.print("stopped")


@app.command(name="calendar")
def planned_runs(
    kits_folder: KitsFolder = Path(".locum/kits"),
    add: Annotated[str | None, typer.Option(help="Plan a run: what it is, in a line.")] = None,
    on: Annotated[datetime | None, typer.Option(formats=["%Y-%m-%d"], help="With --add: the day.")] = None,
    site: Annotated[
        list[str] | None, typer.Option(help="With --add: a hospital, may be repeated; all when left out.")
    ] = None,
    drop: Annotated[str | None, typer.Option(help="Take the run of this id off the calendar.")] = None,
) -> None:
    """Show the runs that are planned, agreed, ready, running and ended; plan one, or drop it."""
    from training.network import calendar, kits
    from training.network.roster import rows

    own = _run(lambda: kits.Kit.open(kits_folder / kits.SERVER, server=True))
    if (add is None) != (on is None):
        raise typer.BadParameter("--add and --on: expected both, or neither")
    if drop is not None:
        dropped = _run(lambda: calendar.drop(own, drop))
        console.print(f"dropped {dropped.id}: {dropped.what}")
    if add is not None and on is not None:
        made = _run(lambda: calendar.add(own, add, on.date(), site or ()))
        console.print(
            f"planned {made.id}: each hospital hears of it when it connects, and a person there agrees with "
            f"`locum site agree {made.id}`. `train … --planned {made.id}` notes its beginning and its end"
        )
    heard = rows(own, _run(lambda: kits.certificates(kits_folder)))
    table = Table("id", "on", "what", "agreed", "state", box=None, header_style="dim")
    for each in _run(lambda: calendar.read(own)):
        found = calendar.standing(each, heard)
        who = ", ".join(f"{name} ({said.by})" for name, said in found.agreed.items())
        table.add_row(*map(escape, (each.id, str(each.on), each.what, who, found.state)))
    console.print(table)


def _run(action: Callable[[], Made]) -> Made:
    # It imports the readers of scans, which help does not need.
    from training.errors import TrainingError

    try:
        return action()
    except TrainingError as error:
        Console(stderr=True).print(f"error {error}", highlight=False, soft_wrap=True, markup=False)
        raise typer.Exit(FAILED) from None


if __name__ == "__main__":
    app()
