"""Kits of a consortium, made with NVFLARE's certificates."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509

from training.errors import ConfigurationError, TrainingError
from training.network import authority, kits
from training.network.authority import Authority
from training.network.cell import Cell
from training.network.kits import KIT_FILE, Kit, provision, renew, revoke

ADDRESS = "localhost:8002"


@pytest.fixture(scope="module")
def provisioned(tmp_path_factory):
    """Kits, made once: each costs a private key."""
    root = tmp_path_factory.mktemp("kits")
    provision(root, "hearts", ADDRESS, ["birch", "cedar"])
    return root


@pytest.fixture
def root(provisioned, tmp_path):
    return shutil.copytree(provisioned, tmp_path / "kits")


def name_of(kit: Kit) -> str:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    certificate = x509.load_pem_x509_certificate(kit.certificate.read_bytes())
    return str(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def test_certificate_of_a_kit_has_the_hospitals_name(root):
    assert name_of(Kit.open(root / "birch", server=False)) == "birch"
    assert name_of(Kit.open(root / "server", server=True)) == "server"
    assert Kit.open(root / "server", server=True).content.sites == ("birch", "cedar")


def test_later_hospital_gets_a_certificate_of_the_same_authority(root):
    before = (root / "birch" / "client.crt").read_bytes()
    made = provision(root, "hearts", ADDRESS, ["birch", "elm"])
    assert list(made) == ["elm"]
    assert (root / "birch" / "client.crt").read_bytes() == before
    assert (root / "elm" / "rootCA.pem").read_bytes() == (root / "birch" / "rootCA.pem").read_bytes()


def test_private_keys_of_hospitals_are_only_in_their_kits(root):
    state = json.loads((root / ".authority/hearts/state/cert.json").read_text())
    assert set(state["birch"]) == {"cert"}
    assert (root / "birch" / "client.key").stat().st_mode & 0o077 == 0
    assert (root / ".authority").stat().st_mode & 0o077 == 0


@pytest.fixture
def later(monkeypatch):
    """Let so many days pass, for kits, authorities and their certificates."""

    def let_pass(days):
        class Later(datetime):
            @classmethod
            def now(cls, tz=None):
                return super().now(tz) + timedelta(days=days)

        for module in (kits, authority):
            monkeypatch.setattr(module, "datetime", Later)
        return Later.now(UTC)

    return let_pass


def verified(kit: Kit, root: bytes, now: datetime) -> None:
    """As the other side's TLS does, with its copy of the authority's certificate."""
    from nvflare.lighter import utils

    certificate = x509.load_pem_x509_certificate(kit.certificate.read_bytes())
    utils.verify_cert_chain(certificate, [], x509.load_pem_x509_certificate(root), now + timedelta(days=1))


def test_renewed_certificates_have_the_same_keys_and_an_authority_that_outlives_them(root, tmp_path, later):
    server, birch = Kit.open(root / "server", server=True), Kit.open(root / "birch", server=False)
    old, key = birch.authority.read_bytes(), birch.key.read_bytes()
    for kit in (server, birch):
        kit.check()
        assert kit.warning() is None
    shutil.move(root / "cedar", tmp_path / "at-cedar")
    now = later(340)
    assert "is valid until" in birch.warning()
    assert "ask the operator to renew it" in birch.warning()
    assert renew(root) == {
        "server": root / "server",
        "birch": root / "birch",
        "cedar": root / "renewed" / "cedar",
    }
    assert sorted(path.name for path in (root / "renewed/cedar").iterdir()) == ["client.crt", "rootCA.pem"]
    for path in (root / "renewed/cedar").iterdir():
        shutil.copy(path, tmp_path / "at-cedar")
    renewed = (server, birch, Kit.open(tmp_path / "at-cedar", server=False))
    for kit in renewed:
        kit.check()
        assert kit.warning() is None
        # Old and new kits believe each other until the old ones end.
        verified(kit, old, now)
    assert birch.key.read_bytes() == key
    for _ in range(12):
        now = later((now - datetime.now(UTC)).days + 300)
        renew(root)
    for kit in renewed[:2]:
        kit.check()
        verified(kit, server.authority.read_bytes(), now)
    assert set(provision(root, "hearts", ADDRESS, ["elm"])) == {"elm"}


def test_authority_of_an_earlier_release_is_extended_after_its_end(root, later, monkeypatch):
    monkeypatch.setattr(authority, "_AUTHORITY_DAYS", 360)
    fresh = root.parent / "earlier"
    provision(fresh, "hearts", ADDRESS, ["birch"])
    monkeypatch.undo()
    later(400)
    birch = Kit.open(fresh / "birch", server=False)
    with pytest.raises(TrainingError, match=r"client.crt is not valid now: .* ask the operator to renew"):
        birch.check()
    with pytest.raises(TrainingError, match=r"server.crt is not valid now: .* renew --kits .*earlier` makes"):
        Kit.open(fresh / "server", server=True).check()
    renew(fresh)
    for kit in (birch, Kit.open(fresh / "server", server=True)):
        kit.check()


@pytest.mark.parametrize(
    ("file", "other", "said"),
    [
        ("client.key", "cedar/client.key", "is not the key of client.crt"),
        ("rootCA.pem", "others.pem", "was not signed by rootCA.pem"),
        ("client.crt", "cedar/kit.json", "is damaged"),
    ],
)
def test_kit_whose_parts_do_not_belong_together_is_one_sentence(root, file, other, said):
    if other == "others.pem":
        (root / other).write_bytes(Authority.open(root / "others.json", "hearts").certificate)
    shutil.copy(root / other, root / "birch" / file)
    with pytest.raises(TrainingError, match=said):
        Kit.open(root / "birch", server=False).check()
    with pytest.raises(TrainingError, match=said):
        Cell(Kit.open(root / "birch", server=False), lambda *_: b"").start()


def test_revoked_hospital_is_rejected_by_its_earlier_certificates_too(root):
    first = serial_of(Kit.open(root / "cedar", server=False))
    renew(root, ["cedar"])
    second = serial_of(Kit.open(root / "cedar", server=False))
    assert revoke(root, "cedar") == second
    assert Kit.open(root / "server", server=True).revoked() == {first, second}
    with pytest.raises(ConfigurationError, match="'cedar' has no certificate to renew"):
        renew(root, ["cedar"])


def serial_of(kit: Kit) -> int:
    return x509.load_pem_x509_certificate(kit.certificate.read_bytes()).serial_number


def test_revoked_certificate_is_listed_and_the_name_can_be_provisioned_again(root):
    serial = revoke(root, "cedar")
    assert Kit.open(root / "server", server=True).revoked() == {serial}
    assert Kit.open(root / "server", server=True).content.sites == ("birch",)
    assert Kit.open(root / "server", server=True).revoked_sites() == {"cedar"}
    assert list(provision(root, "hearts", ADDRESS, ["cedar"])) == ["cedar"]
    assert Kit.open(root / "server", server=True).revoked_sites() == set()
    assert revoke(root, "cedar") != serial
    with pytest.raises(ConfigurationError, match="'cedar' cannot be revoked"):
        revoke(root, "cedar")


@pytest.mark.parametrize("site", ["server", "localhost", "a.b", "../x", "", "global", "x" * 64])
def test_name_that_a_cell_or_a_path_cannot_have_is_rejected(tmp_path, site):
    with pytest.raises(ConfigurationError, match="cannot be made"):
        provision(tmp_path, "hearts", ADDRESS, [site])


@pytest.mark.parametrize("site", ["FLARE", "Flare", "Server", "SERVER"])
def test_name_that_differs_from_the_operators_in_case_only_is_rejected(tmp_path, site):
    with pytest.raises(ConfigurationError, match=f"'{site}': the name is reserved for the operator"):
        provision(tmp_path, "hearts", "flare:8002", [site])


def test_names_of_hospitals_that_differ_in_case_only_are_rejected(root, tmp_path):
    with pytest.raises(ConfigurationError, match="'Elm': differs from 'elm' in case only"):
        provision(tmp_path / "new", "hearts", ADDRESS, ["elm", "Elm"])
    with pytest.raises(ConfigurationError, match="'Birch': differs from 'birch' in case only"):
        provision(root, "hearts", ADDRESS, ["Birch"])


@pytest.mark.parametrize(
    "address", ["", "host:0", "host:70000", "a b", "host:x", "http://host", "[::1]:8002"]
)
def test_address_that_is_none_is_rejected(tmp_path, address):
    with pytest.raises(ConfigurationError, match="address"):
        provision(tmp_path, "hearts", address, ["birch"])


def test_other_consortium_in_the_folder_is_rejected(root):
    with pytest.raises(ConfigurationError, match="another consortium"):
        provision(root, "lungs", ADDRESS, ["elm"])


def test_kit_of_the_other_side_or_a_damaged_one_is_rejected(root):
    with pytest.raises(ConfigurationError, match="expected a kit of a hospital"):
        Kit.open(root / "server", server=False)
    (root / "birch" / "client.key").unlink()
    with pytest.raises(ConfigurationError, match=r"missing: client\.key"):
        Kit.open(root / "birch", server=False)
    (root / "cedar" / KIT_FILE).write_text("{}")
    with pytest.raises(ConfigurationError, match="is not a kit"):
        Kit.open(root / "cedar", server=False)
