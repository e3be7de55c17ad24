"""The messages between a hospital and the operator: JSON that is validated, and chunks of tensor files.

    hospital                          operator
    hello     About                -> Planned       what the hospital tells of itself; runs to come
    invite    Asking               -> Invitation    what would run: method, configuration, task, digests
    join      Announcement         -> Welcome       the hospital's policy and counts; the operator's session
    next      Session              -> Next          a task, nothing yet, or the end of the run
    read      Slice                -> bytes         a chunk of a group's download
    write     Slice + bytes        -> Written       a chunk of a group's upload
    alive     Alive                -> {}            how far the step is, every ten seconds while it computes
    done      Report               -> {}            the step's result
    leave     Leave                -> {}            the hospital stops

    (door)    KeptOut              -> one byte      TLS refused one of the two certificates; not by a cell

Every request but the first two names the session that `join` opened, so an older process of a hospital, or
one with a revoked certificate, cannot continue, not even its step. The operator sends only `wake`: there is
a task to ask for.

`PROTOCOL` is the version of this wire, and the only one that must be equal: Locum's own may differ. A later
version may add topics, which the other side rejects as unknown, and fields with defaults, which it leaves
out. All else is a change of the wire's version.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from datetime import date
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from model_store.task import Task
from training.algorithm import Algorithm, GroupKind
from training.bounds import FeatureBounds
from training.config import MethodConfig, RunConfig
from training.data.cases import Split
from training.network.cell import Rejected
from training.privacy import PrivacyDemand
from training.publish import software

PROTOCOL = 4
_LAST_SILENT = 3
# By ALPN (RFC 7301), with which a hospital that TLS keeps out asks to be heard.
KEPT_OUT = "locum-kept-out"
# Another version of these may compute other bits.
_COMPARED = ("locum", "torch", "numpy")

# Printable ASCII, since names are shown on terminals and in reports.
Name = Annotated[str, Field(pattern=r"^[ -~]{1,128}$")]
# A metric of a label ends in it, and a task's labels may be in any script: the operator compares them.
MetricName = Annotated[str, Field(pattern=r"^[ -~]{1,128}(?s:/.{1,1000})?$")]
_MOST_METRICS = 8192  # those of the end are some twenty for each label and model
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, le=2**50)]
# More files than a hospital has.
Files = Annotated[int, Field(ge=0, le=10**7)]
# A label of a task, in any script.
LabelName = Annotated[str, Field(min_length=1, max_length=1000)]
SlotName = Annotated[str, Field(pattern=r"^[a-z]$")]


class Message(BaseModel):
    """Base of all messages: immutable. Fields of later versions are left out."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Found(Message):
    """A finding of the check at a hospital, see `training.network.checking`."""

    part: Name
    state: Literal["ok", "warning", "wrong"]
    words: Annotated[str, Field(max_length=500)]


class PlannedRun(Message):
    """A run of the operator's calendar that a hospital is in."""

    id: Name
    what: Annotated[str, Field(max_length=200)]
    on: date


class Planned(Message):
    """The runs that are planned with a hospital."""

    runs: Annotated[tuple[PlannedRun, ...], Field(max_length=1000)] = ()


class Agreed(Message):
    """That a person at a hospital agreed to a planned run."""

    by: Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]{1,100}$")]
    at: AwareDatetime


class About(Message):
    """What a hospital tells of itself, as its policy permits: nothing of a patient.

    `kit` and `policy` are digests of its certificate and its policy. `findings` are those of its check,
    `patients` and `labels` the patients and the masks with each label of its folder, once a run has read it.
    They are left out where `reports: false` in the policy. `agreed` has the planned runs that a person agreed
    to, by their ids.
    """

    protocol: int
    locum: Name
    clock: AwareDatetime
    kit: Digest
    policy: Digest
    agreed: Annotated[dict[Name, Agreed], Field(max_length=1000)] = {}
    device: Name | None = None
    free_gib: Annotated[FiniteFloat, Field(ge=0)] | None = None
    patients: Files | None = None
    labels: Annotated[dict[LabelName, Files], Field(max_length=1000)] | None = None
    findings: Annotated[tuple[Found, ...], Field(max_length=30)] = ()


class KeptOut(Message):
    """What a hospital that TLS keeps out says at the operator's door: its certificate (PEM) and its clock."""

    certificate: Annotated[str, Field(max_length=20_000)]
    clock: AwareDatetime


class Asking(Message):
    """That a hospital asks what would run, by the version of the wire that it speaks."""

    protocol: int


class Invitation(Message):
    """What the operator would run. `run` is an id that stays when the run is resumed."""

    protocol: int
    software: dict[Name, Name]
    run: Digest
    method: Name
    config: dict[Name, Any]
    settings: dict[Name, Any]
    task: dict[Name, Any]
    plan_digest: Digest
    configuration_digest: Digest
    nonce: Name


class Announcement(Message):
    """What a hospital says of itself.

    `scored` is how many images the scores of a classification count, `images` how many training images
    (slices) there are: the hospital's weight is at most that. It is unknown of a run that an older operator
    began. `signature` is over the invitation's
    nonce, by the key of `certificate` (PEM).
    """

    protocol: int
    software: dict[Name, Name]
    plan_digest: Digest
    configuration_digest: Digest
    allows: tuple[GroupKind, ...]
    consents: bool
    bounds: FeatureBounds
    privacy: PrivacyDemand | None
    digest: Digest
    splits_digest: Digest
    files: dict[Split, Files]
    patients: dict[Split, Files]
    scored: Count | None = None
    images: Count | None = None
    nonce: Name
    certificate: Annotated[str, Field(max_length=20_000)]
    signature: Annotated[str, Field(max_length=2_000)]


class Welcome(Message):
    """The session that the operator opened."""

    session: Name


