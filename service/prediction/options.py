"""The text fields of `POST /segment` and `POST /classify`, validated from the streamed form."""

from __future__ import annotations

from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from model_store.scan import list_formats
from model_store.volume import CHANNEL_NAME
from personalization.options.presets import AUTO, FOR_SCANS, SCAN_FALLBACK, ScanPreset, describe
from service.catalog.network import Personalization
from service.errors import RequestInvalid
from service.inference.pool import PickUnit
from service.kinds import ADAPTING_ITSELF, SCAN_BY_JOB
from service.prediction.dicom_seg import SegmentationType
from service.prediction.output import Output, Voxels
from service.validation import DICOM_SERIES, HOSPITAL_ID, PRINTABLE, reason

Options = TypeVar("Options", bound="ScanOptions")

SERIES: Final = (
    "The series that is the scan, in an upload with several of DICOM: its number, its Series Instance UID or "
    "the end of that from a dot on. Without it, several series are refused with a list of them, and "
    "localizers beside one volume are left out."
)


class ScanOptions(BaseModel):
    """What every route for scans takes. An empty field counts as left out."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = Field(
        None,
        max_length=256,
        description="`name`, `name@3` or `name@sha256:…`; optional when one model is offered.",
    )
    hospital: str | None = Field(
        None,
        pattern=HOSPITAL_ID,
        description="The hospital of the scan. It decides the version (by assignment) "
        "and, for a member, the personalization.",
    )
    site: str | None = Field(
        None, max_length=256, description="With `member`: the site; the hospital's own by default."
    )
    series: str | None = Field(None, pattern=DICOM_SERIES, max_length=64, description=SERIES)
    routing: PickUnit | None = Field(
        None,
        description="With an ssf-pool, how a volume picks its entries: as a whole `scan` "
        "(the default), by the mean of its slices' queries, or `slice` by "
        "slice.",
    )
    guard: Literal["auto", "warn", "refuse"] = Field(
        "auto",
        description="Response to a scan that does not look like the task: `warn`; `refuse` with 422; or "
        "`auto`: refuse a scan that no training scan resembles in kind (an image among volumes, another "
        "modality, a size or spacing far outside training), and warn of others. Notes on the scan's "
        "container and header refuse nothing.",
    )
    scanner: str | None = Field(
        None,
        pattern=PRINTABLE,
        max_length=100,
        description="The scanner's name among the hospital's answers; by default maker, model and station of "
        "a DICOM header. Never a patient's name.",
    )


def read_options(kind: type[Options], fields: dict[str, str]) -> Options:
    """Check the form's text fields. Raises RequestInvalid naming every field that is wrong."""
    try:
        return kind.model_validate({name: value for name, value in fields.items() if value != ""})
    except ValidationError as error:
        entries = [
            # The name of an unknown field is the client's own text, so keep it short and printable.
            {
                "field": ascii(".".join(map(str, item["loc"])))[1:-1][:64],
                "reason": reason(item, kind.model_fields),
            }
            for item in error.errors(include_input=False, include_url=False)
        ]
        raise RequestInvalid(entries) from None


_BINARY: Final = {"type": "string", "format": "binary"}
CHANNEL_FIELDS: Final = {rf"^scan\.{CHANNEL_NAME[1:]}": _BINARY}


def scan_field(*, by_channel: bool) -> dict[str, str]:
    """The form's `scan`, for the API's description; `by_channel`: it may come as a field for each channel."""
    channels = (
        " For a task of volumes with several channels, a field `scan.CHANNEL` for each in its place, by the "
        "channel's name (`scan.T1`, `scan.FLAIR`), or a .zip with a file for each."
    )
    return {**_BINARY, "description": f"{list_formats('or')}.{channels if by_channel else ''}"}


