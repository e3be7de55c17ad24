"""Make, renew and revoke the kits of a consortium.

python -m training.network provision --out KITS --address flare.example.org:8002 --site birch --site cedar
python -m training.network renew --kits KITS
python -m training.network revoke --kits KITS --site cedar
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from training.exit_codes import FAILED

Made = TypeVar("Made")
app = typer.Typer(
    help="Make, renew and revoke the kits of a consortium.", no_args_is_help=True, add_completion=False
)
console = Console(highlight=False, soft_wrap=True)


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
