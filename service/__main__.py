"""`python -m service`: run the API with an embedded Redis and worker, or a command on the database.

What serves is imported when it is needed: `--help` needs none of it.
"""

from __future__ import annotations

import gc
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from service.settings import Settings


class _Commands(TyperGroup):
    """The commands of `service.commands.NAME`, imported when one of them is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Their names."""
        return self._imported().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name."""
        return self._imported().get_command(ctx, cmd_name)

    def _imported(self) -> TyperGroup:
        found = typer.main.get_command(import_module(f"service.commands.{self.name}").app)
        assert isinstance(found, TyperGroup)
        return found


app = typer.Typer(add_completion=False)
for name, words in {
    "keys": "Create, list, rotate and revoke API keys.",
    "audit": "Verify, export and shorten the audit trail.",
}.items():
    app.add_typer(typer.Typer(cls=_Commands, no_args_is_help=True), name=name, help=words)


@app.callback(invoke_without_command=True)
def serve(
    context: typer.Context,
    store: Annotated[Path | None, typer.Option(help="Folder of the published artefacts.")] = None,
    port: Annotated[int | None, typer.Option(help="TCP port; 0 takes a free one.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; loopback by default.")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Database, embedded Redis, spool.")] = None,
    worker: Annotated[
        bool | None, typer.Option("--worker/--no-worker", help="Start a worker beside the API.")
    ] = None,
) -> None:
    """Serve until Ctrl-C, or run a command. Every other setting is an environment variable LOCUM_<NAME>."""
    given: dict[str, Any] = {
        "store": store,
        "port": port,
        "host": host,
        "state_dir": state_dir,
        "embedded_worker": worker,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    if context.invoked_subcommand is not None:
        # Read by the command: its help needs no settings.
        context.obj = lambda **more: _settings({**chosen, **more})
        return
    settings = _settings(chosen)
    from service import server

    server.run(settings)


def _settings(given: dict[str, Any]) -> Settings:
    # Half a million objects are made, and none is garbage: looking for some takes a quarter of the start.
    gc.disable()
    from service import server
    from service.errors import SettingsInvalid

    gc.freeze()
    gc.enable()
    try:
        return server.settings_of(given)
    except SettingsInvalid as error:
        raise typer.BadParameter(str(error)) from None


@app.command()
def doctor(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per part, by lines.")] = False,
) -> None:
    """Say what this machine has, what will be used, and what is wrong; end with 1 if anything is."""
    from service.commands.doctor import report

    raise typer.Exit(int(report(context.obj(), as_json)))


_BackupFolder = Annotated[
    Path, typer.Argument(help="Folder of the backup, or its file, which ends with .tar.", show_default=False)
]


@app.command()
def backup(
    context: typer.Context,
    folder: _BackupFolder,
    store: Annotated[Path | None, typer.Option(help="Folder of the published artefacts.")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="The service's state folder.")] = None,
) -> None:
    """Copy database, files and store into a new folder, or one FILE.tar, while the service runs.

    It has scans of patients, and is for its owner alone. Ends with status 1 where something could not be
    copied.
    """
    from service.backup import printing

    given = {"store": store, "state_dir": state_dir}
    settings = context.obj(**{name: value for name, value in given.items() if value is not None})
    raise typer.Exit(printing.backup(settings, folder))


@app.command()
def restore(
    context: typer.Context,
    folder: _BackupFolder,
    to: Annotated[Path | None, typer.Option(help="The new state folder.")] = None,
    store: Annotated[Path | None, typer.Option(help="The new folder of the published artefacts.")] = None,
    rehearse: Annotated[
        bool,
        typer.Option(
            "--rehearse",
            help="Restore into a temporary folder, verify all of it, and answer a scan of each hospital.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per finding, by lines.")] = False,
) -> None:
    """Restore a backup into an empty state folder and store, or rehearse that.

    Ends with status 1 where anything is wrong.
    """
    from service.backup import printing

    if rehearse:
        raise typer.Exit(printing.rehearse(context.obj(), folder, as_json))
    if to is None or store is None:
        raise typer.BadParameter("expected --to and --store, where the backup is restored, or --rehearse")
    raise typer.Exit(printing.restore(context.obj(state_dir=to, store=store), folder))


if __name__ == "__main__":
    app()
