"""Every error that the service raises on purpose; errors of the store and of scans are the store's.

    ServiceError
    ├── SettingsInvalid               an environment variable has an invalid value
    ├── AuditBroken                   the audit trail is not in order
    ├── AuditNotComparable            the audit trail has no row of a noted number any more
    ├── DatabaseNotMigrated           the database has another schema than this code
    ├── DatabaseUnavailable      503  the database does not answer
    ├── DatabaseFull             507  there is no space left for it
    ├── DatabaseDamaged          503  its file has other bytes than were written
    ├── BackupError                   a backup cannot be taken, or is not what was written
    ├── PartNotReady                  a part of the service does not work (`/health/ready`)
    ├── BrokerError              503  Redis does not answer
    ├── GpuUnusable                   a worker cannot use the GPU that the settings require
    ├── FilesUnavailable         503  the files of patients, or their key, cannot be used
    ├── FileDamaged              410  a file there has other bytes than were written
    ├── RequestInvalid           422  fields of a request are not valid
    ├── AuthenticationError      401  who sent a request is not known
    │   ├── CredentialMissing    401  no bearer token, or of a kind that is not taken here
    │   ├── KeyNotValid          401  the API key is unknown, expired or revoked
    │   ├── TokenNotValid        401  the access token does not verify
    │   └── SessionOver          401  the browser's session has ended
    ├── CsrfTokenMissing         403  a browser's request has no token against forgery
    ├── ProviderUnavailable      503  the identity provider's keys cannot be fetched
    ├── TooManyRequests          429  the caller is above its rate limit
    ├── NotOnLoopback            403  without authentication, only loopback is answered
    ├── AuthorizationError            the caller may not do this
    │   ├── RoleMissing          403  the caller has none of the roles that the route requires
    │   └── GrantRefused         403  the caller may not grant this role or hospital
    ├── ApiKeyError                   an API key cannot be created or changed
    │   ├── KeyUnknown           404  no key of this id
    │   ├── KeyOver              409  the key has expired, was revoked or was rotated
    │   └── KeyNameTaken         409  the hospital has a valid key of the name
    ├── HospitalUnknown          404  no hospital of this id is registered
    ├── ObservationUnknown       404  no answer of the hospital was observed under this number
    ├── CorrectionError               a correction is not taken
    │   ├── AnswerUnknown        404  no answer of the hospital has this request, or is of this scan
    │   ├── CorrectionUnknown    404  the answer of this request was not corrected
    │   ├── CorrectionMismatch   409  the scan is not the one that was answered
    │   ├── AnsweredScanGone     409  there is no scan to check the mask against
    │   └── MayNotTrain          409  the hospital has not agreed that its corrections train
    ├── SecondSignatureNeeded    409  an assignment is outside the change plan: another person must sign, too
    ├── ShadowUnknown            404  no version is the shadow of the hospital's model
    ├── ShadowRuns               409  another version is the shadow
    ├── SelectionError                no network answers a request
    │   ├── ParametersContradict 422  two parameters exclude each other
    │   ├── ModelNotNamed        422  several models are offered, or none
    │   ├── VersionNotNamed      422  the name of an adapted model, without a version
    │   ├── PartRequested        422  a part of a composite was named
    │   ├── AnotherTaskKind      422  the model segments where a classifier is needed, or the reverse
    │   ├── SiteNotNamed         422  a member model without a site
    │   ├── SiteUnknown          404  the artefact has no model of this site
    │   ├── SiteNotShared        403  the site's own model is not for this caller's hospitals
    │   ├── ClusterNotNamed      422  a cluster model without a cluster
    │   ├── ClusterUnknown       404  the artefact has no such cluster
    │   ├── NoGlobalModel        422  the artefact has no global model
    │   ├── NoAdaptedVersion     404  no adapted version is assigned to the hospital
    │   ├── PrecisionUnavailable 409  there is no graph in the hospital's precision for this answer
    │   ├── AnswersHeld          409  the watch raised an alarm, and the hospital's rule holds all answers
    │   └── NothingAssigned      409  no version serves the hospital until an approver assigns one
    ├── PredictionError               a scan is not answered
    │   ├── ScanUnlikeTask       422  the guard warns, and the request rejects such scans
    │   ├── OutputMismatch       422  the scan cannot have this output
    │   │   ├── NoPngMask        422  a volume has no PNG mask
    │   │   ├── NoNiftiMask      422  an image has no NIfTI mask
    │   │   ├── NoDicomSource    422  a scan that is no DICOM has no DICOM answer
    │   │   ├── NoVolumeToReport 422  an image has no DICOM report of volumes
    │   │   ├── NoContours 422        an image has no RTSTRUCT
    │   │   ├── CodesMissing     422  the task has no codes for its labels
    │   │   └── LabelsOverlap    422  overlapping labels have no label map
    │   ├── ServiceBusy          503  the queue for inference is full
    │   ├── RunTooLong           503  a network took longer than its slices may
    │   ├── MemoryShort          503  the process has no memory for a scan or its answer
    │   ├── RunTooLarge          503  a network needs more memory than all may use
    │   ├── GpuMemoryFull        503  the GPU has no room for a network or its run
    │   └── GpuUnavailable       503  a GPU is required and missing
    ├── ViewerScanError               a scan of a viewer is not kept or not found
    │   ├── ViewerScanUnknown    404  the caller has no such scan
    │   └── ViewerQuotaExceeded  507  there is no room for another
    ├── AssignmentError               an entry cannot be added to the serving log
    │   ├── AssignmentStale      412  another entry is in force than the caller expects
    │   ├── NothingToRollBack    409  there is no earlier assignment
    │   ├── PartNotAssignable    409  the version is a part of a composite
    │   ├── AdaptedToAnother     409  the version was adapted to another hospital
    │   ├── AnotherModel         409  the version belongs to another model
    │   ├── SecondPersonNeeded   403  the caller adapted the version, and another has to assign it
    │   ├── GateNotPassed        409  the version did not pass its gate
    │   └── AcceptanceMissing    409  the hospital demands an acceptance that the version does not have
    ├── CohortError                   a cohort cannot be read or changed
    │   ├── CohortUnknown        404  the hospital has no such cohort, or the cohort no such scan
    │   ├── CohortDeleted        410  its scans expired or were deleted
    │   ├── CohortInUse          409  an unfinished job needs its scans
    │   ├── ScanNameTaken        409  other bytes are stored under this name
    │   ├── MaskTaken            409  the scan has another mask
    │   ├── MaskStale            412  the scan has another mask than the client saw
    │   ├── CohortFull           507  too many scans or bytes
    │   └── CohortEmpty          422  the cohort has no scan
    ├── PacsError                     a PACS cannot be used
    │   ├── PacsUnknown          404  no PACS of this name for the hospital
    │   ├── PacsReadOnly         409  nothing may be stored in this PACS
    │   ├── PacsUnavailable           it does not answer now; the job is retried
    │   ├── PacsRefused               it rejects the credentials, the certificate or the instance
    │   ├── SeriesMissing             it has no such series
    │   ├── SeriesMismatched          it sends another series than the requested one
    │   └── PacsJobFailed             what was asked for cannot be done with it
    └── JobError                      a job cannot be created, changed or continued
        ├── JobUnknown           404  no such job
        ├── JobStillRunning      409  only a finished job can do this
        ├── JobMakesNoMask       404  a job of this kind has no result
        ├── JobWithoutMask       409  the job failed or was cancelled
        ├── JobFilesDeleted      410  the result expired or was deleted
        ├── QueueFull            503  too many jobs of the hospital wait
        ├── TooManyFollowers     503  too many clients follow jobs
        ├── IdempotencyConflict  422  the idempotency key belongs to another request
        ├── NotAdaptable         422  the artefact is of a kind that no job adapts
        │   ├── NothingToMove        its network has nothing that the preset moves
        │   └── NotAdaptableToScan   nor to one scan
        │       └── NothingToMoveByScan  nor for one scan
        ├── NotReducible           422  no graph in another precision can be made of the network
        ├── CandidateNotCheckable  409  the job has no candidate that masks can check
        ├── NotAcceptable        422  the version cannot be scored beside masks
        ├── NoAcceptance         409  the job has no report of an acceptance
        ├── AcceptanceSuperseded 409  a later acceptance measured the same scans
        ├── AcceptanceNotMet     409  the verdict does not say that the thresholds are met
        ├── MemberCannotJoin     422  the hospital is a member of the federation
        ├── MasksMissing         422  too few masks to learn from, or to check a candidate with
        ├── MasksInvalid         422  masks with values outside the task
        ├── ScanQuotaExceeded    507  the waiting scans have too many bytes
        ├── DiskFull             507  the scan cannot be written
        ├── LeaseLost                 another worker holds the job
        ├── JobCancelled              the job was cancelled
        ├── AdaptationRejected        nothing can be adapted, or adapted to
        ├── ScanGone                  the scan of a job was deleted
        └── ScanJobTooLong            the scan of a job takes longer than one may

A message names the thing, what was expected, what was found, and what to do. Over HTTP an error is a problem
(RFC 9457) with the status of its class (`service.http.problems`). An error without a status in the tree is a
fault of the service: 500, and its message goes to the log only. A class has a docstring where the
tree does not say all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class ServiceError(Exception):
    """Base of every error that the service raises on purpose.

    Attributes:
        status: of the HTTP answer.
        slug: names the kind of error for programs; its meaning never changes.
        title: names the kind of error for people.
        headers: of the HTTP answer.
        extensions: further members of the problem, for programs (for example `choices`); JSON.
    """

    status: int = 500
    slug: str = "internal-error"
    title: str = "Internal error"

    def __init__(self, message: str, *, headers: Mapping[str, str] | None = None, **extensions: Any) -> None:
        super().__init__(message)
        self.headers = dict(headers or {})
        self.extensions = extensions


class SettingsInvalid(ServiceError): ...


class AuditBroken(ServiceError):
    """A row of the audit trail, a checkpoint or an assignment is not what it was."""


class AuditNotComparable(ServiceError):
    """The audit trail is in order, but the row with a noted digest was removed."""


class DatabaseNotMigrated(ServiceError):
    """The schema is not the one this code was written for."""


class DatabaseUnavailable(ServiceError):
    """The database does not answer, or another process holds its lock."""

    status, slug, title = 503, "database-unavailable", "The database is not available"


class DatabaseFull(ServiceError):
    status, slug, title = 507, "disk-full", "The disk is full"


class DatabaseDamaged(ServiceError):
    status, slug, title = 503, "database-damaged", "The database is damaged"


class BackupError(ServiceError):
    """A backup cannot be taken or restored, or its files are not those that were written."""


class PartNotReady(ServiceError):
    """A part of the service does not work, which `/health/ready` reports."""


class BrokerError(ServiceError):
    """Redis cannot be started or reached."""

    status, slug, title = 503, "queue-unavailable", "The job queue is not available"


class GpuUnusable(ServiceError):
    """The GPU that the settings require is missing, too old for torch, or does not answer."""


class FilesUnavailable(ServiceError):
    """The S3 service with scans and files of jobs does not answer or refuses, or their key is damaged."""

    status, slug, title = 503, "files-unavailable", "The files are not available"


class FileDamaged(ServiceError):
    status, slug, title = 410, "file-damaged", "The file is damaged"


class RequestInvalid(ServiceError):
    """Fields of a request are not valid. `entries` hold the `field` and `reason` of each."""

    status, slug, title = 422, "invalid-request", "The request is not valid"

    def __init__(self, entries: Sequence[Mapping[str, str]]) -> None:
        detail = "; ".join(f"{entry['field']}: {entry['reason']}" for entry in entries)
        super().__init__(detail, errors=[dict(entry) for entry in entries])


class AuthenticationError(ServiceError):
    status = 401

    def __init__(self, message: str) -> None:
        super().__init__(message, headers={"WWW-Authenticate": 'Bearer realm="locum"'})


class CredentialMissing(AuthenticationError):
    slug, title = "credential-missing", "A credential is required"


class KeyNotValid(AuthenticationError):
    slug, title = "key-not-valid", "The API key is not valid"


class SessionOver(AuthenticationError):
    slug, title = "session-over", "The session has ended"


class CsrfTokenMissing(ServiceError):
    """A request by cookie that changes something has no `Locum-CSRF`, or a wrong one."""

    status, slug, title = 403, "csrf-token-missing", "The token against forgery is missing"


class TokenNotValid(AuthenticationError):
    slug, title = "token-not-valid", "The access token is not valid"


class ProviderUnavailable(ServiceError):
    status, slug, title = 503, "provider-unavailable", "The identity provider does not answer"


class TooManyRequests(ServiceError):
    """The caller sent more requests than `LOCUM_RATE_LIMIT` allows."""

    status, slug, title = 429, "too-many-requests", "Too many requests"


class NotOnLoopback(ServiceError):
    """The service authenticates no caller, and the request did not come over loopback."""

    status, slug, title = 403, "loopback-only", "Only loopback is answered without authentication"


class AuthorizationError(ServiceError): ...


class RoleMissing(AuthorizationError):
    status, slug, title = 403, "role-missing", "The caller has none of the roles for this"


class GrantRefused(AuthorizationError):
    status, slug, title = 403, "grant-refused", "The caller may not grant this"


class ApiKeyError(ServiceError): ...


class KeyUnknown(ApiKeyError):
    status, slug, title = 404, "key-unknown", "No such key"


class KeyOver(ApiKeyError):
    status, slug, title = 409, "key-over", "The key is over or replaced"


class KeyNameTaken(ApiKeyError):
    """A valid key of the hospital has the name."""

    status, slug, title = 409, "key-name-taken", "Another key has this name"


class HospitalUnknown(ServiceError):
    status, slug, title = 404, "hospital-unknown", "No such hospital"


class ObservationUnknown(ServiceError):
    status, slug, title = 404, "observation-unknown", "No such observation"


class CorrectionError(ServiceError): ...


class AnswerUnknown(CorrectionError):
    status, slug, title = 404, "answer-unknown", "No such answer"


class CorrectionUnknown(CorrectionError):
    status, slug, title = 404, "correction-unknown", "No such correction"


class CorrectionMismatch(CorrectionError):
    status, slug, title = 409, "correction-mismatch", "The scan is not the one that was answered"


class AnsweredScanGone(CorrectionError):
    status, slug, title = 409, "scan-gone", "The answered scan is not there"


class MayNotTrain(CorrectionError):
    """A job would learn from a cohort of corrections without consent."""

    status, slug, title = 409, "may-not-train", "The corrections may not train a model"


class SecondSignatureNeeded(ServiceError):
    """`deviations` are sentences."""

    status, slug, title = 409, "second-signature-needed", "Another person must sign this change, too"


class ShadowUnknown(ServiceError):
    status, slug, title = 404, "shadow-unknown", "No such shadow"


class ShadowRuns(ServiceError):
    status, slug, title = 409, "shadow-runs", "Another version is the shadow"


class SelectionError(ServiceError): ...


class ParametersContradict(SelectionError):
    status, slug, title = 422, "contradiction", "The parameters contradict each other"


class ModelNotNamed(SelectionError):
    """The store offers several models or none, and the request names none. `choices` are the names."""

    status, slug, title = 422, "model-not-named", "Which model?"


class AnswersHeld(SelectionError):
    status, slug, title = 409, "answers-held", "An alarm of the watch holds this model's answers"


class NothingAssigned(SelectionError):
    status, slug, title = 409, "nothing-assigned", "No version serves the hospital until one is assigned"


class VersionNotNamed(SelectionError):
    """The name of an adapted model holds candidates too, so a request must name a version."""

    status, slug, title = 422, "version-not-named", "Which version?"


class PartRequested(SelectionError):
    status, slug, title = 422, "part-of-a-model", "Not offered on its own"


class AnotherTaskKind(SelectionError):
    """The model is for another kind of task; `route` takes scans for it."""

    status, slug, title = 422, "another-kind-of-task", "A model for another kind of task"


class SiteNotNamed(SelectionError):
    """A member model was requested without a site. `choices` are the sites."""

    status, slug, title = 422, "site-not-named", "No site named"


class SiteUnknown(SelectionError):
    """The artefact has no model of this site. `choices` are its sites."""

    status, slug, title = 404, "site-not-found", "No such member"


class SiteNotShared(SelectionError):
    """A member's own model was requested by a caller of other hospitals. `choices` are the sites that may."""

    status, slug, title = 403, "site-not-shared", "Another hospital's own model"


