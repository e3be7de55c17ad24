"""Fit a lens to a hospital's unlabeled scans, and publish a judged candidate.

This is `auto` of an artefact with a fingerprint. Its own stage is `measuring`: how far the scans are from the
members', what the lens takes back of that, and what the network says of it. Where the network has batch
norm, what is left is dosed (`personalization.dose.by_lens`). Slices with smaller structures than the members'
are shown to it larger instead (`by_scale`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from model_store.errors import ScanError
from model_store.lens import LENS, Fitted, Kind, Lens, Scale, fingerprint_of, fit, mean_shift, scale_of
from model_store.manifest import GRAPH, WEIGHTS, ModelManifest
from model_store.preprocessing import PreparedVolume, prepare_for
from model_store.scan import decode
from model_store.task import Task
from personalization.dose import Lensed, View, by_lens, by_lens_alone
from personalization.errors import NetworkError, StateError
from personalization.gate import GateVerdict, ThroughLens
from personalization.options.presets import SPREAD
from personalization.state import to_safetensors
from service.cohorts.files import ScanFile, label_of
from service.errors import AdaptationRejected
from service.inference.sessions import GraphSession
from service.kinds import kind_of
from service.settings import cohort_limits
from service.worker.attempt import Attempt
from service.worker.candidate import CandidateDraft
from service.worker.cohort_images import CohortImages, load_images, patches_of, widened
from service.worker.cohort_job import CohortWork
from service.worker.device import device_of
from service.worker.kept import Kept
from service.worker.larger import AtScale, LargerSlices
from service.worker.pictures import draw_answers, draw_pictures, load
from service.worker.routing_adapt import LoadedSpace, graph_of, load_space
from service.worker.routing_space import dose_facts, said_of_dose


@dataclass(frozen=True)
class FittedToScans:
    """A fitted lens, and what the network says of it. `files` are those of the candidate.

    `task`: the candidate's. `of_one_group`: how far hospitals are apart is not known, and stands for several
    times the patients'. `scale`: of scans with smaller structures than the members'.
    """

    fitted: Fitted
    found: Lensed
    files: dict[str, bytes]
    task: Task
    of_one_group: bool = False
    scale: Scale | None = None

    @property
    def usual(self) -> str:
        """What a distance of 1 is."""
        return "counts as usual, of one group alone" if self.of_one_group else "is usual between hospitals"

    @property
    def lens(self) -> Lens | None:
        """The lens of the candidate; None where it sees the scans as they are."""
        return self.fitted.lens if self.found.sees_through else None


class WholeScans:
    """The images of a cohort as a lens sees them: slices, or whole volumes, read again for each pass."""

    def __init__(self, attempt: Attempt, task: Task, files: Iterable[ScanFile], cohort: CohortImages) -> None:
        """`files` are those of the scans that are used, in the order of the cohort."""
        self._attempt, self._task, self._cohort = attempt, task, cohort
        self._files = {file.name: file for file in files}
        self._volumes = Kept(self._prepared, lambda volume: volume.nbytes)

    def viewed(self) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Patient and images [n, C, ...], one scan after the other. Raises ScanError, CohortDeleted."""
        cohort = self._cohort
        patients = dict(zip(cohort.scan_of_image.tolist(), cohort.patient_of_image.tolist(), strict=True))
        for number, name in enumerate(self._files):
            self._attempt.check_cancelled()
            if self._task.is_volume:
                yield patients[number], self._volumes[name][np.newaxis]
            else:
                yield patients[number], cohort.images[cohort.scan_of_image == number].numpy()

    def through(self, lens: Lens) -> Tensor:
        """The cohort's images through the lens: those slices, or the same patches of each volume."""
        if not self._task.is_volume:
            scans = self._cohort.scan_of_image.tolist()
            return torch.from_numpy(lens.apply(self._cohort.images.numpy(), scans=scans))
        counts = np.bincount(self._cohort.scan_of_image)
        parts = []
        for name, most in zip(self._files, counts.tolist(), strict=True):
            self._attempt.check_cancelled()
            volume = lens.apply(self._volumes[name][np.newaxis])[0]
            parts.append(patches_of(volume, self._task, most))
        return torch.cat(parts)

    def _prepared(self, name: str) -> NDArray[np.float32]:
        file = self._files[name]
        try:
            scan = decode(file.read(), cohort_limits(self._attempt.settings, self._task))
            prepared = prepare_for(self._task, scan)
        except ScanError as error:
            raise type(error)(f"{label_of(file.sha256)}: {error}") from error
        assert isinstance(prepared, PreparedVolume)
        return prepared.volume


