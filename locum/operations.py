"""What a client can do, for `Client` and `AsyncClient`: each function is an operation of `locum.core`."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import date, datetime
from typing import Any
from urllib.parse import quote

from numpy.typing import NDArray

from locum.answers import (
    Assignment,
    ChangePlan,
    Classification,
    Cohort,
    CohortMask,
    CohortScan,
    Correction,
    File,
    Hospital,
    Job,
    JobSummary,
    Model,
    Observation,
    Readiness,
    Segmentation,
    Serving,
    Session,
    Shadow,
    Version,
    Watch,
)
from locum.core import MOST_FILE, Operation, Request, json_of, listed, page_of, parsed, pause, send
from locum.errors import JobFailed, Problem, ScanInvalid
from locum.masks import segmentation
from locum.reading import read
from locum.scans import Scan, Upload, opened

# Between looks at a job that a scan waits for.
_LOOK_SECONDS = 1.0
_WITH_MASK = ("succeeded", "fell_back")
_UNKNOWN, _DELETED = 404, 410
# Observations that a page has.
_MOST_OBSERVATIONS = 500


def segment(
    scan: Scan,
    *,
    affine: NDArray[Any] | None = None,
    model: str | None = None,
    hospital: str | None = None,
    personalization: str | None = None,
    site: str | None = None,
    guard: str | None = None,
    series: str | None = None,
    follow: Callable[[Job], None] | None = None,
    resume: str | None = None,
    **options: str,
) -> Operation[Segmentation]:
    """Segment one scan; return the mask, the report, the receipt and the warnings.

    A volume that takes long is segmented by a job, which is followed to its end; its result is then deleted
    from the service. Where the call is interrupted, the job goes on.

    Args:
        scan: a file, a folder of one DICOM series, a nibabel image, or an array; for a scan of several
            channels one of these for each, by the channel's name.
        affine: of an array that is a volume: [4, 4], voxel indices to millimetres in RAS+.
        model: `name`, `name@3` or `name@sha256:…`; may be left out where the service offers one.
        hospital: of the scan; it decides the version and, for a member, the model.
        personalization: `auto` (default), `global`, `member`, `hospital` or `scan`.
        site: with `member`.
        guard: `auto` (default), `warn` or `refuse`: what becomes of a scan that is unlike the training scans.
        series: of a study of several DICOM series, the one that is the scan: its number, its UID, or the end
            of that from a dot on.
        follow: called with the state of the job about once a second; `progress` has `window` of `windows`.
        resume: id of the job that an interrupted call for this scan made: its result is taken instead of
            sending the scan again, unless it ended without one or was deleted.
        options: further fields of `POST /segment`, such as `preset`.

    Raises:
        Problem: the service rejects the scan or the request; its sentence says why.
        ScanInvalid: `scan` is no scan.
        JobFailed: a scan that needs a job got no mask.
    """
    form = _form(
        options,
        model=model,
        hospital=hospital,
        personalization=personalization,
        site=site,
        guard=guard,
        series=series,
    )
    with opened(scan, affine) as upload:
        file = yield from _answer(upload, {**form, "output": "multipart"}, follow, resume)
        return segmentation(file.content, file.media_type, upload.header)


def render(
    scan: Scan,
    output: str,
    *,
    affine: NDArray[Any] | None = None,
    follow: Callable[[Job], None] | None = None,
    resume: str | None = None,
    **options: str,
) -> Operation[File]:
    """Segment one scan into another output, as the service sends it: `overlay`, `dicom-seg`, `dicom-sr`,
    `dicom-rtstruct`, `nrrd`, ...

    Other arguments and errors as `segment`.
    """
    with opened(scan, affine) as upload:
        return (yield from _answer(upload, {**_form(options), "output": output}, follow, resume))


def _answer(
    upload: Upload,
    form: Mapping[str, str],
    follow: Callable[[Job], None] | None = None,
    resume: str | None = None,
) -> Operation[File]:
    job = None if resume is None else (yield from _unless_gone(resume))
    if job is None:
        answer = yield from send(Request("POST", "/segment", form=form, scan=upload, most=MOST_FILE))
        if answer.status_code != 202:
            return _file(answer)
        job = parsed(Job, answer)
    while True:
        if follow is not None:
            follow(job)
        if job.ended:
            break
        yield from pause(_LOOK_SECONDS)
        job = yield from get_job(job.id)
    if job.state not in _WITH_MASK:
        raise JobFailed(f"job {job.id}: expected a mask, found state {job.state}: {job.reason}")
    try:
        file = _file((yield from send(Request("GET", f"/jobs/{quote(job.id)}/result", most=MOST_FILE))))
    except Problem as problem:
        if resume is None or problem.status != _DELETED:
            raise
        return (yield from _answer(upload, form, follow))
    try:
        yield from send(Request("DELETE", f"/jobs/{quote(job.id)}/files"))
    except Problem:
        # It expires. An older service lets only an operator delete it.
        return file
    return file


def _unless_gone(job: str) -> Operation[Job | None]:
    """A job that runs or has its mask; None for every other one."""
    try:
        found = yield from get_job(job)
    except Problem as problem:
        if problem.status != _UNKNOWN:
            raise
        return None
    return found if found.state in (*_WITH_MASK, "queued", "running") else None


def _file(answer: Any) -> File:
    return File(answer.content, answer.headers.get("Content-Type", ""), dict(answer.headers))


def classify(
    scan: Scan,
    *,
    affine: NDArray[Any] | None = None,
    model: str | None = None,
    hospital: str | None = None,
    personalization: str | None = None,
    **options: str,
) -> Operation[Classification]:
    """Classify one scan. Arguments and errors as `segment`."""
    form = _form(options, model=model, hospital=hospital, personalization=personalization)
    with opened(scan, affine) as upload:
        return parsed(Classification, (yield from send(Request("POST", "/classify", form=form, scan=upload))))


def models() -> Operation[list[Model]]:
    """List the models that requests can name."""
    return (yield from listed("/models", "models", Model))


def versions(model: str) -> Operation[list[Version]]:
    """List the versions of a model. Raises Problem 404."""
    return (yield from listed(f"/models/{quote(model)}", "versions", Version))


def model(name: str) -> Operation[Model]:
    """Describe a model. Raises Problem 404."""
    return parsed(Model, (yield from send(Request("GET", f"/models/{quote(name)}"))))


def hospitals() -> Operation[list[Hospital]]:
    """List the hospitals that the caller may see."""
    return (yield from listed("/hospitals", "hospitals", Hospital))


def register(
    hospital: str, name: str | None = None, site: str | None = None, shares_model: bool | None = None
) -> Operation[Hospital]:
    """Register a hospital, or change its name and site; a member of the federation names its `site`.

    `shares_model` says whether the site's own model answers callers of other hospitals; None leaves it.
    """
    body: dict[str, Any] = {"name": name or hospital, **({"site": site} if site else {})}
    body |= {} if shares_model is None else {"shares_model": shares_model}
    return parsed(Hospital, (yield from send(Request("PUT", f"/hospitals/{quote(hospital)}", json=body))))


def create_cohort(hospital: str, note: str | None = None, name: str | None = None) -> Operation[Cohort]:
    """Make an empty cohort. Name and note outlive the scans, so they must not name a patient. Raises Problem
    404.
    """
    path = f"/hospitals/{quote(hospital)}/cohorts"
    # Not repeatable: a second one would be made, though it is empty and expires.
    request = Request("POST", path, json=_said(note=note, name=name), repeatable=False)
    return parsed(Cohort, (yield from send(request)))


def describe_cohort(
    hospital: str,
    cohort: str,
    *,
    name: str | None = None,
    note: str | None = None,
    may_train: bool | None = None,
) -> Operation[Cohort]:
    """Change a cohort's name or note, or whether a model may learn from it; None leaves each as it is.

    Raises Problem 404.
    """
    said: dict[str, Any] = {**_said(name=name, note=note)}
    if may_train is not None:
        said["may_train"] = may_train
    request = Request("PATCH", _cohort(hospital, cohort), json=said)
    return parsed(Cohort, (yield from send(request)))


def cohorts(hospital: str) -> Operation[list[Cohort]]:
    """List the cohorts that still have their scans, the newest first. Raises Problem 404."""
    return (yield from listed(f"/hospitals/{quote(hospital)}/cohorts", "cohorts", Cohort))


def cohort(hospital: str, cohort: str) -> Operation[Cohort]:
    """Describe a cohort, also after its scans were deleted. Raises Problem 404."""
    return parsed(Cohort, (yield from send(Request("GET", _cohort(hospital, cohort)))))


def delete_cohort(hospital: str, cohort: str) -> Operation[None]:
    """Delete a cohort's scans now. Raises Problem 409 while a job needs them."""
    yield from send(Request("DELETE", _cohort(hospital, cohort)))


