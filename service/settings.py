"""Settings of the service: `LOCUM_<NAME>` in the environment, with defaults for a laptop without a GPU."""

from __future__ import annotations

import math
import os
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from limits import parse_many
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from model_store.errors import KeyUnusable
from model_store.graphs import operators_of
from model_store.scan import Limits
from model_store.signing import Signer, TrustedKeys
from model_store.store import DEFAULT_CACHE, Store, located
from model_store.task import Task
from model_store.volume import MOST_CHANNELS
from service.errors import SettingsInvalid
from service.files import Files, open_files
from service.inference.limits import GraphLimits
from service.validation import PREFIX_PATTERN, is_loopback
from service.webhooks import Webhook, read_webhooks

# An image of this size is taken whatever the network: it costs tenths of a second.
_ALWAYS_TAKEN_PIXELS = 2048 * 2048


def scan_limits(settings: Settings, task: Task | None = None) -> Limits:
    """For decoding, in the API and in the worker alike.

    Where the scan is for a network of `task`, an image has at most `max_pixels_per_input` times the pixels of
    its input, or 2048 x 2048: what it has beyond costs time, and the network does not see it.
    """
    limits = Limits(
        max_bytes=settings.max_upload_bytes,
        max_pixels=settings.max_pixels,
        max_voxels=settings.max_voxels,
        max_decompressed=settings.max_decompressed_bytes,
        max_windows=settings.most_windows,
    )
    if task is None:
        return limits
    if task.is_volume:
        return replace(limits, max_channels=task.channel_count if task.stacked else 1)
    usable = max(_ALWAYS_TAKEN_PIXELS, settings.max_pixels_per_input * math.prod(task.size))
    if usable >= limits.max_pixels:
        return limits
    size = " x ".join(map(str, task.size))
    return replace(limits, max_pixels=usable, pixels_for=f"for a network's input of {size}")


def cohort_limits(settings: Settings, task: Task | None = None) -> Limits:
    """For scans of a cohort, each of which every model may be adapted to.

    Without a `task` a volume may have as many channels along its fourth axis as any task; a job then refuses
    what its own task does not have. An image is not bounded by the task's size.
    """
    if task is not None and task.is_volume:
        return scan_limits(settings, task)
    return replace(scan_limits(settings), max_channels=MOST_CHANNELS if task is None else 1)


def graph_limits(settings: Settings) -> GraphLimits:
    """For networks, in the API and in the worker alike."""
    return GraphLimits(
        operators=settings.graph_operators,
        seconds_per_slice=settings.seconds_per_slice,
        memory_bytes=settings.inference_memory_bytes,
        gpu_memory_bytes=settings.gpu_memory_bytes,
        tensorrt=settings.tensorrt,
    )


def _located(location: Path | str) -> Path | str:
    found = located(location)
    return _absolute(found) if isinstance(found, Path) else found


def _absolute(path: Path) -> Path:
    # A worker, or a server that a process manager starts, has another working directory than the person who
    # wrote the setting: a relative path is fixed once, here.
    return path.expanduser().absolute()


def _listed(value: str | tuple[str, ...]) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(part.strip() for part in parts if part.strip())


def _rates(value: str) -> str:
    parse_many(value)
    return value


def _device(value: str) -> str:
    if re.fullmatch(r"auto|cpu|openvino|cuda(:[0-9]{1,2})?", value) is None:
        raise ValueError("expected auto, cpu, openvino, cuda, or cuda:N for the GPU number N")
    return value


def _loaded_by(load: Callable[[Path], object]) -> Callable[[Path], Path]:
    """A validator: a file that cannot be used is reported when the process starts, not at its first use."""

    def check(path: Path) -> Path:
        try:
            load(path)
        except KeyUnusable as error:
            raise ValueError(str(error)) from error
        return path

    return check


FolderPath = Annotated[Path, AfterValidator(_absolute)]

MEBIBYTE = 1024 * 1024
PREFIX = "LOCUM_"


