"""`/monailabel`: the interface of MONAI Label, for 3D Slicer's and OHIF's plugins, off by default.

    GET  /info/                                 models, and the options that a viewer shows as boxes
    PUT  /session/, /datastore/                 send a scan; GET and DELETE it
    POST /infer/{model}                         segment a scan that was sent, or one in the form
    PUT  /datastore/label                       correct the answer to a scan that was sent
    POST /activelearning/{strategy}             the least sure of the answered scans, as long as it is kept
    GET  /train/, /auth/ and others             404 with the reason; a viewer takes 200 for a running training

Clients take nothing but 200 for success. A scan belongs to its caller: see `service.viewers.scans`. `image`
is a text that scans are found by, never a path, and `params` are options of `POST /segment` alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Final, Literal

from anyio import to_thread
from fastapi import APIRouter, Depends, Path, Query, Request
from pydantic import BaseModel, Field, JsonValue
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from service import corrections
from service.context import ServiceContext
from service.corrections import CorrectionView, Sent
from service.errors import RequestInvalid
from service.http.audit import Audited, AuditedRoute, concerns
from service.http.dependencies import AsReader, caller
from service.http.problems import Problem, problem_responses
from service.http.semantics import path_below_prefix
from service.http.uploads.multipart import missing
from service.http.uploads.receive import UploadForm, UploadLimits, receive
from service.inference.pipeline import Stopwatch
from service.jobs import submission
from service.prediction.options import SegmentOptions, read_options
from service.prediction.output import SegmentationReport
from service.routes.corrections import desk_of, keep_and_send
from service.routes.scan_request import receive_scan, scan_in
from service.routes.segment import answer_or_start, result_within
from service.runtime.spool import ScanFile, Upload
from service.settings import scan_limits
from service.validation import MOST_ENTRIES
from service.viewers import info
from service.viewers.scans import ViewerScan, ViewerScans, examine

PREFIX: Final = "/monailabel"
router = APIRouter(prefix=PREFIX, tags=["monailabel"], route_class=AuditedRoute)

_BINARY = {"schema": {"type": "string", "format": "binary"}}

# Without its slash a path is none of these: `/session` is Locum's own.
_SERVED: Final = ("info", "session", "infer", "datastore", "activelearning", "train", "auth", "model")

# From the names of viewers to `SegmentOptions.output`. Without one, or with `all`, both parts are sent.
_OUTPUTS: Final = {
    "all": "multipart",
    "image": "nrrd",
    "json": "json",
    "dicom_seg": "dicom-seg",
    "dicom_rtstruct": "dicom-rtstruct",
}
_NRRD: Final = ("multipart", "nrrd")

# The members of `params` that are options of Locum. The route has the model and the output.
_OPTIONS: Final = tuple(
    # A kept scan is of one series.
    name
    for name in SegmentOptions.model_fields
    if name not in ("model", "output", "compress", "voxels", "series")
)

# The format of a mask that plugins ask for; there is no other.
_EXTENSION, _TYPE = ".nrrd", "uint8"

_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]
_REASONS: Final = {
    "auth": "No one signs in here: send an API key as a bearer token, or let a proxy add it",
    "train": "No training runs here: a hospital adapts a model by POST /hospitals/{hospital}/adaptations",
    "datastore/label": "A mask that was sent is in a cohort of corrections, and not fetched here",
    "model": "Models are published into the store, and neither sent nor fetched here",
    "scoring": "Locum scores nothing here",
    "batch": "Locum segments one scan per request",
}


class ViewerInfo(BaseModel):
    """What a viewer may choose, in MONAI Label's form. There is no member `config` on purpose."""

    name: str
    description: str
    version: str
    labels: list[str] = Field(description="Labels of all models, without the background.")
    models: dict[str, Any] = Field(
        description="By name: `type`, `labels` (name -> mask value), `dimension`, `description`, and lists "
        "of values for `params` in `config`, of which the first is the default."
    )
    trainers: dict[str, Any]
    strategies: dict[str, Any]
    scoring: dict[str, Any]
    train_stats: dict[str, Any]
    datastore: dict[str, Any] = Field(description="The number of the caller's scans.")