def cohort_scans(hospital: str, cohort: str) -> Operation[list[CohortScan]]:
    """List a cohort's scans, with the digests of the stored files. Raises Problem 404, 410."""
    return (yield from listed(f"{_cohort(hospital, cohort)}/scans", "scans", CohortScan))


def cohort_file(hospital: str, cohort: str, name: str) -> Operation[bytes]:
    """Fetch a scan of a cohort as it is stored; `NAME/mask` is its mask. Raises Problem 404, 410."""
    path = f"{_cohort(hospital, cohort)}/scans/{quote(name)}"
    answer = yield from send(Request("GET", path, most=MOST_FILE))
    return bytes(answer.content)


def add_scan(
    hospital: str, cohort: str, name: str, scan: Scan, *, affine: NDArray[Any] | None = None
) -> Operation[CohortScan]:
    """Add a scan under the caller's own name for it; the same scan again changes nothing.

    Raises:
        Problem: 409 where another scan has the name, 4xx where the scan cannot be read.
        ScanInvalid: `scan` is no scan.
    """
    with opened(scan, affine) as upload:
        return parsed(
            CohortScan, (yield from _put(f"{_cohort(hospital, cohort)}/scans/{quote(name)}", upload))
        )


def add_mask(
    hospital: str,
    cohort: str,
    name: str,
    mask: Scan,
    *,
    affine: NDArray[Any] | None = None,
    model: str | None = None,
) -> Operation[CohortMask]:
    """Add the mask of a scan, on its grid; with `model` its values are checked too. Errors as `add_scan`."""
    with opened(mask, affine) as upload:
        path = f"{_cohort(hospital, cohort)}/scans/{quote(name)}/mask"
        return parsed(CohortMask, (yield from _put(path, upload, {"model": model} if model else {})))


