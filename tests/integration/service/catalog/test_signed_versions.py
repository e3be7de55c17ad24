"""A service with trusted keys opens what they signed, and signs what its own jobs publish."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from model_store.artefact import Artefact
from model_store.signing import Signer, TrustedKeys, make_key
from model_store.store import Store
from service.errors import SettingsInvalid
from service.settings import read_settings
from service.worker.runner import run_job
from tests.helpers.service.routing_federation import outside_scans
from tests.helpers.service.workplace import opened
from tests.integration.service.conftest import Api, png


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the keys `federation` and `hospital`, and their public keys alone in `trusted`."""
    folder = tmp_path_factory.mktemp("keys")
    (folder / "trusted").mkdir()
    for name in ("federation", "hospital"):
        make_key(folder / f"{name}.pem")
        shutil.copy(folder / f"{name}.pub.pem", folder / "trusted")
    return folder


def test_only_signed_versions_are_served(
    tmp_path: Path,
    keys: Path,
    start: Callable[..., Api],
    publish_bright: Callable[..., Artefact],
    picture: NDArray[np.uint8],
) -> None:
    publish_bright(tmp_path / "store")
    api = start(tmp_path / "store", trusted_keys=keys / "trusted")
    answer = api.segment(png(picture), model="bright")
    assert (answer.status_code, answer.json()["type"].rsplit(":", 1)[-1]) == (503, "artefact-untrusted")
    assert "model_store sign" in answer.json()["detail"]
    assert listed(api) == (None, True)
    Store(tmp_path / "store", signer=Signer.load(keys / "federation.pem")).sign("bright@1")
    assert api.segment(png(picture), model="bright").status_code == 200
    assert listed(api) == (1, False)
    # A version that is planted beside it is not the newest.
    publish_bright(tmp_path / "store", at=50)
    answer = api.segment(png(picture), model="bright")
    assert answer.headers["Locum-Model"] == "bright@1"
    assert api.segment(png(picture), model="bright@2").status_code == 503
    assert listed(api) == (1, True)


def listed(api: Api) -> tuple[int | None, bool]:
    """The latest version of `bright` in the list of models, and whether one lacks a signature."""
    (model,) = api.client.get("/models").json()["models"]
    return model["latest"] and model["latest"]["version"], model["untrusted"]


@pytest.mark.parametrize(("auth", "level"), [("none", "INFO"), ("keys", "WARNING")])
@pytest.mark.parametrize("signed", [True, False])
def test_service_says_once_at_its_start_what_it_trusts(
    signed: bool,
    auth: str,
    level: str,
    tmp_path: Path,
    keys: Path,
    start: Callable[..., Api],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A warning where others reach the service; where it is one person's, a line at the default level."""
    trust = {"trusted_keys": keys / "trusted", "signing_key": keys / "hospital.pem"} if signed else {}
    caplog.set_level("INFO", "locum.service")
    start(tmp_path / "store", auth=auth, **trust)
    said = [(r.levelname, r.message) for r in caplog.records if "TRUSTED_KEYS" in r.message]
    expected = (
        f"LOCUM_TRUSTED_KEYS is not set: everyone who can write to the store {tmp_path / 'store'} is trusted "
        "with what hospitals are served"
    )
    assert said == ([] if signed else [(level, expected)])


def test_a_job_signs_its_candidate_with_the_service_s_key(
    tmp_path: Path, keys: Path, routing_store: Path
) -> None:
    with opened(tmp_path, routing_store) as place:
        federation = Store(place.settings.store, signer=Signer.load(keys / "federation.pem"))
        for name in federation.versions.names():
            federation.sign(name)
        chosen = {"trusted_keys": keys / "trusted", "signing_key": keys / "hospital.pem"}
        place.settings = place.settings.model_copy(update=chosen)
        job = place.adaptation(place.cohort(outside_scans(2)))
        run_job(job, place.settings)
        assert place.job(job).state == "succeeded", place.job(job).reason
        hospital = TrustedKeys.load(keys / "hospital.pub.pem")
        Store(place.settings.store, trusted=hospital).open("organ.at-dune")


def test_a_job_that_cannot_sign_fails_with_the_setting_s_name(
    tmp_path: Path, keys: Path, routing_store: Path
) -> None:
    with opened(tmp_path, routing_store) as place:
        federation = Store(place.settings.store, signer=Signer.load(keys / "federation.pem"))
        for name in federation.versions.names():
            federation.sign(name)
        place.settings = place.settings.model_copy(update={"trusted_keys": keys / "trusted"})
        job = place.adaptation(place.cohort(outside_scans(2)))
        run_job(job, place.settings)
        assert place.job(job).state == "failed"
        assert "LOCUM_SIGNING_KEY" in place.job(job).reason


def test_a_key_that_cannot_be_used_is_named_when_the_process_starts(keys: Path) -> None:
    with pytest.raises(SettingsInvalid, match=r"LOCUM_TRUSTED_KEYS.*expected a public key"):
        read_settings(trusted_keys=keys / "hospital.pem")
    with pytest.raises(SettingsInvalid, match=r"LOCUM_SIGNING_KEY.*expected a private key"):
        read_settings(signing_key=keys / "hospital.pub.pem")
