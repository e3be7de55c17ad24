"""The text fields that come with a scan, read from a form that is streamed past the framework."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from service.inference.picks import Routing
from service.problems import invalid
from service.routes.parameters import HOSPITAL_ID
from service.wording import reason

Options = TypeVar("Options", bound="ScanOptions")


class ScanOptions(BaseModel):
    """What every route for scans takes. An empty field counts as left out."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = Field(
        None,
        max_length=256,
        description="`name`, `name@3` or `name@sha256:…`; may be left out when one model is offered.",
    )
    hospital: str | None = Field(
        None,
        pattern=HOSPITAL_ID,
        description="Who asks. Decides the version (by assignment) and, for a member, the personalization.",
    )
    site: str | None = Field(
        None, max_length=256, description="With `member`: which site; the hospital's own by default."
    )
    routing: Routing | None = Field(
        None,
        description="With an ssf-pool, how a volume picks its entries: the `scan` as a whole (the default), "
        "by the mean of its slices' queries, or `slice` by slice.",
    )
    guard: Literal["warn", "refuse"] = Field(
        "warn", description="What happens to a scan that does not look like the task: a warning, or a 422."
    )


def read_options(kind: type[Options], fields: dict[str, str]) -> Options:
    """Check the form's text fields. Raises Problem 422 naming every field that is wrong."""
    try:
        return kind.model_validate({name: value for name, value in fields.items() if value != ""})
    except ValidationError as error:
        entries = [
            # The name of an unknown field is the client's own text: kept short and printable.
            {
                "field": ascii(".".join(map(str, item["loc"])))[1:-1][:64],
                "reason": reason(item, kind.model_fields),
            }
            for item in error.errors(include_input=False, include_url=False)
        ]
        raise invalid(entries) from None


def request_body(kind: type[ScanOptions]) -> dict[str, Any]:
    """The form, for the API's description."""
    scan = {"type": "string", "format": "binary", "description": "PNG, TIFF, .nii or .nii.gz."}
    properties = {"scan": scan, **kind.model_json_schema()["properties"]}
    form = {"type": "object", "required": ["scan"], "properties": properties, "additionalProperties": False}
    return {"required": True, "content": {"multipart/form-data": {"schema": form}}}