def _put(path: str, upload: Upload, params: Mapping[str, str] | None = None) -> Operation[Any]:
    headers = {"Repr-Digest": upload.repr_digest, "Content-Type": "application/octet-stream"}
    return (yield from send(Request("PUT", path, params=params or {}, headers=headers, body=upload)))


def adapt(
    hospital: str,
    model: str | None,
    cohort: str,
    options: Mapping[str, Any] | None = None,
    key: str | None = None,
) -> Operation[Job]:
    """Start the job that fits a model to a cohort; masks in the cohort make it a joining of a FedOAP model.

    Args:
        hospital: of the cohort.
        model: may be left out where one can be adapted.
        cohort: id; all its scans are used.
        options: by the kind of the model, such as `epochs`.
        key: Idempotency-Key: a repeated call with it returns the job that the first one made. A new one by
            default, so that retries of this call make one job.

    Raises:
        Problem: the model cannot be adapted, or not to this cohort.
    """
    body = {"cohort": cohort, "options": dict(options or {}), **({"model": model} if model else {})}
    headers = {"Idempotency-Key": key or str(uuid.uuid4())}
    path = f"/hospitals/{quote(hospital)}/adaptations"
    return parsed(Job, (yield from send(Request("POST", path, headers=headers, json=body))))


def measure_acceptance(
    hospital: str,
    model: str | None,
    cohort: str,
    thresholds: Mapping[str, Any] | None = None,
    *,
    precision: str | None = None,
    pacs: tuple[str, str, str] | None = None,
    actor: str | None = None,
    key: str | None = None,
) -> Operation[Job]:
    """Start the job that scores a version on a hospital's scans with masks, as it answers them.

    Args:
        hospital: of the cohort.
        model: `name`, `name@3` or `name@sha256:…`; without a version, the one that serves the hospital.
        cohort: id; scans without masks narrow the bounds.
        thresholds: what is asked of each label: `{"labels": {"liver": {"least_dice": 0.9}}}`.
        precision: of the graph; by default that of the hospital's assignment.
        pacs: a PACS, and the UIDs of a study and a series there: the answer to it is stored there as a SEG,
            fetched again and compared.
        actor: who measures; only for a service without authentication.
        key: as in `adapt`.
    """
    through = None if pacs is None else dict(zip(("name", "study", "series"), pacs, strict=True))
    body = {"cohort": cohort, **_said(model=model, precision=precision, actor=actor)}
    headers = {"Idempotency-Key": key or str(uuid.uuid4())}
    path = f"/hospitals/{quote(hospital)}/acceptances"
    asked = {**body, **_said(thresholds=None if thresholds is None else dict(thresholds), pacs=through)}
    return parsed(Job, (yield from send(Request("POST", path, headers=headers, json=asked))))