class ClusterNotNamed(SelectionError):
    """A cluster's model was requested without a cluster. `choices` are the clusters."""

    status, slug, title = 422, "cluster-not-named", "Which cluster?"


class ClusterUnknown(SelectionError):
    """The artefact has no such cluster. `choices` are its clusters."""

    status, slug, title = 404, "cluster-not-found", "No such cluster"


class NoGlobalModel(SelectionError):
    """The artefact has no global model. `choices` are its clusters or sites."""

    status, slug, title = 422, "no-global-model", "No global model"


class NoAdaptedVersion(SelectionError):
    status, slug, title = 404, "no-adapted-version", "Nothing was adapted to this hospital"


class PrecisionUnavailable(SelectionError):
    status, slug, title = 409, "precision-unavailable", "There is no graph in this precision"


class PredictionError(ServiceError): ...


class ScanUnlikeTask(PredictionError):
    """The guard warns of the scan, and the request rejects such scans. `warnings` are the guard's."""

    status, slug, title = 422, "scan-unlike-task", "The scan does not look like the task"


class OutputMismatch(PredictionError):
    status, slug = 422, "output-mismatch"


class NoPngMask(OutputMismatch):
    title = "A volume has no PNG mask"


class NoNiftiMask(OutputMismatch):
    title = "An image has no NIfTI mask"


