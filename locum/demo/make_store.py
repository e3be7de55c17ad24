"""`python -m locum.demo.make_store`: train the store that `locum demo` serves, and sign it.

Three phantom hospitals train a small U-Net with `training.federate`, as a person would; the same command goes
on after an interruption. What it writes is committed (`locum/demo/store`) and part of the distribution: a
model store, and in it the public key of the pair that signed it. The private key is thrown away.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from locum.demo.body import SHAPE
from locum.demo.body_scans import MEMBERS, REGIONS, BodyScan, nifti_bytes
from locum.demo.carried import KEY, MODEL, STORE
from model_store.signing import Signer, make_key
from model_store.store import Store
from personalization.options.presets import SPREAD

PATIENTS = 8
SEED = 0
TASK: dict[str, Any] = {
    "name": "abdomen",
    "labels": {name: list(values) for name, values in REGIONS.items()},
    "plane": "axial",
    "normalisation": {"scope": "volume", "method": "zscore"},
    "size": [SHAPE[1], SHAPE[0]],
    "modality": "CT",
}
# A width of 6 makes weights and graph of 2.2 MB together. Nothing is flipped: a liver is at the right.
TRAINING: dict[str, Any] = {
    "rounds": 20,
    "width": 6,
    "batch_size": 4,
    "local_steps": 25,
    "learning_rate": 0.004,
    "augment": False,
    "intensity": 0.4,
}


def write_federation(root: Path) -> Path:
    """Write the members' folders for `training.federate`: task.yaml, images/, masks/ and cases.csv."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "task.yaml").write_text(yaml.safe_dump(TASK, sort_keys=False), encoding="utf-8")
    for site in MEMBERS:
        rows = ["file,patient,split"]
        for part in ("images", "masks"):
            (root / site / part).mkdir(parents=True, exist_ok=True)
        for number in range(PATIENTS):
            name = f"{site}-{number + 1:02d}.nii.gz"
            rows.append(f"{name},{name.partition('.')[0]},")
            mask = root / site / "masks" / name
            if mask.exists():
                continue
            scan = BodyScan.at(site, number, SEED)
            (root / site / "images" / name).write_bytes(nifti_bytes(scan.voxels))
            mask.write_bytes(nifti_bytes(scan.mask))
        (root / site / "cases.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return root


def main(
    work: Annotated[Path, typer.Option(help="Folder for the federation and its run.")] = Path(
        ".locum/demo-store"
    ),
    out: Annotated[Path, typer.Option(help="The store to write; one that is there is replaced.")] = STORE,
) -> None:
    """Train the store that `locum demo` serves, and sign it."""
    data = write_federation(work / "federation")
    config = work / "training.yaml"
    config.write_text(yaml.safe_dump({"method": TRAINING}), encoding="utf-8")
    trained = work / "store"
    federate = [
        *(sys.executable, "-m", "training.federate", "--method", "fedavg", "--data", str(data)),
        *("--name", MODEL, "--out", str(trained), "--config", str(config), "--seed", str(SEED)),
        *("--consent", "all", "--run", str(work / "run"), "--resume"),
    ]
    if subprocess.run(federate, check=False).returncode:
        raise typer.Exit(1)
    if out.exists():
        shutil.rmtree(out)
    source = Store(trained).open(MODEL)
    # The dose of one scan is a worker's job. Without the spread the lens is all, and answers at once.
    files = {name: source.read(name) for name in source.manifest.files if name != SPREAD}
    with tempfile.TemporaryDirectory() as folder:
        # Only this store is signed with it.
        private = Path(folder) / "signing.pem"
        made = make_key(private)
        store = Store(out, signer=Signer.load(private))
        store.publish(source.manifest.model_copy(update={"files": {}}), files)
        shutil.copy(private.with_name("signing.pub.pem"), out / KEY.name)
    typer.echo(f"{out}: {MODEL}, signed by the key {made}, which is thrown away")


if __name__ == "__main__":
    typer.run(main)
