from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from service.__main__ import app
from service.app import FILES, create_app
from service.errors import SettingsInvalid
from service.runtime.embedded_worker import worker_environment
from service.settings import Settings, ignored_variables, read_settings


def test_settings_have_local_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("LOCUM_STORE", "LOCUM_STATE_DIR", "LOCUM_DATABASE_URL", "LOCUM_REDIS_URL", "LOCUM_HOST"):
        monkeypatch.delenv(name, raising=False)
    settings = Settings()
    assert settings.host == "127.0.0.1"
    assert settings.store == tmp_path / ".locum/store"
    assert settings.resolved_database_url == f"sqlite:///{tmp_path}/.locum/state/locum.db"
    assert settings.redis_url is None


def test_relative_path_is_resolved_when_settings_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCUM_STORE", "artefacts")
    settings = Settings()
    monkeypatch.chdir("/")
    assert settings.store == tmp_path / "artefacts"


def test_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("LOCUM_STORE", "LOCUM_REDIS_URL", "LOCUM_PORT"):
        monkeypatch.setenv(name, "")
    settings = Settings()
    assert (settings.store, settings.redis_url, settings.port) == (tmp_path / ".locum/store", None, 8000)


def test_argument_overrides_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCUM_PORT", "9000")
    assert Settings().port == 9000
    assert Settings(port=9001).port == 9001


def test_settings_repr_hides_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCUM_DATABASE_URL", "postgresql+psycopg://locum:open-sesame@db/locum")
    monkeypatch.setenv("LOCUM_REDIS_URL", "redis://:open-sesame@redis/0")
    settings = Settings()
    assert "open-sesame" not in repr(settings)
    assert "open-sesame" in settings.resolved_database_url


@pytest.mark.parametrize(("name", "value"), [("port", 70000), ("inference_slots", 0), ("device", "tpu")])
def test_invalid_setting_is_rejected_by_name(name: str, value: object) -> None:
    with pytest.raises(ValidationError, match=name):
        Settings(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FILES)
def test_api_with_a_wrong_file_of_a_setting_ends_with_the_name_of_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    (tmp_path / "wrong.yaml").write_text("- a")
    monkeypatch.setenv(f"LOCUM_{name.upper()}", str(tmp_path / "wrong.yaml"))
    with pytest.raises(SystemExit, match=rf"LOCUM_{name.upper()}: {tmp_path}/wrong\.yaml: "):
        create_app()


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Settings().port = 1


def test_command_with_a_wrong_setting_names_the_variable_without_its_value() -> None:
    wrong = {"LOCUM_DEVICE": "open-sesame", "LOCUM_INFERENCE_SLOTS": "0", "COLUMNS": "200"}
    ended = CliRunner().invoke(app, env=wrong)
    assert ended.exit_code == 2
    assert "LOCUM_DEVICE: Value error, expected auto, cpu, openvino, cuda, or cuda:N" in ended.output
    assert "LOCUM_INFERENCE_SLOTS: Input should be greater than 0" in ended.output
    assert "open-sesame" not in ended.output


def test_create_app_with_a_wrong_setting_exits_with_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCUM_PORT", "tcp://10.0.0.1:8000")
    with pytest.raises(SystemExit, match=r"^locum: LOCUM_PORT: Input should be a valid integer") as ended:
        create_app()
    assert "10.0.0.1" not in str(ended.value)


def test_unknown_variable_is_reported_with_the_closest_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("LOCUM_INFERENCE_SLOT", "LOCUM_WHATEVER", "LOCUM_PORT", "locum_host"):
        monkeypatch.setenv(name, "1")
    lines = [line for line in ignored_variables() if "SLOT" in line or "WHATEVER" in line]
    assert lines == [
        "LOCUM_INFERENCE_SLOT is ignored: no such setting, but LOCUM_INFERENCE_SLOTS",
        "LOCUM_WHATEVER is ignored: no such setting",
    ]
    assert not any("LOCUM_PORT" in line or "locum_host" in line for line in ignored_variables())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "locum.example"])
def test_only_loopback_is_served_without_authentication(host: str) -> None:
    ended = CliRunner().invoke(app, ["--host", host], env={"LOCUM_AUTH": "none", "COLUMNS": "400"})
    assert ended.exit_code == 2
    assert "LOCUM_HOST" in ended.output
    assert "Set LOCUM_AUTH=keys, and create the first key: python -m service keys create" in ended.output
    assert Settings(host=host, auth="keys").host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_is_served_without_authentication(host: str) -> None:
    assert Settings(host=host).auth == "none"


def test_state_folder_is_closed_to_other_users(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    folder.chmod(0o755)
    Settings(state_dir=folder).make_state_dir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750


@pytest.fixture
def volume() -> Iterator[Path]:
    """A folder of root's, seen by another user: a volume as Kubernetes mounts it."""
    if os.geteuid() != 0:
        pytest.skip("only root has a folder that another user cannot close")
    with TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o2777)
        os.seteuid(10001)
        try:
            yield folder
        finally:
            os.seteuid(0)


def test_open_state_folder_of_another_user_is_rejected(volume: Path) -> None:
    with pytest.raises(SettingsInvalid, match=f"LOCUM_STATE_DIR: expected .*, found {volume} "):
        Settings(state_dir=volume).make_state_dir()


def test_state_folder_is_made_inside_a_folder_of_another_user(volume: Path) -> None:
    folder = volume / "state"
    for _ in range(2):
        Settings(state_dir=folder).make_state_dir()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_closed_state_folder_of_another_user_is_accepted(volume: Path) -> None:
    os.seteuid(0)
    volume.chmod(0o2770)
    os.seteuid(10001)
    Settings(state_dir=volume).make_state_dir()


def test_variables_of_the_client_are_no_misspelt_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCUM_URL", "LOCUM_KEY", "LOCUM_HOSPITAL", "LOCUM_PROT"):
        monkeypatch.setenv(name, "x")
    lines = ignored_variables()
    assert not any(name in line for line in lines for name in ("LOCUM_URL", "LOCUM_KEY", "LOCUM_HOSPITAL"))
    assert any(line.startswith("LOCUM_PROT is ignored") for line in lines)


def test_webhooks_are_read_hidden_and_refused_without_their_values(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    secret = "whsec_b3Blbi1zZXNhbWUtb3Blbi1zZXNhbWUtb3Blbi1zZXNhbWU="
    hook = {"url": "https://chat.example/open-sesame", "secret": secret}
    monkeypatch.setenv("LOCUM_WATCH_WEBHOOKS", json.dumps([hook]))
    settings = Settings()
    assert [(each.url, each.secret) for each in settings.webhooks] == [(hook["url"], secret)]
    assert "sesame" not in repr(settings) + repr(settings.webhooks)
    # A worker is started with the same.
    monkeypatch.setenv("LOCUM_WATCH_WEBHOOKS", worker_environment(settings)["LOCUM_WATCH_WEBHOOKS"])
    assert Settings().webhooks == settings.webhooks
    monkeypatch.setenv("LOCUM_WATCH_WEBHOOKS", json.dumps([hook | {"url": "http://open-sesame.example"}]))
    with pytest.raises(
        SettingsInvalid, match=r"^LOCUM_WATCH_WEBHOOKS: .*webhook 1: expected https"
    ) as refused:
        read_settings()
    assert "sesame" not in str(refused.value)