class NoDicomSource(OutputMismatch):
    title = "Only DICOM is answered as DICOM"


class NoVolumeToReport(OutputMismatch):
    title = "An image has no volume to report"


class NoContours(OutputMismatch):
    title = "An image has no contours in the patient"


class CodesMissing(OutputMismatch):
    title = "The labels have no codes"


class LabelsOverlap(OutputMismatch):
    title = "Overlapping labels have no label map"


class ServiceBusy(PredictionError):
    """The queue for inference is full. `retry_after` is in seconds."""

    status, slug, title = 503, "busy", "Every slot is taken"


class RunTooLong(PredictionError):
    """A run of a network took longer than `LOCUM_SECONDS_PER_SLICE` allows, and was ended."""

    status, slug, title = 503, "run-too-long", "The network took too long"


class MemoryShort(PredictionError):
    """The process could not allocate memory for a scan or its answer; what it had is free again."""

    status, slug, title = 503, "memory-short", "Not enough memory now"


class RunTooLarge(PredictionError):
    """A run of a network needs more than `LOCUM_INFERENCE_MEMORY_BYTES`."""

    status, slug, title = 503, "run-too-large", "The network needs too much memory"


class GpuMemoryFull(PredictionError):
    """The GPU has no room for a network, or for a run of one slice. `retry_after` is in seconds."""

    status, slug, title = 503, "gpu-memory-full", "The GPU's memory is full"


