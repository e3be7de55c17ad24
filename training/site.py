"""Take part in a federation over the network, as one hospital.

    python -m training.site --data FOLDER --kit KIT --policy policy.yaml
    python -m training.site check             what this machine has, what is wrong, what to do

FOLDER is this hospital's own, laid out as one site of a federation (images/ and masks/, or a folder per
class). It is checked before the hospital joins; nothing in it leaves but what the policy allows. Ctrl-C
leaves the run; the same command joins again.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

_OTHERS = "`check`, before the first run, says what is wrong here; `agree` agrees to a planned run."
_NEEDED, _LOCAL = "This hospital", "On this machine"


def site(
    data: Annotated[Path, typer.Option(help="This hospital's folder.", rich_help_panel=_NEEDED)],
    kit: Annotated[
        Path,
        typer.Option(help="The kit that the operator made for this hospital.", rich_help_panel=_NEEDED),
    ],
    policy: Annotated[
        Path,
        typer.Option(
            help="policy.yaml: what may leave; read again before every step.", rich_help_panel=_NEEDED
        ),
    ],
    state: Annotated[
        Path | None,
        typer.Option(help="Folder for memories and logs; KIT/state by default.", rich_help_panel=_LOCAL),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(
            help="This hospital's model store, for a method that adapts a backbone.", rich_help_panel=_LOCAL
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu, cuda or cuda:N of this hospital; the operator's by default.", rich_help_panel=_LOCAL
        ),
    ] = None,
    stay: Annotated[
        bool, typer.Option("--stay", help="Wait for the next run after one.", rich_help_panel=_LOCAL)
    ] = False,
) -> None:
    """Take part in a federation over the network, as one hospital."""
    # It imports torch, which help does not need.
    from training.network.joining import take_part

    take_part(data, kit, policy, state or kit / "state", store, device, stay)


def check(
    kit: Annotated[
        Path | None, typer.Option(help="The kit that the operator made for this hospital.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="This hospital's folder.")] = None,
    policy: Annotated[Path | None, typer.Option(help="policy.yaml.")] = None,
    state: Annotated[Path | None, typer.Option(help="Folder for memories and logs.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N of this hospital.")] = None,
    task: Annotated[
        Path | None, typer.Option(help="The operator's task.yaml: reads the data by it, and trains one step.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per part, by lines.")] = False,
) -> None:
    """Say what this hospital's machine has and what is wrong; end with 1 if anything is. It joins no run."""
    from training.config import DEVICE
    from training.network.checking import Hospital, report

    if device is not None and re.match(DEVICE, device) is None:
        raise typer.BadParameter(f"--device: expected cpu, cuda or cuda:N, found {device!r}")
    raise typer.Exit(int(report(Hospital(kit, data, policy, state, device, task), as_json)))


def agree(
    run: Annotated[str, typer.Argument(help="Id of the planned run, as `site` prints it.")],
    by: Annotated[str, typer.Option(help="Who agrees.")],
    kit: Annotated[Path, typer.Option(help="The kit that the operator made for this hospital.")],
    state: Annotated[Path | None, typer.Option(help="Folder of `site`; KIT/state by default.")] = None,
) -> None:
    """Agree to a planned run, as this hospital; the operator's calendar hears it when `site` connects."""
    from training.errors import TrainingError
    from training.network import calendar

    try:
        planned = calendar.agree(state or kit / "state", run, by)
    except TrainingError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(
        f"{by} agreed to {run}, {planned.what}, on {planned.on}; the operator hears it when `locum site` "
        "connects"
    )


def main() -> None:
    """Run `site`, `check` or `agree`: commands of their own, so that the options of `site` stay required."""
    app = typer.Typer(add_completion=False)
    own: dict[str, Callable[..., None]] = {"check": check, "agree": agree}
    if sys.argv[1:2] and sys.argv[1] in own:
        # A group, although of one command: usage has its name, too.
        app.callback()(lambda: None)
        app.command()(own[sys.argv[1]])
    else:
        app.command(epilog=_OTHERS)(site)
    app()


if __name__ == "__main__":
    main()
