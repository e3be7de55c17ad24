"""The store that the distributions carry for `locum demo`: whole, signed, small, and in both wheels."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest

from locum.demo.body import LESION, LIVER
from locum.demo.carried import KEY, MODEL, STORE, unpack
from model_store.errors import ArtefactDamaged, ArtefactUntrusted
from model_store.signing import Signer, TrustedKeys, make_key
from model_store.store import Store

ROOT = Path(__file__).parents[3]


def test_store_is_whole_signed_by_the_key_that_it_names_and_small() -> None:
    store = Store(STORE, trusted=TrustedKeys.load(KEY))
    artefact = store.open(MODEL)

    assert store.versions.names() == [MODEL]
    assert store.signatures.signed_by(artefact) is not None
    # What the lens needs. With a spread a scan would wait for a worker.
    assert "fingerprint.json" in artefact.manifest.files
    assert "spread.json" not in artefact.manifest.files
    assert sum(path.stat().st_size for path in STORE.rglob("*")) < 5e6
    assert not [*STORE.rglob("*.pem")] or [*STORE.rglob("*.pem")] == [KEY]
    assert b"PRIVATE" not in KEY.read_bytes()


def test_classes_of_the_model_are_the_values_of_the_phantoms_masks() -> None:
    task = Store(STORE).open(MODEL).manifest.task

    assert {each.values: each.index for each in task.classes}[(LIVER,)] == LIVER
    assert {each.values: each.index for each in task.classes}[(LESION,)] == LESION


@pytest.mark.parametrize("file", ["pyproject.toml", "service/pyproject.toml"])
def test_wheel_has_the_package_and_every_file_of_the_store(file: str) -> None:
    setuptools = tomllib.loads((ROOT / file).read_text())["tool"]["setuptools"]

    assert "locum*" in setuptools["packages"]["find"]["include"]
    patterns = setuptools["package-data"]["locum.demo"]
    found = {path for pattern in patterns for path in STORE.parent.glob(f"{pattern}/*") if path.is_file()}
    assert found == {path for path in STORE.rglob("*") if path.is_file()}


def test_unpacked_store_opens_only_what_it_or_its_own_key_signed(tmp_path: Path) -> None:
    root, signer, settings = unpack(tmp_path)
    again, *_ = unpack(tmp_path)

    trusted = TrustedKeys.load(Path(settings["LOCUM_TRUSTED_KEYS"]))
    store = Store(again, trusted=trusted, signer=Signer.load(Path(settings["LOCUM_SIGNING_KEY"])))
    assert store.signatures.signed_by(store.open(MODEL)) == signer
    # A job could publish there.
    store.signatures.check_publishes("abdomen.at-heath")
    make_key(tmp_path / "other.pem")
    other = TrustedKeys.load(tmp_path / "other.pub.pem")
    with pytest.raises(ArtefactUntrusted, match=signer):
        Store(root, trusted=other).open(f"{MODEL}@1")


def test_damaged_store_is_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = shutil.copytree(STORE, tmp_path / "carried")
    (weights,) = damaged.rglob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    monkeypatch.setattr("locum.demo.carried.STORE", damaged)

    with pytest.raises(ArtefactDamaged, match=weights.name):
        unpack(tmp_path / "folder")