class GpuUnavailable(PredictionError):
    """The settings require a GPU, and onnxruntime finds none."""

    status, slug, title = 503, "no-gpu", "No GPU"


class ViewerScanError(ServiceError): ...


class ViewerScanUnknown(ViewerScanError):
    status, slug, title = 404, "viewer-scan-unknown", "No such scan"


class ViewerQuotaExceeded(ViewerScanError):
    """The scans that other callers keep leave too few bytes of the quota."""

    status, slug, title = 507, "viewer-quota", "No room for a viewer's scan"


class AssignmentError(ServiceError): ...


class AssignmentStale(AssignmentError):
    status, slug, title = 412, "assignment-stale", "The serving log has moved on"


class NothingToRollBack(AssignmentError):
    """No assignment came before the present one."""

    status, slug, title = 409, "nothing-to-roll-back", "There is no earlier assignment"


class PartNotAssignable(AssignmentError):
    status, slug, title = 409, "part-of-a-composite", "Not offered on its own"


class AdaptedToAnother(AssignmentError):
    status, slug, title = 409, "adapted-to-another", "Adapted to another hospital"


class AnotherModel(AssignmentError):
    status, slug, title = 409, "another-model", "A version of another model"


class SecondPersonNeeded(AssignmentError):
    """The caller adapted the version. `job` made it."""

    status, slug, title = 403, "second-person-needed", "Another caller has to assign this version"


