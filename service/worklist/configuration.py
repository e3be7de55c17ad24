"""The YAML file of `LOCUM_WORKLIST`: which work items are taken, and what each code asks for."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from service.validation import HOSPITAL_ID, is_loopback, read_yaml

_Name = Annotated[str, StringConstraints(pattern=HOSPITAL_ID)]
_Code = Annotated[str, StringConstraints(pattern=r"^\S{1,64}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Workitem(_Strict):
    """A Scheduled Workitem Code, and how its items are done: as in `POST /pacs/{name}/segment`."""

    value: _Code
    scheme: _Code
    model: str = Field(max_length=256)
    output: Literal["dicom-seg", "dicom-sr", "dicom-rtstruct"] = "dicom-sr"


class Worklist(_Strict):
    """A worklist, and the PACS from which its scans come and to which results go.

    Attributes:
        pacs: its name in the file of `LOCUM_PACS`, which has the address of the worklist, too.
        hospital: of the scans.
        workitems: what is taken; other items are left to other performers.
        key_file, key_env: the hospital's API key (role operator), read for each request.
    """

    pacs: _Name
    hospital: _Name
    workitems: tuple[Workitem, ...] = Field(min_length=1)
    key_file: Path | None = None
    key_env: str | None = None


class WorklistConfiguration(_Strict):
    """The performer.

    Attributes:
        service: URL of the API.
        ca: file (PEM) of the certificates that sign the API's.
        plain_http: whether an http:// URL of the API is accepted beyond loopback.
        station: the name of this performer in the items, as a code of 99LOCUM.
        worklists: by a name for the log.
        poll_seconds: between two looks at a worklist and at the jobs.
        most: items in progress at a time, of all worklists.
    """

    service: str
    ca: Path | None = None
    plain_http: bool = False
    station: Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]{1,16}$")] = "LOCUM"
    worklists: dict[_Name, Worklist] = Field(min_length=1)
    poll_seconds: float = Field(10, gt=0, le=3600)
    most: int = Field(8, ge=1, le=100)

    @model_validator(mode="after")
    def _consistent(self) -> WorklistConfiguration:
        found = urlsplit(self.service)
        plain = found.scheme == "http" and (self.plain_http or is_loopback(found.hostname or ""))
        if not (found.scheme == "https" or plain) or found.username is not None:
            raise ValueError(
                "service: expected an https:// URL without credentials (http:// on loopback, or with "
                "plain_http)"
            )
        for name, worklist in self.worklists.items():
            if worklist.key_file is not None and worklist.key_env is not None:
                raise ValueError(f"worklists: expected one key of '{name}': key_file or key_env")
            codes = [(each.value, each.scheme) for each in worklist.workitems]
            if len({*codes}) < len(codes):
                raise ValueError(f"worklists: expected each code of '{name}' once")
        return self


@cache
def load_worklist(path: Path) -> WorklistConfiguration:
    """Read the file, once. Raises SettingsInvalid, which names every wrong field without its value."""
    return read_yaml(path, WorklistConfiguration)