def acceptance(job: str) -> Operation[dict[str, Any]]:
    """Read the report of an acceptance: `report`, `digest`, `signature` and `decision`, as the service says.

    Raises Problem 409 before the job's end, or without a report.
    """
    found: dict[str, Any] = json_of((yield from send(Request("GET", f"/jobs/{quote(job)}/acceptance"))))
    return found


def acceptance_page(job: str) -> Operation[bytes]:
    """Read the report of an acceptance as one HTML page, which shows patients. Errors as `acceptance`."""
    path = f"/jobs/{quote(job)}/acceptance/report.html"
    return bytes((yield from send(Request("GET", path, most=MOST_FILE))).content)


def decide_acceptance(
    job: str, accepted: bool, reason: str, *, actor: str | None = None, override: bool = False
) -> Operation[dict[str, Any]]:
    """Accept or reject the version by the report of an acceptance; another person than measured decides.

    Raises:
        Problem: 403 for the same person, 409 where the thresholds are not met without `override`.
    """
    body = {"accepted": accepted, "reason": reason, "override": override, **_said(actor=actor)}
    path = f"/jobs/{quote(job)}/acceptance"
    found: dict[str, Any] = json_of((yield from send(Request("POST", path, json=body, repeatable=False))))
    return found


def acceptances(hospital: str) -> Operation[dict[str, Any]]:
    """Tell what was decided at a hospital, and whether it demands acceptances. Raises Problem 404."""
    found: dict[str, Any] = json_of((yield from send(Request("GET", _acceptances(hospital)))))
    return found


def demand_acceptances(
    hospital: str, demanded: bool, reason: str, *, actor: str | None = None
) -> Operation[dict[str, Any]]:
    """Demand an acceptance before every assignment to a hospital, or no longer. Raises Problem 403, 404."""
    body = {"demanded": demanded, "reason": reason, **_said(actor=actor)}
    request = Request("PUT", _acceptances(hospital), json=body)
    found: dict[str, Any] = json_of((yield from send(request)))
    return found


def _acceptances(hospital: str) -> str:
    return f"/hospitals/{quote(hospital)}/acceptances"


def get_job(job: str) -> Operation[Job]:
    """Read a job. Raises Problem 404."""
    return parsed(Job, (yield from send(Request("GET", f"/jobs/{quote(job)}"))))


def jobs(
    hospital: str | None = None, state: str | None = None, limit: int | None = None
) -> Operation[list[JobSummary]]:
    """List jobs, the newest first, of one hospital or in one state."""
    given = {"hospital": hospital, "state": state, "limit": None if limit is None else str(limit)}
    params = {name: value for name, value in given.items() if value is not None}
    if limit is None:
        return (yield from listed("/jobs", "jobs", JobSummary, params))
    page = json_of((yield from send(Request("GET", "/jobs", params=params))))
    return [read(JobSummary, item) for item in page_of(page, "/jobs", "jobs")[0]]


def cancel(job: str) -> Operation[Job]:
    """Cancel a job; a finished one stays as it ended. Raises Problem 404."""
    return parsed(Job, (yield from send(Request("DELETE", f"/jobs/{quote(job)}"))))


def card(job: str) -> Operation[bytes]:
    """Read a job's card: one HTML page for review, which may show patients. Raises Problem 404."""
    answer = yield from send(Request("GET", f"/jobs/{quote(job)}/card"))
    return bytes(answer.content)


def serving(hospital: str, model: str, at: datetime | None = None) -> Operation[Serving]:
    """Tell which version serves a hospital for a model, now or at an instant with its zone. Raises Problem
    404.
    """
    params = {} if at is None else {"at": at.isoformat()}
    return parsed(Serving, (yield from send(Request("GET", _serving(hospital, model), params=params))))