class GateNotPassed(AssignmentError):
    """The version did not pass its gate. `job` made it, `gate` is the verdict."""

    status, slug, title = 409, "gate-refused", "The gate does not let this candidate serve"


class AcceptanceMissing(AssignmentError):
    """`acceptances` are the jobs that measured the version at this hospital, and were not approved."""

    status, slug, title = 409, "acceptance-missing", "The hospital demands an acceptance first"


class CohortError(ServiceError): ...


class CohortUnknown(CohortError):
    status, slug, title = 404, "cohort-unknown", "No such cohort or scan"


class CohortDeleted(CohortError):
    status, slug, title = 410, "cohort-gone", "The scans of the cohort were deleted"


class CohortInUse(CohortError):
    status, slug, title = 409, "cohort-in-use", "A job needs the scans of the cohort"


class ScanNameTaken(CohortError):
    status, slug, title = 409, "scan-name-taken", "Another scan has this name"


class MaskTaken(CohortError):
    """The scan has a mask of other bytes, or another scan has its name by now."""

    status, slug, title = 409, "mask-taken", "The scan has another mask"


class MaskStale(CohortError):
    """The scan's mask is not the one that the client means to replace."""

    status, slug, title = 412, "mask-stale", "The mask has changed"


class CohortFull(CohortError):
    """There is no room for another scan."""

    status, slug, title = 507, "cohort-full", "No room for another scan"


