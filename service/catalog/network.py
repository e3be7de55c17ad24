"""Resolve a request to the network that answers it.

The version: the one named in the reference; else the one assigned to the hospital, or that it was first
served; else the newest that is not withdrawn. The network within it, by personalization:

    hospital the version that was adapted to the hospital and assigned to it
    member   the site's own; `site` names it, else the hospital's own site. Another hospital's caller is
             answered by it where that hospital shares it
    cluster  the one that `cluster` names, else that of the hospital's own site
    global   the federation's
    auto     the hospital's adapted version, if one is assigned; else the member model of the hospital's site,
             if the hospital is a member and the version has one (in a routing space: one that beat the global
             model on its validation patients); else that of its cluster; else the global
             model
    scan     that of each scan: an ssf-pool adapts its one network to every scan by itself, and offers nothing
             else, so that it is `auto` there too. Other kinds are adapted to a scan by a lens before the
             global model, or where that moves, too, by a job (`service.adaptation.scan_requests`)

Where an adapted version is assigned, `global` and `member` are those of the artefact it was made from. An
adapted version that is named (`brain.at-dune@1`) answers by itself, assigned or not: how a candidate is
looked at; so does a graph in another precision (`brain.int8@1`). An assigned or kept version that was
withdrawn is refused, never replaced silently: somebody has to decide. So is a version that is assigned in
int8 or float16 where that graph was withdrawn, or is of another network than the request asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast
from urllib.parse import quote

from model_store.artefact import Artefact
from model_store.lens import FINGERPRINT, LENS, Lens, LensForScan, fingerprint_of, lens_of
from model_store.manifest import ModelManifest, NetworkManifest, Precision
from model_store.store import Store
from model_store.task import TaskKind
from personalization.options.presets import AUTO, SPREAD
from service.catalog.adapted import parent_behind, resolve_adaptable
from service.catalog.parts import PartRequest, Personalization, choose
from service.catalog.precision import decided_precision, in_precision, require_float32
from service.catalog.version import NewVersions, ResolvedVersion, serve_version
from service.database import Database
from service.errors import NoAdaptedVersion, NotAdaptable, ParametersContradict
from service.kinds import ADAPTING_ITSELF, SCAN_BY_JOB, adaptation_of, kind_of
from service.kinds.lens import has_lens_of_one_scan

__all__ = [
    "Personalization",
    "Selection",
    "adapted_to_scan",
    "by_lens_of_scan",
    "chosen_before",
    "has_dose_of_scan",
    "resolve_network",
    "select_network",
]

FLAGGED = "descends-from-withdrawn"
SITE_UNKNOWN = "site-unknown"
ALARMED = "watch-alarm"


@dataclass(frozen=True)
class Selection:
    """The answer: `offered` is what was asked for, `model` the network inside it, `why` says how it came.

    `flagged` are the withdrawn artefacts that `offered` descends from. `unknown_site` is the hospital's own
    site where the federation that trained `offered` had no such site. `fingerprint` is the digest of that of
    `offered` where a lens is fitted to the scan as it comes. `alarmed`: an alarm of the watch waits for a
    person.
    """

    offered: Artefact
    model: Artefact[NetworkManifest]
    personalization: str
    site: str | None
    why: str
    hospital: str | None = None
    cluster: str | None = None
    flagged: tuple[str, ...] = ()
    unknown_site: str | None = None
    fingerprint: str | None = None
    alarmed: bool = False

    @property
    def sees_through_lens(self) -> bool:
        """Whether the network may see the scan through a lens: the version's, or one of the scan."""
        return self.fingerprint is not None or LENS in self.manifest.files

    def lens(self) -> Lens | LensForScan | None:
        """The lens through which the network sees the scan.

        Raises ArtefactDamaged for a file that is none.
        """
        if self.fingerprint is None:
            return lens_of(self.model)
        return LensForScan(fingerprint_of(self.offered))

    @property
    def manifest(self) -> NetworkManifest:
        """The manifest of the network that answers."""
        return self.model.manifest

    @property
    def precision(self) -> Precision:
        """The precision of the graph that answers."""
        return self.manifest.precision or "float32"

    @property
    def warnings(self) -> Mapping[str, str]:
        """Warnings about this choice, for every scan: a sentence each, by a short name in ASCII."""
        found = dict(kind_of(self.offered).warnings.get(self.personalization, {}))
        if self.flagged:
            found[FLAGGED] = (
                f"'{self.offered}' was made from {', '.join(self.flagged)}, withdrawn since (GET "
                "/models/NAME says by whom and why): decide whether it may go on answering, or assign "
                "another version"
            )
        if self.alarmed:
            found[ALARMED] = (
                "an alarm of the watch waits for a person: the hospital's scans, or this model's answers to "
                "them, are not as they were (GET /watch says since when)"
            )
        if self.unknown_site is not None:
            found[SITE_UNKNOWN] = (
                f"the hospital is registered as site '{self.unknown_site}', which took no part in training "
                f"'{self.offered}' ({', '.join(self.offered.manifest.lineage.sites)} did): correct its site, "
                "or leave it out for a hospital from outside"
            )
        return found

    @property
    def kept(self) -> dict[str, str | None]:
        """What `chosen_before` takes to make the same choice again."""
        own = ("personalization", "site", "why", "hospital", "cluster", "unknown_site", "fingerprint")
        return {"model": self.model.digest, **{name: getattr(self, name) for name in own}}

    @property
    def header(self) -> str:
        """For `Locum-Personalization`: `global`, `member; site=CS`, `cluster; cluster=2` or
        `hospital; hospital=dune`."""
        about = {"site": self.site, "cluster": self.cluster, "hospital": self.hospital}
        named = [f"{name}={quote(value, safe='')}" for name, value in about.items() if value is not None]
        return "; ".join([self.personalization, *named])