class ViewerScanInfo(BaseModel):
    """A scan that a viewer sent. The service gives no path, and no name that the client gave its file."""

    name: str = Field(description="The id of the session.")
    path: Literal[""] = ""
    image: str = Field("", description="The `image` that the scan was sent as.")
    meta: dict[str, Any] = Field(description="Format, bytes, digest, and the UID of a DICOM series.")
    create_ts: int
    last_access_ts: int
    expiry: int = Field(description="Seconds after the last use until it is deleted.")


class ViewerSession(BaseModel):
    """A scan that waits for requests on it."""

    session_id: str
    session_info: ViewerScanInfo


class StoredLabel(BaseModel):
    """The corrected scan, and what the answer that was corrected is found by."""

    image: str
    label: str = Field(description="Id of the request that was answered.")


class StoredImage(BaseModel):
    """The name by which a scan is found."""

    image: str


ViewerScanId = Annotated[str, Path(max_length=64, description="Id of a session.")]
ImageName = Annotated[
    str, Query(max_length=256, description="The viewer's own name for a scan, or a SeriesInstanceUID.")
]
_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "params": {
                            "type": "string",
                            "description": "JSON object; its members that Locum knows are "
                            + ", ".join(f"`{name}`" for name in _OPTIONS)
                            + ".",
                        },
                        "file": {"type": "string", "format": "binary", "description": "The scan."},
                    },
                }
            }
        },
    }
}


def _form_with(field: str) -> dict[str, Any]:
    properties = {field: {"type": "string", "format": "binary"}}
    form = {"type": "object", "required": [field], "properties": properties}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form}}}}


@router.get("/info/", responses=problem_responses(422))
def get_info(context: AsReader) -> ViewerInfo:
    """Describe the models and options in MONAI Label's form.

    Everything below `/monailabel` is off by default: LOCUM_MONAILABEL turns it on.
    """
    found = info.describe(context.store, context.database)
    return ViewerInfo(**found, datastore=_statistics(_scans(context).all()))


@router.put(
    "/session/",
    responses=problem_responses(408, 413, 415, 422, 503, 507),
    openapi_extra=_form_with("files"),
)
async def put_session(
    request: Request,
    context: Annotated[AsReader, Audited("scan.stored")],
    expiry: Annotated[int, Query(description="Seconds until it is deleted; the service's default if 0.")] = 0,
) -> ViewerSession:
    """Send a scan for later requests. Several files are one DICOM series."""
    with await receive_scan(request, context, Stopwatch(), "files") as form:
        kept = await _keep(request, context, scan_in(form, "files"), None, max(expiry, 0))
    return _session(kept)


@router.get("/session/{session}", responses=problem_responses(404, 422))
def get_viewer_session(
    context: AsReader,
    session: ViewerScanId,
    update_ts: Annotated[
        bool, Query(description="Whether this is a use, which puts the expiry off.")
    ] = False,
) -> ViewerSession:
    """Return a session, while it has not expired."""
    return _session(_scans(context).get(session, use=update_ts))


@router.delete("/session/{session}", responses=problem_responses(404, 422))
def delete_viewer_session(
    context: Annotated[AsReader, Audited("scan.deleted")], request: Request, session: ViewerScanId
) -> ViewerSession:
    """Delete a session and its scan now."""
    scans = _scans(context)
    found = scans.get(session)
    concerns(request, scan=found.sha256)
    scans.remove(found)
    return _session(found)


@router.get("/datastore/", responses=problem_responses(422))
def list_images(
    context: Annotated[AsReader, Audited("scan.listed")],
    output: Annotated[Literal["stats", "train", "all"], Query()] = "stats",
) -> Any:
    """List the caller's scans, or count them. There are no labels, and nothing to train on."""
    scans = _scans(context).all()
    if output == "train":
        return []
    if output == "stats":
        return _statistics(scans)
    objects = {}
    for scan in scans:
        name = scan.image or scan.id
        shown = {"ts": int(scan.created_at.timestamp()), "name": name}
        objects[name] = {"image": {"ext": "", "info": shown}, "labels": {}}
    return {"name": "Locum", "description": "Scans of this caller, until they expire", "objects": objects}


