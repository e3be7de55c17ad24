"""The sets that hospitals are left out of."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from training.data.cases import Federation
from training.data.federation import load_federation
from training.phantom import SCANNERS, write_federation
from training.tasks import template

PHANTOM = "phantom"


@dataclass(frozen=True)
class SetOf:
    """A set's size of images, and fields of IopFlConfig."""

    size: int
    method: Mapping[str, Any] = field(default_factory=dict)


def federation_of(
    set_: str, data: Path, folder: Path, size: int, phantoms: tuple[int, int]
) -> Federation[Any]:
    """The set at a size, from the folder `data`; the phantom is written to `folder` first.

    `phantoms`: how many drawn scanners, and patients of each.
    """
    root = data / set_
    if set_ == PHANTOM:
        root = folder / "data"
        if not root.exists():
            sites = tuple(SCANNERS)[: phantoms[0]]
            # Another run may need it at the same time: it must be whole when it appears.
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=folder) as unfinished:
                write_federation(Path(unfinished) / "data", sites, phantoms[1], size)
                with suppress(OSError):
                    (Path(unfinished) / "data").rename(root)
    federation = load_federation(root, None if set_ == PHANTOM else template(set_))
    return replace(federation, task=federation.task.model_copy(update={"size": (size, size)}))