def history(hospital: str, model: str) -> Operation[list[Assignment]]:
    """List the decisions for a hospital and a model, the oldest first. Raises Problem 404."""
    return (yield from listed(f"{_serving(hospital, model)}/history", "entries", Assignment))


def assign(
    hospital: str,
    model: str,
    version: int | str,
    reason: str,
    *,
    actor: str | None = None,
    override: bool = False,
    seen: int | None = None,
) -> Operation[Assignment]:
    """Assign a version to a hospital.

    Args:
        hospital: that it serves from now on.
        model: for which it serves.
        version: a number, or `name@number` of a version that was adapted to the hospital.
        reason: the log keeps it.
        actor: who decides; only for a service without authentication, which knows no caller.
        override: assign a version that did not pass its gate; the log records it.
        seen: sequence of the decision that the caller saw and means to replace, 0 for none; by default the
            one in force.

    Raises:
        Problem: 409 `gate-refused`, 412 where another client decided in between, and others.
    """
    body: dict[str, Any] = {"version": version, "reason": reason, "override": override}
    return (yield from _decide("PUT", _serving(hospital, model), body, actor, seen))


def roll_back(
    hospital: str, model: str, reason: str, *, actor: str | None = None, seen: int | None = None
) -> Operation[Assignment]:
    """Return to what served before. Arguments and errors as `assign`; 409 where nothing served before."""
    return (yield from _decide("POST", _serving(hospital, model), {"reason": reason}, actor, seen))


def _decide(
    method: str, serving: str, body: Mapping[str, Any], actor: str | None, seen: int | None
) -> Operation[Assignment]:
    tag = f'"{seen}"'
    if seen is None:
        tag = (yield from send(Request("GET", serving))).headers.get("ETag", "")
    path = serving if method == "PUT" else f"{serving}/rollback"
    body = {**body, **({"actor": actor} if actor else {})}
    # Not repeatable: where the answer was lost, a second request would be rejected as outdated (412).
    request = Request(method, path, headers={"If-Match": tag}, json=body, repeatable=False)
    return parsed(Assignment, (yield from send(request)))


def shadows(hospital: str, model: str) -> Operation[list[Shadow]]:
    """List the versions that answered unseen, newest first. Raises Problem."""
    path = f"{_serving(hospital, model)}/shadow"
    page = json_of((yield from send(Request("GET", path))))
    return [read(Shadow, item) for item in page_of(page, path, "shadows")[0]]


def begin_shadow(
    hospital: str,
    model: str,
    version: int | str,
    reason: str,
    *,
    every: int = 10,
    rule: Mapping[str, float] | None = None,
    actor: str | None = None,
) -> Operation[Shadow]:
    """Let a version answer one scan in `every` unseen, beside the one that serves.

    Args:
        hospital: of the scans.
        model: that serves it.
        version: as in `assign`.
        reason: the audit trail keeps it.
        every: one scan in so many.
        rule: `{"corrections": 20, "gain": 0.0}`: assigned without a person after so many corrected answers,
            where the one-sided 95 % lower bound of the gain of Dice is above `gain`.
        actor: as in `assign`.

    Raises Problem: 409 `shadow-runs` while another version is the shadow.
    """
    body: dict[str, Any] = {"version": version, "every": every, "reason": reason, **_said(actor=actor)}
    if rule is not None:
        body["rule"] = dict(rule)
    path = f"{_serving(hospital, model)}/shadow"
    return parsed(Shadow, (yield from send(Request("PUT", path, json=body, repeatable=False))))


def end_shadow(hospital: str, model: str, reason: str, *, actor: str | None = None) -> Operation[Shadow]:
    """End the shadow; what it found stays. Raises Problem 404 without one."""
    path, body = f"{_serving(hospital, model)}/shadow/end", {"reason": reason, **_said(actor=actor)}
    return parsed(Shadow, (yield from send(Request("POST", path, json=body, repeatable=False))))


def change_plan(hospital: str, model: str) -> Operation[ChangePlan]:
    """Tell which changes of a model one approver may assign, and what waits. Raises Problem 404."""
    return parsed(ChangePlan, (yield from send(Request("GET", f"{_serving(hospital, model)}/plan"))))