@dataclass
class LensWork(CohortWork[CohortImages, FittedToScans]):
    """Fit a lens, and the dose of what is left where the network has batch norm."""

    METHOD: ClassVar[str] = "lens"

    def __post_init__(self) -> None:
        """Load the fingerprint, and the models where there is batch norm to move."""
        parts = kind_of(self.parent).parts(self.parent)
        assert parts.global_model is not None
        self.model = self.store.by_digest(parts.global_model, ModelManifest)
        self.manifest, self.task = self.model.manifest, self.model.manifest.task
        self.fingerprint = fingerprint_of(self.parent)
        self.curves: dict[str, list[list[float]]] = {}
        self.device = device_of(self.attempt.settings)

    @cached_property
    def loaded(self) -> LoadedSpace | None:
        """The models, where the members measured a spread at their batch norms."""
        return load_space(self.store, self.parent) if SPREAD in self.parent.manifest.files else None

    @override
    def read(self) -> CohortImages:
        limits = cohort_limits(self.attempt.settings, self.task)
        check_cancelled, known = self.attempt.check_cancelled, self.manifest.statistics
        include = self.includes_unlike
        return load_images(self.files, self.task, known, limits, check_cancelled, include=include)

    @override
    def make(self, cohort: CohortImages) -> FittedToScans:
        """Fit the lens, ask the network, and collect the candidate's files."""
        self.attempt.set_stage("measuring")
        whole = WholeScans(self.attempt, self.task, self.files, cohort)
        fitted = fit(whole.viewed, self.fingerprint)
        if fitted is None:
            raise AdaptationRejected("every scan of the cohort has the same intensity everywhere")
        files = {GRAPH: self.model.read(GRAPH)}
        if WEIGHTS in self.manifest.files:
            files[WEIGHTS] = self.model.read(WEIGHTS)
        of_one_group = self.fingerprint.factor is not None
        scale, larger = self._scale(cohort, whole, fitted)
        if larger is not None and larger.found.served == "scale":
            files[GRAPH] = larger.graph
            return FittedToScans(fitted, larger.found, files, larger.task, of_one_group, scale)
        lensed = whole.through(fitted.lens) if fitted.lens.steps else None
        found = self._asked(cohort, lensed, fitted)
        if (network := found.network) is not None:
            files = {WEIGHTS: to_safetensors(network.state_dict()), GRAPH: graph_of(network, self.task)}
        if found.sees_through:
            files[LENS] = fitted.lens.to_bytes()
        self.curves = self._curves(fitted)
        return FittedToScans(fitted, found, files, self.task, of_one_group, scale)

    def _scale(
        self, cohort: CohortImages, whole: WholeScans, fitted: Fitted
    ) -> tuple[Scale | None, AtScale | None]:
        """How much smaller structures are than the members', and what the network says of larger slices.

        The mean field tells inverted scans, and not those of another scale: they are not shown larger.
        """
        slices = LargerSlices(self.attempt, self.task, self.files, cohort)
        upright = partial(_upright, whole.viewed, fitted.lens)
        scale = scale_of(upright, self.fingerprint, None if fitted.lens.negated else slices.middles)
        if scale is None or fitted.lens.negated or self.task.kind != "segmentation":
            return scale, None
        try:
            loaded = self.loaded or load_space(self.store, self.parent)
        except (NetworkError, StateError):
            # A graph without its weights.
            return scale, None
        return scale, slices.judged(scale, loaded, self.device)

    def _asked(self, cohort: CohortImages, lensed: Tensor | None, fitted: Fitted) -> Lensed:
        """What the network says of the lens."""
        lens = ThroughLens(fitted.left, None, fitted.grid, fitted.sides, fitted.lens.negated)
        patients, mistaken = cohort.patient_of_image.tolist(), cohort.kinds.share_gross
        seen = cohort.images, lensed, patients, lens
        if (loaded := self.loaded) is not None and loaded.spread is not None:
            return by_lens(
                loaded.space,
                loaded.spread,
                loaded.playbook,
                *seen,
                self.device,
                self.attempt.check_cancelled,
                mistaken,
            )
        return by_lens_alone(self._see(), len(self.task.classes), *seen, mistaken)

    def _curves(self, fitted: Fitted) -> dict[str, list[list[float]]]:
        """Quantiles and spectrum, means over channels: of the members, of the scans, and through the lens."""
        kinds: tuple[Kind, ...] = ("quantiles", "spectrum")
        return {
            kind: [
                np.round(each.mean(axis=0), 4).tolist()
                for each in (
                    self.fingerprint.of_kind(kind).mean_CE,
                    fitted.seen[kind],
                    fitted.through[kind],
                )
            ]
            for kind in kinds
        }

    def _see(self) -> Callable[[Tensor], View]:
        """The masks of the graph that answers."""
        session = load(self.model.read(GRAPH), self.attempt.settings)

        def see(images: Tensor) -> View:
            maps = []
            for image in images:
                maps.append(self._answer(session, image.numpy()).argmax(axis=1))
            found = torch.from_numpy(np.concatenate(maps).astype(np.uint8))
            return View(found, float((found > 0).double().mean()))

        return see

    def _answer(self, session: GraphSession, image: NDArray[np.float32]) -> NDArray[np.float32]:
        """The probabilities [1, K, ...] of one image [C, ...]."""
        self.attempt.check_cancelled()
        found: NDArray[np.float32] = session.run_alone(image[np.newaxis]).probabilities
        return found

    @override
    def judge(self, cohort: CohortImages, made: FittedToScans) -> GateVerdict:
        return made.found.judged

    @override
    def summary(self, cohort: CohortImages, made: FittedToScans, verdict: GateVerdict) -> list[str]:
        if made.found.served == "scale":
            assert made.scale is not None
            return said_of_larger(made.scale)
        return [*said_of_scale(made.scale), *said_of_lens(made)]

    @override
    def draw(self, cohort: CohortImages, made: FittedToScans) -> None:
        if self.task.kind == "segmentation":
            draw_pictures(
                self.attempt, self.files, self.model, made.files[GRAPH], lens=made.lens, task=made.task
            )
            return
        scans, images = cohort.scan_of_image, cohort.images.numpy()
        seen = images if made.lens is None else made.lens.apply(images, scans=scans.tolist())
        told = {}
        for when, graph, shown in (
            ("before", self.model.read(GRAPH), images),
            ("after", made.files[GRAPH], seen),
        ):
            session = load(graph, self.attempt.settings)
            answers = np.concatenate([self._answer(session, image) for image in shown])
            told[when] = [answers[scans == scan].mean(axis=0) for scan in range(len(self.files))]
        draw_answers(self.attempt, self.files, self.task, told)

    @override
    def result(self, cohort: CohortImages, made: FittedToScans) -> dict[str, Any]:
        fitted, found = made.fitted, made.found
        polarity, dosed = fitted.polarity, found.dosed
        facts: dict[str, Any] = {
            "made": found.candidate,
            "steps": [*fitted.lens.steps],
            "negated": fitted.lens.negated,
            **_rounded(before=fitted.before, after=fitted.after, shares=fitted.shares),
            "network": None if found.shifts is None else [round(shift, 4) for shift in found.shifts],
        }
        if (scale := made.scale) is not None:
            facts["scale"] = scale.zoom
            if found.served == "scale":
                shares: dict[Kind, float] = {}
                facts |= {"steps": [], "shares": shares, **_rounded(before=scale.before, after=scale.after)}
        if polarity is not None:
            facts["correlation"] = round(polarity.correlation, 4)
        return {
            "lens": facts,
            **({} if dosed is None else {"dose": dose_facts(dosed)}),
            "options": {"preset": "auto"},
            "scans": len(self.files),
            "images": len(cohort.images),
            "epochs": 0,
            "best_epoch": 0,
            "fell_back": False,
            "stopped": None,
        }

    @override
    def draft(self, cohort: CohortImages, made: FittedToScans, result: dict[str, Any]) -> CandidateDraft:
        known = self.manifest.statistics
        return CandidateDraft(
            parent=self.parent,
            model=self.manifest.model_copy(update={"task": made.task}),
            method=self.METHOD,
            files=made.files,
            epochs=0,
            seed=0,
            details=result,
            statistics=widened(known, cohort.statistics),
            sources=self.manifest.sources,
        )

    @override
    def cost(self) -> dict[str, Any]:
        return {"milliseconds": self.watch.stages, "curves": self.curves}


