"""The PACS that the operator configured: the YAML file of `LOCUM_PACS`, by name.

    main:
      url: https://pacs.north.example/dicom-web     # or qido, wado and stow, one URL each
      hospitals: [north]
      username: locum
      password_file: /run/secrets/pacs
      ca: /etc/ssl/hospital.pem
      store: true

This file is the allow-list: a client names a PACS, never a URL. Secrets are in files or variables that it
names, and are read at each use, so that a rotated one is picked up.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from service.errors import PacsReadOnly, PacsRefused, PacsUnknown, SettingsInvalid
from service.validation import HOSPITAL_ID, is_loopback, place, reason

_Hospital = Annotated[str, StringConstraints(pattern=HOSPITAL_ID)]


def _checked(url: str) -> str:
    found = urlsplit(url)
    if found.scheme not in ("http", "https") or not found.hostname:
        raise ValueError("expected an https:// URL")
    if found.username is not None or found.query or found.fragment:
        raise ValueError("expected a URL without credentials, query and fragment; set username and password")
    return url.rstrip("/")


Url = Annotated[str, AfterValidator(_checked)]


class PacsServer(BaseModel):
    """One PACS.

    Attributes:
        url: the root of DICOMweb; `qido`, `wado` and `stow` where a service has another.
        ups: the root of UPS-RS, for `python -m service.worklist`; by default `url`.
        hospitals: ids of those that may use it.
        username: of HTTP's basic authentication; its password is in `password_file` or `password_env`.
        token_file, token_env: a bearer token instead.
        ca: file of the certificates (PEM) that sign the server's; the system's otherwise.
        client_certificate, client_key: files (PEM) that prove Locum to the server.
        plain_http: whether http:// is accepted beyond loopback.
        store: whether segmentations may be stored there.
        timeout_seconds: to connect, and between two pieces of an answer.
        answer_seconds: for a whole answer: a list with all its pages, a series, or a confirmation.
        first_retry_seconds: the first pause after a failure; each is as long as all the time before it, up to
            ten minutes.
        give_up_hours: after the request, when a job fails that could not reach the PACS.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: Url | None = None
    qido: Url | None = None
    wado: Url | None = None
    stow: Url | None = None
    ups: Url | None = None
    hospitals: tuple[_Hospital, ...] = Field(min_length=1)
    username: str | None = None
    password_file: Path | None = None
    password_env: str | None = None
    token_file: Path | None = None
    token_env: str | None = None
    ca: Path | None = None
    client_certificate: Path | None = None
    client_key: Path | None = None
    plain_http: bool = False
    store: bool = False
    timeout_seconds: float = Field(60, gt=0, le=3600)
    answer_seconds: float = Field(1800, gt=0, le=6 * 3600)
    first_retry_seconds: float = Field(5, gt=0, le=600)
    give_up_hours: float = Field(24, ge=0, le=24 * 14)

    @model_validator(mode="after")
    def _consistent(self) -> PacsServer:
        urls = [self.qido_url, self.wado_url, *([self.stow_url] if self.store else [])]
        if not all(urls):
            raise ValueError("expected url, or qido, wado and (to store) stow")
        open_text = [url for url in (*urls, self.ups) if url and not _is_private(url)]
        if open_text and not self.plain_http:
            raise ValueError("http:// sends patients' data in the clear: use https://, or set plain_http")
        passwords = [one for one in (self.password_file, self.password_env) if one]
        tokens = [one for one in (self.token_file, self.token_env) if one]
        if len(passwords) > 1 or len(tokens) > 1 or (tokens and self.username):
            raise ValueError("expected one password or one token")
        if bool(passwords) != bool(self.username):
            raise ValueError("username is set with password_file or password_env, or neither is")
        if self.client_key is not None and self.client_certificate is None:
            raise ValueError("client_key needs client_certificate")
        return self

    @property
    def qido_url(self) -> str | None:
        """Where it is searched."""
        return self.qido or self.url

    @property
    def wado_url(self) -> str | None:
        """From where instances are fetched."""
        return self.wado or self.url

    @property
    def stow_url(self) -> str | None:
        """Where instances are stored."""
        return self.stow or self.url

    @property
    def ups_url(self) -> str | None:
        """Where its worklist is."""
        return self.ups or self.url

    def password(self) -> str | None:
        """The password; None without a username. Raises PacsRefused."""
        return _secret(self.password_file, self.password_env)

    def token(self) -> str | None:
        """The bearer token, if there is one. Raises PacsRefused."""
        return _secret(self.token_file, self.token_env)


@cache
def load_servers(path: Path) -> dict[str, PacsServer]:
    """Read the file, once. Raises SettingsInvalid, which names every wrong field without its value."""
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsInvalid(f"{path} cannot be read ({type(error).__name__})") from error
    except yaml.YAMLError as error:
        raise SettingsInvalid(f"{path} is not YAML{_line(error)}") from None
    if not isinstance(content, dict) or not content:
        raise SettingsInvalid(f"{path}: expected a PACS by its name, such as `main: {{url: https://…}}`")
    found, wrong = {}, []
    for name, fields in content.items():
        try:
            found[_Name(name=name).name] = PacsServer.model_validate(fields)
        except ValidationError as error:
            wrong += [
                f"{place((str(name), *item['loc']))}: {reason(item, PacsServer.model_fields)}"
                for item in error.errors(include_input=False, include_url=False)
            ]
    if wrong:
        raise SettingsInvalid(f"{path}: {'; '.join(wrong)}")
    return found


def server_for(path: Path | None, name: str, hospital: str) -> PacsServer:
    """The PACS of this name, for one of its hospitals. Raises PacsUnknown."""
    found = servers_of(path, hospital)
    if name not in found:
        raise PacsUnknown(
            f"no PACS {name!r} is configured for hospital {hospital!r}: GET /pacs lists those that "
            "there are; the operator adds one to the file of LOCUM_PACS"
        )
    return found[name]


def require_storing(path: Path | None, name: str, hospital: str) -> None:
    """Reject a PACS in which no segmentation may be stored. Raises PacsUnknown, PacsReadOnly."""
    if not server_for(path, name, hospital).store:
        raise PacsReadOnly(
            f"PACS '{name}' is configured without `store`, and nothing is stored there: leave that out of "
            "the request; the operator decides"
        )


def servers_of(path: Path | None, hospital: str) -> dict[str, PacsServer]:
    """The PACS that a hospital may use, by name."""
    found = {} if path is None else load_servers(path)
    return {name: server for name, server in found.items() if hospital in server.hospitals}


class _Name(BaseModel):
    name: _Hospital


def _is_private(url: str) -> bool:
    found = urlsplit(url)
    return found.scheme == "https" or is_loopback(found.hostname or "")


def _line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f" (line {mark.line + 1})"


def _secret(file: Path | None, variable: str | None) -> str | None:
    if file is not None:
        try:
            found = file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise PacsRefused(f"the secret in {file} cannot be read ({type(error).__name__})") from None
    elif variable is not None:
        found = os.environ.get(variable, "")
    else:
        return None
    if not found:
        raise PacsRefused(f"the secret in {file or variable} is empty: the operator sets it")
    return found