@router.put(
    "/datastore/",
    responses=problem_responses(408, 413, 415, 422, 503, 507),
    openapi_extra=_form_with("file"),
)
@router.put(
    "/datastore/image",
    responses=problem_responses(408, 413, 415, 422, 503, 507),
    openapi_extra=_form_with("file"),
)
async def put_image(
    request: Request, context: Annotated[AsReader, Audited("scan.stored")], image: ImageName = ""
) -> StoredImage:
    """Send a scan under a name; it replaces an earlier one, and expires as a session does."""
    with await receive_scan(request, context, Stopwatch(), "file") as form:
        kept = await _keep(request, context, scan_in(form, "file"), image or None)
    return StoredImage(image=kept.image or kept.id)


@router.delete("/datastore/", responses=problem_responses(404, 422))
@router.delete("/datastore/image", responses=problem_responses(404, 422))
def delete_image(
    context: Annotated[AsReader, Audited("scan.deleted")],
    request: Request,
    image: Annotated[str, Query(alias="id", max_length=256)],
) -> dict[str, Any]:
    """Delete a scan now."""
    scans = _scans(context)
    found = scans.find(image)
    concerns(request, scan=found.sha256)
    scans.remove(found)
    return {}


@router.get(
    "/datastore/image",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": _BINARY}}, **problem_responses(404, 422)},
)
def get_image(
    context: Annotated[AsReader, Audited("scan.read")], request: Request, image: ImageName
) -> Response:
    """Return a scan that the caller sent, as it was sent."""
    found = _scans(context).find(image)
    concerns(request, scan=found.sha256)
    return Response(found.read(), media_type="application/octet-stream")


@router.put(
    "/datastore/label",
    responses=problem_responses(404, 408, 409, 413, 415, 422, 503, 507),
    openapi_extra=_form_with("label"),
)
async def put_label(
    request: Request,
    context: Annotated[AsReader, Audited("correction.stored")],
    image: ImageName,
    tag: Annotated[str, Query(max_length=64, description="Not used: a mask is final.")] = "",  # noqa: ARG001
) -> StoredLabel:
    """Correct the newest answer to a scan that the caller sent, by the mask in `label`.

    `label_info` in `params` names the values of the mask, which the viewer numbers by itself.
    """
    limits = UploadLimits(context.settings.max_upload_bytes)
    with await receive(request, context.settings.spool, limits, file_fields=("label",)) as form:
        if "label" not in form.files:
            raise missing("label")
        params = _params(form)
        async with context.admission.turn():
            stored = await to_thread.run_sync(_correct, context, image, form.files["label"], params)
    concerns(request, hospital=stored.hospital, version=stored.version, mask=stored.mask)
    return StoredLabel(image=image, label=stored.request)


@router.post("/activelearning/{strategy}", responses=problem_responses(422))
def choose_next(
    context: AsReader,
    strategy: Annotated[str, Path(max_length=256)],  # noqa: ARG001 - every strategy has the same answer
) -> dict[str, Any]:
    """Return the scan to look at first: of those answered and not corrected yet, the least sure.

    Empty where there is none. A hospital's answers are ranked once it has 20 others.
    """
    found = corrections.next_viewed(desk_of(context))
    if found is None:
        return {}
    name = found.image or found.id
    return {"id": name, "name": name, "path": "", "checksum": found.sha256.replace("sha256:", "SHA256:")}


