"""Signed artefacts: what is opened, what is refused, and why."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from model_store.__main__ import app
from model_store.errors import ArtefactUntrusted, KeyUnusable, PublishRefused
from model_store.signing import SIGNATURE, Signer, TrustedKeys, make_key
from model_store.store import Store
from tests.unit.model_store.test_store import files, model, space


@pytest.fixture
def key(tmp_path: Path) -> Path:
    made = tmp_path / "federation.pem"
    make_key(made)
    return made


@pytest.fixture
def trusted(key: Path) -> TrustedKeys:
    return TrustedKeys.load(key.with_name("federation.pub.pem"))


@pytest.fixture(params=["folder", "bucket"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path | str:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "store" if request.param == "folder" else str(request.getfixturevalue("bucket_url"))


def test_a_version_signed_by_a_trusted_key_opens(root: Path | str, key: Path, trusted: TrustedKeys) -> None:
    published = Store(root, signer=Signer.load(key)).publish(model(), files())
    store = Store(root, trusted=trusted)
    assert store.open("brain") == published
    assert store.by_digest(published.digest) == published
    assert store.signatures.signed_by(published) == make_id(key)


def make_id(key: Path) -> str:
    from model_store.signing import key_id

    return key_id(Signer.load(key).public)


def test_an_unsigned_version_is_refused_until_it_is_signed(
    root: Path | str, key: Path, trusted: TrustedKeys
) -> None:
    published = Store(root).publish(model(), files())
    for reference in ("brain", "brain@1", f"brain@{published.digest}"):
        with pytest.raises(ArtefactUntrusted, match=r"'brain@1' is not signed.*model_store sign"):
            Store(root, trusted=trusted).open(reference)
    with pytest.raises(ArtefactUntrusted):
        Store(root, trusted=trusted).by_digest(published.digest)
    assert Store(root).open("brain") == published
    Store(root, signer=Signer.load(key), trusted=trusted).sign("brain@1")
    assert Store(root, trusted=trusted).open("brain") == published


def test_the_newest_version_is_the_newest_that_is_trusted(
    root: Path | str, key: Path, trusted: TrustedKeys
) -> None:
    signed = Store(root, signer=Signer.load(key)).publish(model(), files("1"))
    Store(root).publish(model(), files("2"))
    store = Store(root, trusted=trusted)
    assert store.open("brain") == signed
    with pytest.raises(ArtefactUntrusted):
        store.open("brain@2")


def test_the_newest_version_opens_without_the_signatures_of_older_ones(
    tmp_path: Path, key: Path, trusted: TrustedKeys
) -> None:
    store = Store(tmp_path / "store", signer=Signer.load(key), trusted=trusted)
    older, newest = store.publish(model(), files("1")), store.publish(model(), files("2"))
    (older.path / SIGNATURE).unlink()
    (older.path / SIGNATURE).mkdir()  # fails to be read
    assert Store(tmp_path / "store", trusted=trusted).open("brain") == newest
    # The signature of a version that this store opened was verified.
    (newest.path / SIGNATURE).unlink()
    (newest.path / SIGNATURE).mkdir()
    assert store.open("brain") == newest


def test_another_key_s_signature_is_refused_by_name(
    root: Path | str, key: Path, trusted: TrustedKeys, tmp_path: Path
) -> None:
    stranger = tmp_path / "stranger.pem"
    make_key(stranger)
    Store(root, signer=Signer.load(stranger)).publish(model(), files())
    with pytest.raises(ArtefactUntrusted, match=rf"{make_id(stranger)}.*trusted are {make_id(key)}"):
        Store(root, trusted=trusted).open("brain")


def test_signing_with_a_key_that_is_not_trusted_does_not_make_a_version_trusted(
    root: Path | str, trusted: TrustedKeys, tmp_path: Path
) -> None:
    stranger = tmp_path / "stranger.pem"
    make_key(stranger)
    Store(root).publish(model(), files())
    store = Store(root, signer=Signer.load(stranger), trusted=trusted)
    store.sign("brain@1")
    with pytest.raises(ArtefactUntrusted, match="not trusted"):
        store.open("brain@1")


@pytest.mark.parametrize("damage", ["of another version", "no JSON", "no base64", "cut"])
def test_a_signature_that_is_not_of_this_content_is_refused(
    tmp_path: Path, key: Path, trusted: TrustedKeys, damage: str
) -> None:
    store = Store(tmp_path / "store", signer=Signer.load(key))
    first, second = store.publish(model(), files("1")), store.publish(model(), files("2"))
    content = json.loads((second.path / SIGNATURE).read_bytes())
    broken = {
        "of another version": json.dumps(content).encode(),
        "no JSON": b"{",
        "no base64": json.dumps({**content, "signature": "?"}).encode(),
        "cut": json.dumps({**content, "signature": base64.b64encode(b"short").decode()}).encode(),
    }[damage]
    (first.path / SIGNATURE).unlink()
    (first.path / SIGNATURE).write_bytes(broken)
    with pytest.raises(ArtefactUntrusted, match=r"'brain@1': (its signature|manifest\.sig)"):
        Store(tmp_path / "store", trusted=trusted).open("brain@1")
    assert Store(tmp_path / "store", trusted=trusted).open("brain@2") == second


def test_a_store_that_could_not_open_what_it_publishes_refuses_to(
    root: Path | str, key: Path, trusted: TrustedKeys, tmp_path: Path
) -> None:
    stranger = tmp_path / "stranger.pem"
    make_key(stranger)
    for signer in (None, Signer.load(stranger)):
        with pytest.raises(PublishRefused, match="LOCUM_SIGNING_KEY"):
            Store(root, signer=signer, trusted=trusted).publish(model(), files())
    Store(root, signer=Signer.load(key), trusted=trusted).publish(model(), files())


def test_keys_that_cannot_be_used_are_named(tmp_path: Path, key: Path) -> None:
    assert key.stat().st_mode & 0o777 == 0o600
    with pytest.raises(KeyUnusable, match="exists already"):
        make_key(key)
    with pytest.raises(KeyUnusable, match=r"pub\.pem: expected a private key"):
        Signer.load(key.with_name("federation.pub.pem"))
    with pytest.raises(KeyUnusable, match="expected a public key in PEM, found none"):
        TrustedKeys.load(key)
    (tmp_path / "empty").mkdir()
    with pytest.raises(KeyUnusable, match="found none"):
        TrustedKeys.load(tmp_path / "empty")
    # A folder holds the keys of several signers.
    make_key(tmp_path / "empty" / "a.pem")
    make_key(tmp_path / "empty" / "b.pem")
    both = TrustedKeys.load(tmp_path / "empty")
    assert Signer.load(tmp_path / "empty" / "a.pem").public in both
    assert Signer.load(tmp_path / "empty" / "b.pem").public in both


def test_the_command_line_makes_a_key_signs_and_verifies(tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, [*arguments])
        return f"{result.exit_code} {result.output} {result.exception or ''}"

    store = str(tmp_path / "store")
    Store(store).publish(model(), files())
    key, public = str(tmp_path / "k.pem"), str(tmp_path / "k.pub.pem")
    assert run("keygen", key).startswith("0 key ")
    assert run("verify", "--store", store, "--trusted-keys", public).startswith("1 refused")
    assert run("sign", "brain", "--key", key, "--store", store).startswith("0 signed brain@1")
    found = run("verify", "--store", store, "--trusted-keys", public)
    assert found.startswith("0 whole")
    assert "signed by" in found


def test_the_command_line_signs_what_a_composite_is_made_of(
    tmp_path: Path, key: Path, trusted: TrustedKeys
) -> None:
    store = Store(tmp_path / "store")
    made = {
        role: store.publish(model(f"space.{role}", part_of="space"), files(role)) for role in ("global", "A")
    }
    whole = store.publish(space(made), {})
    result = CliRunner().invoke(
        app, ["sign", str(whole), "--key", str(key), "--store", str(tmp_path / "store")]
    )
    assert result.exit_code == 0, result.output
    opened = Store(tmp_path / "store", trusted=trusted)
    parts = whole.manifest.references()
    assert len(parts) > 1
    assert {str(opened.open(str(whole)))} | {str(opened.by_digest(part)) for part in parts.values()} == {
        line.split()[1] for line in result.output.splitlines()
    }


def test_a_part_that_another_key_signed_keeps_its_signature(tmp_path: Path, key: Path) -> None:
    store = Store(tmp_path / "store")
    made = {
        role: store.publish(model(f"space.{role}", part_of="space"), files(role)) for role in ("global", "A")
    }
    whole = store.publish(space(made), {})
    make_key(tmp_path / "other.pem")
    first = made["global"]
    Store(tmp_path / "store", signer=Signer.load(tmp_path / "other.pem")).sign(str(first))
    result = CliRunner().invoke(
        app, ["sign", str(whole), "--key", str(key), "--store", str(tmp_path / "store")]
    )
    assert result.exit_code == 0, result.output
    assert f"{first} keeps the signature of another key" in result.output
    theirs = Store(tmp_path / "store", trusted=TrustedKeys.load(tmp_path / "other.pub.pem"))
    assert theirs.open(str(first)).digest == first.digest
    with pytest.raises(ArtefactUntrusted, match="not trusted"):
        theirs.open(str(made["A"]))