def set_change_plan(
    hospital: str, model: str, plan: Mapping[str, Any] | None, reason: str, *, actor: str | None = None
) -> Operation[ChangePlan]:
    """Write the change plan of a hospital's model; None: there is none any more.

    Raises Problem: 422 names the fields that are wrong.
    """
    body = {"plan": None if plan is None else dict(plan), "reason": reason, **_said(actor=actor)}
    path = f"{_serving(hospital, model)}/plan"
    return parsed(ChangePlan, (yield from send(Request("PUT", path, json=body))))


def watches(hospital: str | None = None) -> Operation[list[Watch]]:
    """List the watches of the hospitals that the caller may see, or of one. Raises Problem 404."""
    return (yield from listed("/watch", "watches", Watch, _said(hospital=hospital)))


def set_watch(
    hospital: str,
    model: str,
    reason: str,
    *,
    months: float = 12,
    stop: str = "warn",
    actor: str | None = None,
) -> Operation[list[Watch]]:
    """Set how often false alarms may be, and what happens to answers when there is an alarm.

    Args:
        hospital: of the watch.
        model: of the watch; the setting holds for all of its scanners together.
        reason: the audit trail keeps it.
        months: between false alarms, 0.5 to 120.
        stop: `warn` in every answer, `global` (the global model answers) or `hold` (no answer).
        actor: as in `assign`.
    """
    body = {"months": months, "stop": stop, "reason": reason, **_said(actor=actor)}
    return (yield from _watched(Request("PUT", _watch(hospital, model), json=body, repeatable=False)))


def answer_alarms(
    hospital: str, model: str, reason: str, *, scanner: str | None = None, actor: str | None = None
) -> Operation[list[Watch]]:
    """Answer the alarms of a scanner, of None for scans without a known one: its next answers are usual."""
    body = {"scanner": scanner, "reason": reason, **_said(actor=actor)}
    path = f"{_watch(hospital, model)}/answers"
    return (yield from _watched(Request("POST", path, json=body, repeatable=False)))


def _watched(request: Request) -> Operation[list[Watch]]:
    page = json_of((yield from send(request)))
    return [read(Watch, item) for item in page_of(page, request.path, "watches")[0]]


def observations(
    hospital: str, model: str | None = None, limit: int | None = None
) -> Operation[list[Observation]]:
    """List what was observed of a hospital's answers, newest first: at most `limit`. Raises Problem 404."""
    path = f"/hospitals/{quote(hospital)}/observations"
    size = _MOST_OBSERVATIONS if limit is None else min(limit, _MOST_OBSERVATIONS)
    params = {"limit": str(size), **_said(model=model)}
    return (yield from listed(path, "observations", Observation, params, most=limit))


def review(hospital: str, model: str, limit: int = 100) -> Operation[list[Observation]]:
    """List the newest answers of the version that serves, the least sure first: the masks to look at.

    Those at which somebody looked come last. Raises Problem 404.
    """
    path = f"/hospitals/{quote(hospital)}/observations"
    params = {"model": model, "order": "review", "limit": str(limit)}
    page = json_of((yield from send(Request("GET", path, params=params))))
    return [read(Observation, item) for item in page_of(page, path, "observations")[0]]


def observations_csv(hospital: str, model: str | None = None) -> Operation[bytes]:
    """Export what was observed of a hospital's answers: a row per answer and label. Raises Problem 404."""
    path = f"/hospitals/{quote(hospital)}/observations.csv"
    answer = yield from send(Request("GET", path, params=_said(model=model), most=MOST_FILE))
    return bytes(answer.content)


def correct(
    hospital: str,
    request: str,
    mask: Scan,
    scan: Scan | None = None,
    *,
    affine: NDArray[Any] | None = None,
    seconds: float | None = None,
    note: str | None = None,
    name: str | None = None,
) -> Operation[Correction]:
    """Correct the answer of a request by the whole mask as it should be, on the scan's own grid.

    A later mask takes the place of an earlier one. A mask that equals the answer counts as accepted.

    Args:
        hospital: of the answer.
        request: id of the request, as its receipt has it.
        mask: a file, a nibabel image or an array.
        scan: as it was segmented; not needed while a cohort of the hospital has it, or the hospital keeps
            the answered mask.
        affine: of an array that is a volume.
        seconds: how long the person worked on it.
        note: for people; it must not name a patient.
        name: the scan's in the cohort of corrections, which tells its patient.

    Raises:
        Problem: 409 `correction-mismatch`: the scan is another one; 404 `answer-unknown`, and others.
    """
    said = _said(seconds=None if seconds is None else str(seconds), note=note, name=name)
    with ExitStack() as stack:
        drawn = stack.enter_context(opened(mask, affine))
        below = None if scan is None else stack.enter_context(opened(scan))
        asked = Request("PUT", _correction(hospital, request), form=said, scan=below, mask=drawn)
        return parsed(Correction, (yield from send(asked)))