def resolve_network(
    store: Store,
    database: Database,
    model: str | None = None,
    hospital: str | None = None,
    personalization: Personalization | Literal["scan"] = "auto",
    site: str | None = None,
    cluster: str | None = None,
    kind: TaskKind | None = None,
    new_versions: NewVersions = "keep",
) -> Selection:
    """Choose the network that answers a scan; record what a hospital is served without a decision.

    Uses the store and the database: call it in a thread.

    Raises:
        SelectionError: the parameters name no network, or contradict each other.
        HospitalUnknown: it is not registered.
        StoreError: the reference does not open.
    """
    return serve_version(
        store,
        database,
        model,
        hospital,
        kind,
        new_versions,
        lambda found: select_network(store, found, personalization, site, cluster),
    )


def select_network(
    store: Store,
    found: ResolvedVersion,
    personalization: Personalization | Literal["scan"] = "auto",
    site: str | None = None,
    cluster: str | None = None,
) -> Selection:
    """Choose the network inside a version. Reads the store: call it in a thread.

    Raises:
        SelectionError: the parameters name no network, or contradict each other.
        StoreError: a part does not open.
    """
    # For what was not adapted the global model, or a member's own, answers anyway.
    stopped = found.stop == "global" and found.owner is not None and personalization in ("auto", "hospital")
    selection = _selected(store, found, "global" if stopped else personalization, site, cluster)
    if stopped:
        why = f"{selection.why}; in place of the version adapted to '{found.owner}', by an alarm of the watch"
        selection = replace(selection, why=why)
    if found.stop is not None:
        selection = replace(selection, alarmed=True)
    if (entry := decided_precision(found)) is not None:
        reduced = in_precision(store, selection.model, entry)
        why = f"{selection.why}; in {entry.precision}, as it is assigned"
        selection = replace(selection, model=reduced, why=why)
    return replace(selection, flagged=store.lineage.flagged(selection.offered))


def _selected(
    store: Store,
    found: ResolvedVersion,
    personalization: Personalization | Literal["scan"],
    site: str | None,
    cluster: str | None,
) -> Selection:
    for name, value, belongs in (("site", site, "member"), ("cluster", cluster, "cluster")):
        if value is not None and personalization != belongs:
            raise ParametersContradict(
                f"`{name}` belongs to personalization={belongs}, found personalization={personalization}; "
                "leave one of them out."
            )
    artefact, owner, why = found.artefact, found.owner, found.why
    if (through := kind_of(artefact).adapts_itself_by) is not None:
        return _by_itself(found, personalization, through)
    if personalization == "scan":
        if (by_lens := by_lens_of_scan(store, found)) is not None:
            return by_lens
        raise ParametersContradict(
            f"'{artefact}' is of kind {artefact.manifest.kind}, and a lens of the scan alone does not answer "
            f"for it: expected {ADAPTING_ITSELF}, or a network with a fingerprint and without a spread, with "
            f"personalization=scan. Leave it out, or send the scan to POST /segment, where a job adapts "
            f"{SCAN_BY_JOB}."
        )
    if owner is not None and personalization in ("auto", "hospital"):
        adapted = artefact.expect(ModelManifest)
        return Selection(artefact, adapted, "hospital", None, f"{why}; adapted to hospital '{owner}'", owner)
    if personalization == "hospital":
        raise _no_adapted_version(found)
    if owner is not None:
        if found.cause == "named":
            raise ParametersContradict(
                f"'{artefact}' is one network, adapted to hospital '{owner}': expected personalization=auto "
                f"or hospital with it, found {personalization}; or name the model that it was made from."
            )
        artefact, why = parent_behind(store, artefact), f"what {why} was made from"
    asked = PartRequest(personalization, site, cluster, found.hospital, found.home, found.lent)
    chosen = choose(artefact, asked)
    network = artefact if chosen.digest == artefact.digest else store.by_digest(chosen.digest)
    return Selection(
        artefact,
        network.expect(ModelManifest),
        chosen.personalization,
        chosen.site,
        f"{why}; {chosen.why}",
        cluster=chosen.cluster,
        unknown_site=_unknown_site(artefact, found.home),
    )