def _rounded(**values: Mapping[Kind, float]) -> dict[str, dict[Kind, float]]:
    return {name: {kind: round(each, 4) for kind, each in own.items()} for name, own in values.items()}


def _upright(
    cohort: Callable[[], Iterator[tuple[int, NDArray[np.float32]]]], lens: Lens
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """The images as they are, inverted ones negated."""
    turned = Lens(axes=lens.axes, channels=lens.channels, upright=lens.upright)
    for patient, images in cohort():
        yield patient, turned.apply(images) if turned.negated else images


def said_of_scale(scale: Scale | None) -> list[str]:
    """Say that structures are smaller than the members', and what a person can do."""
    if scale is None:
        return []
    return [
        f"{_smaller(scale)} The network does not see them larger, since it cannot or since its gate refuses "
        "it: crop the scans to the members' field of view."
    ]


def said_of_larger(scale: Scale) -> list[str]:
    """Say that the network sees the scans larger."""
    return [
        f"{_smaller(scale)} The network sees each slice {scale.zoom:g} times larger, which takes "
        f"{scale.zoom**2:.2g} times as long; no mask was used, and no weight of the network is changed by it."
    ]


def _smaller(scale: Scale) -> str:
    after, before = mean_shift(scale.after), mean_shift(scale.before)
    return (
        f"Structures look about {scale.zoom:g} times smaller in these scans than in the members': the "
        f"central part of each image is at a distance of {after:.1f} from the members' whole images, "
        f"and all of it at {before:.1f}."
    )


def said_of_lens(made: FittedToScans) -> list[str]:
    """Say how far the scans are from the members', what the lens does, and what is left."""
    fitted, found = made.fitted, made.found
    before, after = (mean_shift(shifts) for shifts in (fitted.before, fitted.after))
    if not fitted.lens.steps or not found.sees_through:
        if found.dosed is not None:
            return said_of_dose(found.dosed)
        if not fitted.lens.steps:
            return [
                f"These scans look like the member hospitals': their distance is {before:.1f}, where 1 "
                f"{made.usual}. So the global model stays as it is: that is the answer, no rejection."
            ]
    said = [
        f"The distance of these scans from the member hospitals' is {before:.1f}, where 1 {made.usual}. "
        f"Through the lens it is {after:.1f}. The scans are changed before the network sees them; no mask "
        "was used, and no weight of the network is changed by it."
    ]
    if fitted.lens.negated:
        said.insert(0, "These scans look inverted: the lens negates those that do.")
    if found.candidate == "lens and dose" and found.dosed is not None:
        said += said_of_dose(found.dosed, through=True)
    return said