@router.post(
    "/infer/{model}",
    response_class=Response,
    responses={
        200: {
            "description": "By `output`: report and mask (multipart), the mask (NRRD), the report, or a "
            "DICOM SEG or RTSTRUCT. For research use only.",
            "model": SegmentationReport,
            "content": {
                "multipart/form-data": _BINARY,
                "application/octet-stream": _BINARY,
                "application/dicom": _BINARY,
            },
        },
        **problem_responses(404, 408, 409, 410, 413, 415, 422, 503, 504, 507),
    },
    openapi_extra=_FORM,
)
async def infer(
    request: Request,
    context: Annotated[AsReader, Audited("scan.segmented", way="viewer")],
    model: Annotated[str, Path(max_length=256)],
    session_id: Annotated[str, Query(max_length=64)] = "",
    image: ImageName = "",
    output: Annotated[Literal["all", "image", "json", "dicom_seg", "dicom_rtstruct"], Query()] = "all",
) -> Response:
    """Segment a scan: that of `session_id`, else the `file` of the form, else that which `image` names.

    The request waits for a job where one is needed. The answer is that of `POST /segment`.
    """
    watch = Stopwatch()

    async def admit() -> None:
        context.admission.refuse_if_full()

    with watch.stage("receive"):
        limits = UploadLimits(context.settings.max_upload_bytes)
        spool = context.settings.spool
        form = await receive(request, spool, limits, file_fields=("file", "label"), admit=admit)
    with form:
        if "label" in form.files:
            raise RequestInvalid(
                [{"field": "body.label", "reason": "scribbles and labels are not used: leave the part out"}]
            )
        options = _options(form, model, output)
        scan = await to_thread.run_sync(_find, context, form, session_id, image)
        answered = await answer_or_start(request, context, options, scan, watch)
    if isinstance(answered, str):
        answered = await _result(request, context, answered)
    return answered


@router.api_route(
    "/auth/{rest:path}", methods=_METHODS, include_in_schema=False, dependencies=[Depends(caller)]
)
async def no_authentication() -> None:
    """Answer 404: a viewer that asks whether to sign in goes on without. No credential is needed."""
    raise _not_served("auth")


@router.api_route("/{rest:path}", methods=_METHODS, include_in_schema=False)
async def not_served(_: AsReader, rest: str) -> None:
    """Answer 404, with the reason where the interface has such a path."""
    raise _not_served(rest)


class AtRoot:
    """ASGI middleware: serves the paths of the interface at the root, too."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application with the path below `PREFIX`."""
        served = tuple(f"/{name}/" for name in _SERVED)
        if scope["type"] == "http" and (path := path_below_prefix(scope)).startswith(served):
            before: str = scope.get("root_path", "")
            scope["path"] = before + PREFIX + path
            if scope.get("raw_path") is not None:
                rest = scope["raw_path"].removeprefix(before.encode("ascii"))
                scope["raw_path"] = f"{before}{PREFIX}".encode("ascii") + rest
        await self.app(scope, receive, send)


def _scans(context: ServiceContext) -> ViewerScans:
    return ViewerScans(context.database, context.settings)


def _statistics(scans: list[ViewerScan]) -> dict[str, Any]:
    return {"total": len(scans), "completed": 0, "label_tags": {}}


async def _keep(
    request: Request, context: ServiceContext, upload: Upload, image: str | None, lifetime: float = 0
) -> ViewerScan:
    """Decode the scan now, so that the viewer gets the error, and keep it."""
    concerns(request, scan=upload.sha256)
    async with context.admission.turn():
        examined = await to_thread.run_sync(examine, upload, scan_limits(context.settings))
    return await to_thread.run_sync(_scans(context).add, upload, image, examined, lifetime or None)


def _session(scan: ViewerScan) -> ViewerSession:
    meta = {"format": scan.format, "bytes": scan.size, "sha256": scan.sha256, "series": scan.series}
    return ViewerSession(
        session_id=scan.id,
        session_info=ViewerScanInfo(
            name=scan.id,
            image=scan.image or "",
            meta=meta,
            create_ts=int(scan.created_at.timestamp()),
            last_access_ts=int(scan.used_at.timestamp()),
            expiry=int(scan.lifetime),
        ),
    )