class CohortEmpty(CohortError):
    status, slug, title = 422, "cohort-empty", "There is no scan to adapt to"


class PacsError(ServiceError): ...


class PacsUnknown(PacsError):
    status, slug, title = 404, "pacs-unknown", "No such PACS"


class PacsReadOnly(PacsError):
    """The PACS is configured without `store`."""

    status, slug, title = 409, "pacs-read-only", "Nothing may be stored in this PACS"


class PacsUnavailable(PacsError): ...


class PacsRefused(PacsError): ...


class SeriesMissing(PacsError): ...


class SeriesMismatched(PacsError):
    """The PACS sends instances of another study or series than the requested one."""


class PacsJobFailed(PacsError):
    """The query finds too much, the PACS did not answer for too long, or the request is gone."""


class JobError(ServiceError): ...


class JobUnknown(JobError):
    status, slug, title = 404, "job-unknown", "No such job"


class JobStillRunning(JobError):
    """The job still waits or runs."""

    status, slug, title = 409, "job-not-over", "The job is not over"


class JobMakesNoMask(JobError):
    """A job of this kind ends with a candidate or a cohort, not with a result."""

    status, slug, title = 404, "no-result", "This job makes no mask"


class JobWithoutMask(JobError):
    status, slug, title = 409, "job-without-result", "The job made no mask"


class JobFilesDeleted(JobError):
    status, slug, title = 410, "files-deleted", "The result was deleted"


class QueueFull(JobError):
    """The hospital, or the caller without one, has as many waiting jobs as the limit allows."""

    status, slug, title = 503, "queue-full", "Too many jobs wait for a worker"


class TooManyFollowers(JobError):
    status, slug, title = 503, "busy", "Too many clients follow jobs"


class IdempotencyConflict(JobError):
    status, slug, title = 422, "idempotency-key-reused", "The key belongs to another request"


class NotAdaptable(JobError):
    status, slug, title = 422, "not-adaptable", "This kind of artefact cannot be adapted"


class NotAdaptableToScan(NotAdaptable):
    """The artefact is of a kind that no job adapts to one scan."""

    title = "This kind of artefact cannot be adapted to one scan"


class NothingToMove(NotAdaptable):
    """The artefact's own network has nothing that the preset moves."""

    title = "This network has nothing that the preset moves"


class NothingToMoveByScan(NotAdaptableToScan):
    """The same of a preset for one scan."""

    title = "This network has nothing that the preset moves for one scan"


class NotReducible(JobError):
    status, slug, title = 422, "not-reducible", "No other graph can be made of this network"


class CandidateNotCheckable(JobError):
    status, slug, title = 409, "candidate-not-checkable", "There is no candidate that masks can check"


class NotAcceptable(JobError):
    status, slug, title = 422, "not-acceptable", "This version cannot be scored beside masks"


class NoAcceptance(JobError):
    status, slug, title = 409, "no-acceptance", "The job has no report of an acceptance"


class AcceptanceSuperseded(JobError):
    status, slug, title = 409, "acceptance-superseded", "A later report takes the place of this one"


class AcceptanceNotMet(JobError):
    status, slug, title = 409, "acceptance-not-met", "The thresholds are not met"


class MemberCannotJoin(JobError):
    status, slug, title = 422, "member-cannot-join", "The hospital is a member already"


class MasksMissing(JobError):
    status, slug, title = 422, "masks-missing", "These masks do not suffice"


class MasksInvalid(JobError):
    status, slug, title = 422, "mask-mismatch", "These masks do not fit the model"


class ScanQuotaExceeded(JobError):
    """The scans that wait for a worker have as many bytes as the quota allows."""

    status, slug, title = 507, "no-room", "No room for the scan"


class DiskFull(JobError):
    """The disk has no room for the scan of a job."""

    status, slug, title = 507, "disk-full", "No room for the scan"


class LeaseLost(JobError):
    """The worker's lease is not in force any more: it must stop, and may write nothing."""


class JobCancelled(JobError):
    """The job must stop. Raised inside a worker, between two steps of its work."""


class AdaptationRejected(JobError):
    """The artefact is of a kind that cannot be adapted, or the cohort has no scan."""


class ScanJobTooLong(JobError):
    """The scan of a job would take longer than `LOCUM_SCAN_JOB_SECONDS`."""


class ScanGone(JobError):
    """The scan of a job on one scan was deleted before the job began."""