def accept_answer(
    hospital: str, request: str, *, seconds: float | None = None, note: str | None = None
) -> Operation[Correction]:
    """Say that the answer of a request is right as it is. Raises Problem 404."""
    said = _said(accepted="true", seconds=None if seconds is None else str(seconds), note=note)
    return parsed(Correction, (yield from send(Request("PUT", _correction(hospital, request), form=said))))


def corrections(
    hospital: str, model: str | None = None, limit: int | None = None
) -> Operation[list[Correction]]:
    """List the corrections of a hospital's answers, newest first. Raises Problem 404."""
    path = f"/hospitals/{quote(hospital)}/corrections"
    return (yield from listed(path, "corrections", Correction, _said(model=model), most=limit))


def kept_answers(hospital: str) -> Operation[dict[str, Any]]:
    """Tell whether a hospital keeps answered masks, and how many there are. Raises Problem 404."""
    found: dict[str, Any] = json_of((yield from send(Request("GET", _kept_answers(hospital)))))
    return found


def keep_answers(
    hospital: str,
    days: int | None,
    reason: str,
    *,
    quota_bytes: int | None = None,
    actor: str | None = None,
) -> Operation[dict[str, Any]]:
    """Keep the masks of a hospital's answers for so many days, to compare corrections with them.

    None keeps none, and deletes those that are kept. Raises Problem 403, 404, 422.
    """
    said = {name: value for name, value in (("quota_bytes", quota_bytes), ("actor", actor)) if value}
    body = {"days": days, "reason": reason, **said}
    found: dict[str, Any] = json_of((yield from send(Request("PUT", _kept_answers(hospital), json=body))))
    return found


def _kept_answers(hospital: str) -> str:
    return f"/hospitals/{quote(hospital)}/kept-answers"


def find_corrections(
    hospital: str, pacs: str, query: Mapping[str, str], key: str | None = None
) -> Operation[Job]:
    """Start the job that takes the SEGs and RTSTRUCTs of a PACS that a person edited for corrections.

    Args:
        hospital: of the answers.
        pacs: its name in the service's settings.
        query: DICOM attributes of the studies, such as `{"StudyDate": "20261101-20261130"}`.
        key: Idempotency-Key, as for `adapt`.

    Raises Problem.
    """
    headers = {"Idempotency-Key": key or str(uuid.uuid4())}
    path = f"/hospitals/{quote(hospital)}/corrections/pacs"
    body = {"pacs": pacs, "query": dict(query)}
    return parsed(Job, (yield from send(Request("POST", path, headers=headers, json=body))))


def follow_up(
    hospital: str,
    pacs: str,
    study: str,
    series: str,
    *,
    model: str | None = None,
    earlier: Sequence[tuple[str, str]] | None = None,
    repeats: str | None = None,
    most: int | None = None,
    key: str | None = None,
) -> Operation[Job]:
    """Start the job that compares a series of a PACS with the patient's earlier ones, by one version.

    Args:
        hospital: of the scans.
        pacs: its name in the service's settings.
        study: UID of the newest study.
        series: UID of the series there.
        model: `name`, `name@3` or `name@sha256:…`; by default the one that is offered.
        earlier: UIDs of study and series of each; by default those with a SEG or SR in the PACS.
        repeats: id of a cohort with repeated scans, by which the version's spread is measured.
        most: earlier series that are read; the newest count.
        key: Idempotency-Key, as for `adapt`.

    Raises Problem.
    """
    body = {"hospital": hospital, "study": study, "series": series}
    more = _said(model=model, repeats=repeats, most=most)
    if earlier is not None:
        more["earlier"] = [{"study": of, "series": each} for of, each in earlier]
    headers = {"Idempotency-Key": key or str(uuid.uuid4())}
    path = f"/pacs/{quote(pacs)}/follow-up"
    return parsed(Job, (yield from send(Request("POST", path, headers=headers, json={**body, **more}))))