def by_lens_of_scan(store: Store, found: ResolvedVersion) -> Selection | None:
    """The global model behind a lens of the scan; None where none is fitted, or where a dose follows it.

    Raises PrecisionUnavailable for a version that answers in another precision, StoreError.
    """
    try:
        parent = resolve_adaptable(store, found.artefact)
    except NotAdaptable:
        return None
    parts = kind_of(parent).parts(parent)
    if has_dose_of_scan(parent) or not has_lens_of_one_scan(parent, parts):
        return None
    require_float32(found)
    assert parts.global_model is not None
    model = store.by_digest(parts.global_model, ModelManifest)
    why = "the global model, by a lens of this scan alone"
    return adapted_to_scan(store, parent, model, found.home, why, alarmed=found.stop is not None)


def has_dose_of_scan(parent: Artefact) -> bool:
    """Whether its network is moved by the shift of a scan."""
    adaptation = adaptation_of(parent)
    scan = None if adaptation is None else adaptation.scan
    graphs = {} if scan is None else scan.graphs
    return bool({SPREAD, graphs.get(AUTO)} & parent.manifest.files.keys())


def adapted_to_scan(
    store: Store,
    offered: Artefact,
    model: Artefact[ModelManifest],
    home: str | None,
    why: str,
    *,
    preset: str = AUTO,
    alarmed: bool = False,
) -> Selection:
    """The choice where `model`, a network of `offered`, is adapted to a scan of the member site `home`.

    With `auto` it sees the scan through a lens of its own, where one can be fitted.
    """
    through = preset == AUTO and has_lens_of_one_scan(offered, kind_of(offered).parts(offered))
    return Selection(
        offered,
        model,
        "scan",
        None,
        why,
        flagged=store.lineage.flagged(offered),
        unknown_site=_unknown_site(offered, home),
        fingerprint=offered.manifest.files[FINGERPRINT].sha256 if through else None,
        alarmed=alarmed,
    )


def chosen_before(store: Store, offered: str, kept: Mapping[str, str | None]) -> Selection:
    """The choice of an earlier request, by the digest of the version and `Selection.kept`.

    Raises StoreError where the version, or the network in it, was withdrawn since.
    """
    artefact, fields = store.by_digest(offered), dict(kept)
    network = cast("Artefact[NetworkManifest]", store.by_digest(str(fields.pop("model"))))
    return Selection(artefact, network, flagged=store.lineage.flagged(artefact), **fields)  # type: ignore[arg-type]


def _unknown_site(artefact: Artefact, home: str | None) -> str | None:
    """The hospital's site, if the federation that trained the artefact had no such site."""
    trained_by = artefact.manifest.lineage.sites
    return home if trained_by and home not in trained_by else None


def _by_itself(found: ResolvedVersion, personalization: str, through: str) -> Selection:
    if personalization not in ("auto", "scan"):
        raise ParametersContradict(
            f"'{found.artefact}' is {kind_of(found.artefact).noun}, which adapts to every scan by itself: "
            f"expected personalization=scan or auto with it, found {personalization}; or name another model."
        )
    why = f"{found.why}; it adapts itself to each scan, by {through}"
    network = found.artefact.expect(kind_of(found.artefact).manifest)
    return Selection(found.artefact, network, "scan", None, why)


def _no_adapted_version(found: ResolvedVersion) -> ParametersContradict | NoAdaptedVersion:
    if found.hospital is None:
        return ParametersContradict("personalization=hospital needs `hospital`; name it, or leave both out.")
    if found.cause == "named":
        return ParametersContradict(
            f"personalization=hospital takes the version assigned to hospital '{found.hospital}', but "
            f"'{found.artefact}' was named, which was not adapted to a hospital; leave the version out."
        )
    return NoAdaptedVersion(
        f"No adapted version of '{found.artefact.name}' is assigned to hospital '{found.hospital}': ask with "
        f"personalization=auto, or adapt and assign one (POST /hospitals/{found.hospital}/adaptations).",
    )