def _find(context: ServiceContext, form: UploadForm, session_id: str, image: str) -> ScanFile:
    if session_id:
        return _scans(context).get(session_id, use=True)
    if "file" in form.files:
        return form.files["file"]
    if image:
        return _scans(context).find(image)
    raise RequestInvalid([{"field": "query", "reason": "expected session_id, image, or a part `file`"}])


def _params(form: UploadForm) -> dict[str, JsonValue]:
    """The `params` of a form. Raises RequestInvalid: they are no JSON object."""
    try:
        params = json.loads(form.fields.get("params") or "{}")
    except (ValueError, RecursionError):
        params = None
    if not isinstance(params, dict):
        raise RequestInvalid([{"field": "body.params", "reason": "expected a JSON object"}])
    return params


def _correct(
    context: ServiceContext, image: str, label: Upload, params: Mapping[str, JsonValue]
) -> CorrectionView:
    """Store the mask of a viewer as the correction of the newest answer to its scan."""
    model = params.get("model")
    found, scan = corrections.find_viewed(desk_of(context), image, model if isinstance(model, str) else None)
    with scan:
        sent = Sent("viewer", label, scan, names=_names(params.get("label_info")))
        assert found.row.hospital is not None
        return keep_and_send(context, found.row.hospital, [found], sent).view


def _names(said: JsonValue) -> dict[int, str]:
    """The names of a mask's values, of `label_info` such as `[{"name": "liver", "idx": 1}]`."""
    names: dict[int, str] = {}
    for each in said[:MOST_ENTRIES] if isinstance(said, list) else ():
        if isinstance(each, dict):
            name, value = each.get("name"), each.get("idx")
            if isinstance(name, str) and isinstance(value, int):
                names[value] = name[:200]
    return names


def _options(form: UploadForm, model: str, output: str) -> SegmentOptions:
    """The options among `params`; other members are the plugin's own, and ignored.

    Raises:
        RequestInvalid: they are no JSON object or ask for another kind of mask; an option is wrong or
            misspelt.
    """
    params, wrong = _params(form), []
    for name in params:
        alike = get_close_matches(name[:64], _OPTIONS, n=1, cutoff=0.8)
        if alike and name not in _OPTIONS:
            wrong.append({"field": "body.params", "reason": f"a member is misspelt: `{alike[0]}`?"})
    wanted = _OUTPUTS[output]
    fields: dict[str, Any] = {}
    if wanted in _NRRD:
        for name, only in (("result_extension", _EXTENSION), ("result_dtype", _TYPE)):
            if params.get(name, only) != only:
                wrong.append(
                    {"field": f"body.params.{name}", "reason": f"expected {only}, the only one here"}
                )
        fields["compress"] = params.get("result_compress", True)
    if wrong:
        raise RequestInvalid(wrong[:MOST_ENTRIES])
    fields |= {name: params[name] for name in _OPTIONS if params.get(name) is not None}
    return read_options(SegmentOptions, {**fields, "model": model, "output": wanted})


async def _result(request: Request, context: ServiceContext, job_id: str) -> Response:
    """The result of a job. Raises Problem 504 if it takes too long, and cancels it: no client knows it."""
    seconds = context.settings.viewer_wait_seconds
    response = await result_within(request, context, job_id, seconds)
    if response.status_code != 202:
        return response
    await to_thread.run_sync(submission.cancel, context.database, context.settings, job_id)
    raise Problem(
        504,
        "job-too-slow",
        "The job takes too long",
        f"The job for this scan did not end within {seconds} s (LOCUM_VIEWER_WAIT_SECONDS) and is "
        "cancelled: ask without personalization=scan, when fewer jobs are waiting, or send a smaller volume.",
    )


def _not_served(path: str) -> Problem:
    reason = next(
        (reason for start, reason in _REASONS.items() if f"{path}/".startswith(f"{start}/")),
        "Nothing is served at this path; /docs lists what is",
    )
    return Problem(404, "not-found", "Not Found", f"{reason}.")