def followed_up(job: str) -> Operation[dict[str, Any]]:
    """Read what a follow-up found: `series`, oldest first, and `spread`, as the service says.

    Raises Problem 404 before the job's end, and after the answer has expired.
    """
    found: dict[str, Any] = json_of((yield from send(Request("GET", f"/jobs/{quote(job)}/result"))))
    return found


def answers(
    hospital: str,
    *,
    series: str | None = None,
    scan: str | None = None,
    request: str | None = None,
    day: date | None = None,
) -> Operation[list[dict[str, Any]]]:
    """Say which version answered, by which decision and on what evidence: newest first, at most 100.

    Args:
        hospital: its id.
        series: the SeriesInstanceUID of the scan, or
        scan: `sha256:…` of its bytes as they were sent, or
        request: the id of the request.
        day: only answers of this day, in UTC.

    Raises Problem.
    """
    said = _said(series=series, scan=scan, request=request, day=None if day is None else day.isoformat())
    path = f"/hospitals/{quote(hospital)}/answers"
    found: dict[str, Any] = json_of((yield from send(Request("GET", path, params=said))))
    return list(found["answers"])


def version_card(model: str, version: int, hospital: str | None = None) -> Operation[dict[str, Any]]:
    """What is recorded of a version: training data, and by hospital acceptance, monitoring, changes.

    Raises Problem.
    """
    found: dict[str, Any] = json_of((yield from send(_version_card(model, version, "card", hospital))))
    return found


def version_card_page(model: str, version: int, hospital: str | None = None) -> Operation[bytes]:
    """The same card as an HTML page. Raises Problem."""
    return (yield from send(_version_card(model, version, "card.html", hospital))).content


def _version_card(model: str, version: int, name: str, hospital: str | None) -> Request:
    path = f"/models/{quote(model)}/versions/{version}/{name}"
    return Request("GET", path, params=_said(hospital=hospital), most=MOST_FILE)


def report(hospital: str, first: date, last: date) -> Operation[dict[str, Any]]:
    """Report a hospital's days from the first to the last, in UTC. Raises Problem."""
    found: dict[str, Any] = json_of((yield from send(_report(hospital, "report", first, last))))
    return found


def report_page(hospital: str, first: date, last: date) -> Operation[bytes]:
    """The same report as an HTML page. Raises Problem."""
    return (yield from send(_report(hospital, "report.html", first, last))).content


def _report(hospital: str, name: str, first: date, last: date) -> Request:
    path = f"/hospitals/{quote(hospital)}/{name}"
    params = {"from": first.isoformat(), "to": last.isoformat()}
    return Request("GET", path, params=params, most=MOST_FILE)


def _correction(hospital: str, request: str) -> str:
    return f"/hospitals/{quote(hospital)}/corrections/{quote(request, safe='')}"


def session() -> Operation[Session]:
    """Tell who the caller is. Raises NotAllowed for a key that is not valid."""
    return parsed(Session, (yield from send(Request("GET", "/session"))))


def ready() -> Operation[Readiness]:
    """Tell whether the service can answer; also where it cannot, as long as it runs."""
    return parsed(Readiness, (yield from send(Request("GET", "/health/ready", also=(503,)))))


def _form(options: Mapping[str, str], **named: str | None) -> dict[str, str]:
    form = {name: str(value) for name, value in {**options, **named}.items() if value is not None}
    if "output" in form:
        raise ScanInvalid(
            "`output`: segment answers with a mask and a report; use `render` for another output"
        )
    return form


def _said(**given: Any) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def _cohort(hospital: str, cohort: str) -> str:
    return f"/hospitals/{quote(hospital)}/cohorts/{quote(cohort)}"


def _serving(hospital: str, model: str) -> str:
    if "@" in model:
        raise ScanInvalid(f"{model}: expected a model's name without a version")
    return f"/hospitals/{quote(hospital)}/serving/{quote(model)}"


def _watch(hospital: str, model: str) -> str:
    return f"/hospitals/{quote(hospital)}/watch/{quote(model)}"