def request_body(kind: type[ScanOptions]) -> dict[str, Any]:
    """The form, for the API's description."""
    by_channel = kind is SegmentOptions
    form: dict[str, Any] = {"patternProperties": CHANNEL_FIELDS} if by_channel else {"required": ["scan"]}
    properties = {"scan": scan_field(by_channel=by_channel), **kind.model_json_schema()["properties"]}
    form = {"type": "object", "properties": properties, **form, "additionalProperties": False}
    return {"required": True, "content": {"multipart/form-data": {"schema": form}}}


class SegmentOptions(ScanOptions):
    """How a scan is to be segmented."""

    personalization: Literal["auto", "global", "member", "hospital", "scan"] = Field(
        "auto",
        description="The model. `auto`: the version adapted to the hospital and assigned to it, else the "
        "member model of its site (of a routing-space, where it beat the global model on the site's "
        "validation patients), else the global model. `hospital`: the first of these, or a refusal. "
        f"`scan`: one adapted to this scan alone: of {ADAPTING_ITSELF} at once, and its `auto`; of a model "
        f"with a fingerprint by a lens of the scan; of {SCAN_BY_JOB} at once with the default preset, where "
        "it has a graph for that and the scan is not too large, else by a job.",
    )
    preset: ScanPreset | None = Field(
        None,
        description=f"With `scan` of {SCAN_BY_JOB}: what is done with the scan. `{AUTO}`, the default: a "
        "lens, where the model has a fingerprint, then the `ladder`, with a dose that grows with the scan's "
        "distance from what is usual between the federation's members; where neither is known, "
        f"`{SCAN_FALLBACK}`. By name: {describe(FOR_SCANS)}.",
    )
    shape_weight: FiniteFloat | None = Field(
        None,
        ge=0,
        le=10,
        description="With `scan` of a routing-space: weight of the shape loss, which "
        "expects one compact target. Use 0 for vessels and for several "
        "targets.",
    )
    output: Output | None = Field(
        None,
        description="`nifti` is the default for a volume, `png` for an image; `nrrd` is for volumes, and "
        "`multipart` has the report (`params`, JSON) and the mask (`image`, NRRD or PNG) as parts. "
        "`dicom-seg` and `dicom-sr` (a report of the volumes) are for scans that are sent as DICOM, and "
        "tasks with codes for their labels; `dicom-rtstruct` (contours) is for volumes that are sent as "
        "DICOM.",
    )
    compress: bool | None = Field(
        None,
        description="With `nrrd` and `multipart`: whether the mask's voxels are gzipped, `true` by default. "
        "Some web viewers need `false`.",
    )
    voxels: Voxels | None = Field(
        None,
        description="With `nifti`, `nrrd` and `png`: the mask's `labels` (the default), or the `uncertainty` "
        "of each voxel on the same grid: the normalised entropy of its class probabilities in percent, 0 "
        "certain and 100 no knowledge. Not a probability of error.",
    )
    segmentation_type: SegmentationType | None = Field(
        None,
        description="The SEG of output=dicom-seg, to which dicom-sr refers: `binary` (the default) has a "
        "bit per voxel and segment, `labelmap` is for viewers that know it, `fractional` says 0 or 1 of each "
        "voxel is occupied.",
    )
    tolerance_mm: FiniteFloat | None = Field(
        None,
        ge=0,
        le=10,
        description="With `dicom-rtstruct`: how far in millimetres a contour may be from the edges of the "
        "mask's pixels, so that it has fewer points. By default it is on them, and gives the mask back voxel "
        "for voxel.",
    )


class ClassifyOptions(ScanOptions):
    """How a scan is to be classified."""

    personalization: Personalization | Literal["scan"] = Field(
        "auto",
        description="The model. `auto`: the version adapted to the hospital and assigned to it, else the "
        "member model of its site, else that of its cluster, else the global model; where there are several "
        "clusters and the hospital is in none, a refusal. `hospital`: the first of these, or a refusal. "
        f"`scan`: of {ADAPTING_ITSELF}, and its `auto`: adapted to this scan by itself.",
    )
    cluster: str | None = Field(
        None, max_length=64, description="With `cluster`: its name; the hospital's cluster by default."
    )