class Settings(BaseSettings):
    """Configuration of API and worker; frozen, so that it never changes during a request."""

    # Empty is how a compose file says unset, and how typer reads it.
    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, frozen=True, validate_default=True
    )

    # where things are
    store: Annotated[Path | str, BeforeValidator(_located)] = Field(
        Path(".locum/store"), description="of the published artefacts: a folder, or s3://BUCKET/PREFIX"
    )
    cache: FolderPath = Field(
        DEFAULT_CACHE, description="folder of what was read from a bucket, at most 10 GiB"
    )
    trusted_keys: Annotated[FolderPath, AfterValidator(_loaded_by(TrustedKeys.load))] | None = Field(
        None, description="public keys (PEM), a file or folder; only versions signed by one are opened"
    )
    signing_key: Annotated[FolderPath, AfterValidator(_loaded_by(Signer.load))] | None = Field(
        None, description="file of the private key (PEM) that signs the versions that jobs publish"
    )
    graph_operators: Annotated[tuple[str, ...], NoDecode, BeforeValidator(operators_of)] = Field(
        (),
        description="operators that graphs may have beyond those of Locum's and MONAI's networks, by commas",
    )
    state_dir: FolderPath = Field(
        Path(".locum/state"), description="database, Redis, uploads; where `files` is unset, also those"
    )
    files: Annotated[Path | str, BeforeValidator(_located)] | None = Field(
        None,
        description="of cohorts and jobs: a folder, or s3://BUCKET/PREFIX; state_dir when unset",
    )
    database_url: SecretStr | None = Field(
        None,
        description="SQLAlchemy URL, such as postgresql+psycopg://...; SQLite in state_dir when unset",
    )
    redis_url: SecretStr | None = Field(
        None, description="redis://, rediss:// or unix:// URL; an embedded Redis in state_dir when unset"
    )

    # who may call
    auth: Literal["none", "keys", "oidc", "both"] = Field(
        "none", description="how callers are authenticated; `none` serves loopback only"
    )

    oidc_issuer: str | None = Field(
        None, description="URL of the OpenID provider, as its tokens have it in `iss`"
    )
    oidc_audience: str | None = Field(None, description="what its tokens for Locum have in `aud`")
    oidc_role_claim: str = Field(
        "locum_roles", description="claim with roles; dots lead into its members, as in realm_access.roles"
    )
    oidc_hospital_claim: str = Field(
        "locum_hospitals", description="claim with ids of hospitals; `*` is every hospital"
    )
    oidc_leeway_seconds: int = Field(30, ge=0, le=300, description="tolerated difference of the clocks")
    two_person_rule: bool = Field(
        False, description="whether an adapted version must be assigned by another caller than adapted it"
    )

    session_hours: float = Field(8, gt=0, le=24 * 7, description="hours until a browser has to sign in again")
    rate_limit: Annotated[str, AfterValidator(_rates)] = Field(
        "1200/minute", description="requests of each authenticated caller, such as 600/minute; 20000/day"
    )

    # the listening socket
    host: str = Field("127.0.0.1", description="address to listen on; loopback only where `auth` is none")
    port: int = Field(8000, ge=0, le=65535)

    allowed_hosts: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_listed)] = Field(
        ("localhost", "127.0.0.1", "[::1]"),
        description="hosts that the Host header may name, separated by commas; * for every host",
    )

    allowed_origins: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_listed)] = Field(
        (),
        description="origins of other pages that may call, such as https://viewer.example, by commas",
    )
    root_path: str = Field(
        "",
        pattern=PREFIX_PATTERN,
        description="path at which a proxy serves this service and which it strips, such as /locum; without "
        "it, the X-Forwarded-Prefix of a proxy that FORWARDED_ALLOW_IPS names",
    )
    tls_certificate: FolderPath | None = Field(
        None, description="certificate chain (PEM); with tls_key, `python -m service` speaks HTTPS"
    )
    tls_key: FolderPath | None = Field(None, description="the certificate's private key (PEM)")

    # which version answers
    new_versions: Literal["keep", "serve"] = Field(
        "keep",
        description="whether a hospital without a decision keeps its version when a newer one is published "
        "(`keep`), or is served the newer one (`serve`)",
    )

    # limits of one request
    max_upload_bytes: int = Field(512 * MEBIBYTE, gt=0, description="size of one uploaded scan")
    max_decompressed_bytes: int = Field(512 * MEBIBYTE, gt=0, description="its size after gzip or deflate")
    max_pixels: int = Field(32_000_000, gt=0, description="height times width of a two-dimensional image")
    max_pixels_per_input: int = Field(
        256,
        gt=0,
        description="height times width of a two-dimensional image, in multiples of the network's input; one "
        "of 2048 x 2048 is always taken",
    )
    max_voxels: int = Field(128_000_000, gt=0, description="number of voxels of a volume, channels included")

    # how much work goes on at once
    inference_slots: int = Field(1, gt=0, description="scans decoded or in inference at the same time")
    inference_queue: int = Field(8, ge=0, description="scans that may wait for a slot; above that, 503")
    max_followers: int = Field(
        200,
        gt=0,
        description="clients that may follow jobs at the same time; above that, 503",
    )
    session_cache: int = Field(
        4, gt=0, description="networks kept loaded; the least recently used is dropped first"
    )
    threads: int = Field(0, ge=0, description="cores per inference; 0 leaves it to onnxruntime")
    seconds_per_slice: float = Field(
        60, gt=0, description="seconds of a run of a network for each of its slices; then it is ended"
    )
    volume_seconds: float = Field(
        30, gt=0, description="seconds for all runs on a scan; a job segments one that would take longer"
    )
    turn_seconds: float = Field(
        2,
        gt=0,
        description="seconds for which a scan keeps its slot while scans of other hospitals wait",
    )
    most_windows: int = Field(
        10_000, gt=0, description="windows of the network that a volume may take; one with more is refused"
    )
    inference_memory_bytes: int = Field(
        0,
        ge=0,
        description="memory of all runs of networks on the CPU together; 0 for three quarters of the "
        "machine's or container's",
    )
    gpu_memory_bytes: int = Field(
        0,
        ge=0,
        description="memory on the GPU of one loaded network, or of a worker; 0 for no bound",
    )
    tensorrt: bool = Field(
        False,
        description="ask onnxruntime for TensorRT before CUDA on a GPU: other bits, and minutes per graph",
    )
    device: Annotated[str, AfterValidator(_device)] = Field(
        "auto",
        description="of inference and jobs: `auto`, `cpu`, `openvino` (the CPU, inference by OpenVINO), "
        "`cuda` or `cuda:N`; the last three never fall back",
    )

    # the worker
    embedded_worker: bool = Field(True, description="whether `python -m service` starts a worker")
    hard_limit_seconds: int = Field(6 * 3600, gt=0, description="a task that runs longer is killed")
    scan_job_seconds: int = Field(
        3600, gt=0, description="seconds of a job that segments one scan; one that would take longer fails"
    )
    verify_every_seconds: int = Field(
        24 * 3600,
        ge=0,
        description="interval at which the worker hashes every artefact again; 0: never",
    )

    # jobs
    lease_seconds: int = Field(
        20, gt=0, description="seconds without a heartbeat before a worker's job is reassigned"
    )
    reconcile_every_seconds: float = Field(
        2.0, gt=0, description="interval of the check for orphaned jobs and lost messages"
    )
    resend_seconds: int = Field(
        30, gt=0, description="seconds before a queued job with a lost message is sent again"
    )
    max_attempts: int = Field(
        5, gt=0, description="attempts, each lost with its worker, after which a job fails"
    )
    jobs_on: Literal["any", "cpu", "cuda"] = Field(
        "any", description="workers that take new jobs: `any`, those on the `cpu`, or those on a GPU (`cuda`)"
    )
    max_waiting_jobs: int = Field(
        500, gt=0, description="jobs of one hospital that may wait for a worker; above that, 503"
    )
    max_wait_seconds: int = Field(60, ge=0, description="longest `Prefer: wait`, in seconds")

    # scans of patients that are kept for a while
    cohort_lifetime_days: float = Field(30, gt=0, description="days until a cohort's scans are deleted")
    job_files_lifetime_days: float = Field(
        30, gt=0, description="days after a job's end until its pictures, checkpoint and result are deleted"
    )
    correction_days: float = Field(
        365,
        gt=0,
        description="days after the last correction until a cohort of corrections is deleted",
    )
    observation_days: float = Field(
        800, gt=0, description="days until what was observed of an answer is deleted; it has no pixel"
    )
    watch_webhooks: SecretStr | None = Field(
        None,
        description="addresses that alarms of the watch are sent to: JSON, a list of objects such as "
        '{"url": "https://…", "secret": "whsec_…"}',
    )
    cohort_quota_bytes: int = Field(
        20 * 1024 * MEBIBYTE,
        ge=0,
        description="bytes of all cohorts' scans together, of all scan jobs, of all viewers' scans, and of a "
        "hospital's kept answers; half of them for one hospital where several are registered",
    )
    reserve_bytes: int = Field(
        16 * MEBIBYTE,
        ge=0,
        description="bytes that are kept in state_dir, so that scans can be deleted on a full disk",
    )
    max_cohort_scans: int = Field(2000, gt=0, description="scans in one cohort")

    # the page for people
    page: bool = Field(True, description="whether the page is served at /")

    # 3D Slicer, OHIF and other viewers
    monailabel: Literal["off", "prefix", "root"] = Field(
        "off",
        description="the interface of MONAI Label for viewers: at /monailabel (`prefix`), also at the `root`",
    )
    viewer_scan_minutes: float = Field(
        60, gt=0, le=24 * 60, description="minutes after its last use until a viewer's scan is deleted"
    )
    max_viewer_scans: int = Field(
        20, gt=0, description="scans that a caller's viewers keep; the least recently used is deleted first"
    )
    viewer_wait_seconds: int = Field(
        1800, gt=0, description="longest that a viewer's request waits for a job, which is then cancelled"
    )

    # PACS
    pacs: FolderPath | None = Field(
        None, description="file (YAML) of the PACS that scans come from, and segmentations go to"
    )
    dicom_node: FolderPath | None = Field(None, description="file (YAML) of `python -m service.dicom_node`")
    worklist: FolderPath | None = Field(None, description="file (YAML) of `python -m service.worklist`")

    # logging
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    log_format: Literal["json", "plain"] = "json"

    @field_validator("host")
    @classmethod
    def _only_loopback_is_open(cls, host: str, info: ValidationInfo) -> str:
        # The message never repeats the value; see `read_settings`.
        if info.data.get("auth") == "none" and not is_loopback(host):
            raise ValueError(
                "Locum would answer other machines without authentication (LOCUM_AUTH=none). Set "
                "LOCUM_AUTH=keys, and create the first key: python -m service keys create first --role admin"
            )
        return host

    @field_validator("oidc_issuer", "oidc_audience")
    @classmethod
    def _oidc_needs_both(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None and info.data.get("auth") in ("oidc", "both"):
            raise ValueError("is required where LOCUM_AUTH is oidc or both")
        if value is not None and info.field_name == "oidc_issuer":
            found = urlsplit(value)
            safe = found.scheme == "https" or (found.scheme == "http" and is_loopback(found.hostname or ""))
            if not safe or found.query or found.fragment:
                raise ValueError("expected an https:// URL (http:// on loopback) without query and fragment")
        return value

    @field_validator("tls_key")
    @classmethod
    def _tls_needs_both(cls, key: Path | None, info: ValidationInfo) -> Path | None:
        certificate = info.data.get("tls_certificate")
        if (key is None) != (certificate is None):
            raise ValueError("tls_certificate and tls_key are set together, or neither is")
        if key is not None and certificate is not None:
            try:
                ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
            except (OSError, ssl.SSLError) as error:
                raise ValueError(f"the certificate and its key cannot be used: {error}") from error
        return key

    @field_validator("watch_webhooks")
    @classmethod
    def _webhooks_are_read(cls, said: SecretStr | None) -> SecretStr | None:
        if said is not None:
            read_webhooks(said.get_secret_value())
        return said

    @field_validator("two_person_rule")
    @classmethod
    def _two_people_are_known(cls, rule: bool, info: ValidationInfo) -> bool:
        if rule and info.data.get("auth") == "none":
            raise ValueError(
                "without authentication every caller is anonymous: set LOCUM_AUTH to keys, oidc or both"
            )
        return rule

    @property
    def resolved_database_url(self) -> str:
        """The SQLAlchemy URL in force."""
        if self.database_url is not None:
            return self.database_url.get_secret_value()
        return f"sqlite:///{self.state_dir / 'locum.db'}"

    @cached_property
    def webhooks(self) -> tuple[Webhook, ...]:
        """What `watch_webhooks` names."""
        return () if self.watch_webhooks is None else read_webhooks(self.watch_webhooks.get_secret_value())

    def open_store(self) -> Store:
        """The store of published artefacts. Raises KeyUnusable."""
        return Store(
            self.store,
            self.cache,
            signer=None if self.signing_key is None else Signer.load(self.signing_key),
            trusted=None if self.trusted_keys is None else TrustedKeys.load(self.trusted_keys),
            operators=self.graph_operators,
        )

    def open_files(self) -> Files:
        """The files of cohorts, jobs and viewers. Raises FilesUnavailable."""
        return open_files(self.files or self.state_dir)

    def make_state_dir(self) -> None:
        """Create `state_dir`, which other users cannot read; it may hold names of patients.

        Raises:
            SettingsInvalid: it cannot be created, or it belongs to another user and is open to all.
        """
        try:
            self.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            mode = self.state_dir.stat().st_mode
            # Only its owner may close it. A mounted volume can belong to root, and be closed already.
            if mode & 0o007:
                self.state_dir.chmod(mode & 0o770)
        except PermissionError as error:
            raise SettingsInvalid(
                f"{PREFIX}STATE_DIR: expected a folder that this user can close to others, found "
                f"{self.state_dir} ({error.strerror}): name a new folder inside one that this user can write"
            ) from error

    @property
    def spool(self) -> Path:
        """Folder of uploads; a file is deleted with its request."""
        return self.state_dir / "spool"


FileReaders = Mapping[str, Callable[[Path], object]]
"""By the name of a setting, what reads the file that it names. Raises SettingsInvalid."""


def read_settings(files: FileReaders | None = None, /, **given: Any) -> Settings:
    """From the environment; what is given comes first.

    Args:
        files: of this process: each is read now, so that a wrong one is reported before its first use.
        given: by the setting's name.

    Raises:
        SettingsInvalid: names every wrong one as it is set, without its value: an address may have a
            password in it.
    """
    wrong = []
    try:
        settings = Settings(**given)
    except ValidationError as error:
        wrong = [f"{PREFIX}{str(each['loc'][0]).upper()}: {each['msg']}" for each in error.errors()]
    else:
        for name, read in (files or {}).items():
            try:
                if (path := getattr(settings, name)) is not None:
                    read(path)
            except SettingsInvalid as error:
                wrong.append(f"{PREFIX}{name.upper()}: {error}")
    if wrong:
        raise SettingsInvalid("; ".join(wrong))
    return settings


def settings_or_exit(files: FileReaders | None = None) -> Settings:
    """For a process that uvicorn or celery start: a wrong setting ends it with a line, no traceback."""
    try:
        return read_settings(files)
    except SettingsInvalid as error:
        raise SystemExit(f"locum: {error}") from None


OF_CLIENTS = ("LOCUM_HOSPITAL", "LOCUM_KEY", "LOCUM_URL")
"""Variables of the `locum` command and the client, which the service does not read."""


def ignored_variables() -> list[str]:
    """A line on each variable `LOCUM_...` that is no setting, with the one that is alike."""
    known = [f"{PREFIX}{name.upper()}" for name in Settings.model_fields]
    lines = []
    for name in sorted(os.environ):
        if name.upper().startswith(PREFIX) and name.upper() not in (*known, *OF_CLIENTS):
            alike = get_close_matches(name.upper(), known, n=1, cutoff=0.8)
            lines.append(f"{name} is ignored: no such setting" + (f", but {alike[0]}" if alike else ""))
    return lines