class Session(Message):
    """A request within a session."""

    session: Name


class TaskMessage(Message):
    """A step to run from the memory in `slot`, with the new one written to `to`.

    `downloads` has the bytes of each group's file.
    """

    id: Name
    step: Annotated[int, Field(ge=0, le=10_000)]
    round: Annotated[int, Field(ge=0, le=10**7)]
    slot: SlotName | None
    to: SlotName
    downloads: dict[Name, Count]


class Next(Message):
    """A task, or the end of the run; neither means that there is nothing to do yet.

    After the end, `follows` says that the operator soon invites to another run: the one that was planned.
    """

    task: TaskMessage | None = None
    over: Name | None = None
    follows: bool = False


class Slice(Session):
    """A part of a group's file, from `offset`. `total` is the size of the whole upload."""

    task: Name
    group: Name
    offset: Count
    total: Count = 0


class Written(Message):
    """How many bytes of the file the operator has."""

    at: Count


class Alive(Session):
    """How far the step of a task is: batches done, of those planned so far; 0 of 0 where it does not say."""

    task: Name
    done: Count = 0
    planned: Count = 0


class SpentMessage(Message):
    """What a group that left with noise has cost the hospital so far (`training.privacy.Spent`)."""

    clip: Annotated[FiniteFloat, Field(gt=0)]
    noise: Annotated[FiniteFloat, Field(gt=0)]
    releases: Count
    epsilon: Annotated[FiniteFloat, Field(ge=0)]
    delta: Annotated[FiniteFloat, Field(gt=0, lt=1)]


class Report(Session):
    """The end of a step: its result, or the reason why it failed."""

    task: Name
    failure: Annotated[str, Field(max_length=2_000)] | None = None
    groups: Annotated[tuple[Name, ...], Field(max_length=64)] = ()
    weight: FiniteFloat = 0.0
    metrics: Annotated[dict[MetricName, FiniteFloat], Field(max_length=_MOST_METRICS)] = {}
    withheld: Annotated[tuple[Name, ...], Field(max_length=64)] = ()
    slot: SlotName | None = None
    seconds: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    privacy: Annotated[dict[Name, SpentMessage], Field(max_length=64)] = {}


class Leave(Session):
    """The hospital stops taking part, for a reason."""

    reason: Annotated[str, Field(max_length=500)]


Kind = TypeVar("Kind", bound=Message)


def pack(message: Message, body: bytes = b"") -> bytes:
    """Write a message, and bytes after it."""
    head = message.model_dump_json().encode()
    return len(head).to_bytes(4, "big") + head + body


def unpack(kind: type[Kind], content: bytes) -> tuple[Kind, bytes]:
    """Read a message and the bytes after it. Raises Rejected."""
    length = int.from_bytes(content[:4], "big")
    try:
        if len(content) < 4 + length:
            raise ValueError("it is cut short")
        return kind.model_validate_json(content[4 : 4 + length]), content[4 + length :]
    except (ValidationError, ValueError, RecursionError) as error:
        first = str(error).splitlines()[:3]
        raise Rejected(f"not a message of kind {kind.__name__}: {' '.join(first)[:400]}") from error


def check_wire(site: str, asking: bytes) -> None:
    """Check that a hospital speaks this wire, by its `invite`, which up to version 3 has no content.

    Raises Rejected: both sides see its words.
    """
    spoken = unpack(Asking, asking)[0].protocol if asking else _LAST_SILENT
    if problem := other_wire(spoken, site, PROTOCOL, "the operator"):
        raise Rejected(problem, "mismatch")


def other_wire(spoken: int, site: str, expected: int, operator: str) -> str | None:
    """What a hospital and an operator of two versions of the wire are to do; None where these are equal."""
    if spoken == expected:
        return None
    where = site if spoken < expected else operator
    return (
        f"{site} speaks version {spoken} of the wire, {operator} {expected}: upgrade Locum at {where} (`pip "
        "install --upgrade 'locum[network]'`, or a newer checkout), and start it again"
    )


def versions() -> dict[str, str]:
    """The versions that are compared when a hospital joins."""
    found = software()
    return {name: found[name] for name in _COMPARED}


def plan_digest(algorithm: Algorithm) -> str:
    """Digest a method's plan: phases, rounds, groups, kinds, reductions, consent."""
    return _digest([[type(step).__name__, _declared(step)] for step in algorithm.plan()])


def _declared(step: Any) -> dict[str, Any]:
    """The fields of a step or group without functions: what a side computes and checks is its own affair."""
    content = {field.name: getattr(step, field.name) for field in fields(step)}
    return {
        name: [_declared(group) for group in value] if isinstance(value, tuple) else value
        for name, value in content.items()
        if not callable(value)
    }


def settings_of(settings: RunConfig) -> dict[str, Any]:
    """The settings that a hospital needs for its steps."""
    fields = ("seed", "test", "val", "keep_empty", "device", "threads", "privacy")
    content = settings.model_dump(mode="json")
    return {name: content[name] for name in fields}


def configuration_digest(method: str, config: MethodConfig, settings: Mapping[str, Any], task: Task) -> str:
    """Digest what determines the steps of a run beside the data."""
    return _digest([method, config.identity(), dict(settings), task.model_dump(mode="json")])


def differences(ours: Mapping[str, str], theirs: Mapping[str, str], them: str) -> list[str]:
    """Say which versions differ, and what that means. Plan and configuration must be equal anyway."""
    found = []
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            what = (
                "the same steps run, since plan and configuration are equal"
                if name == "locum"
                else "results agree to rounding, and the digests of this run will not be reproduced"
            )
            found.append(f"{name} is {theirs.get(name)} at {them} and {ours.get(name)} here: {what}")
    return found


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
