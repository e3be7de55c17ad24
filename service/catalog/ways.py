"""How an artefact can be adapted, by its own network: without masks, by masks, to one scan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from model_store.artefact import Artefact
from model_store.errors import StoreError
from model_store.manifest import ModelManifest
from model_store.store import Store
from personalization.options.masks import MASKS
from personalization.options.movable import FALLBACKS, Movable, in_words, movable, suited
from personalization.options.presets import AUTO, PRESETS, SCAN_FALLBACK
from service.errors import NothingToMove, NothingToMoveByScan
from service.kinds import Parts, adaptation_by_masks, adaptation_of, kind_of
from service.kinds.lens import has_lens, has_lens_of_one_scan


@dataclass(frozen=True)
class Ways:
    """What adapts an artefact.

    Attributes:
        summary: what this means for a hospital, in words.
        adaptable: whether a job can adapt it to a hospital.
        masks: whether `auto` needs masks of some scans for it.
        presets: what a job on a cohort without masks may name; None where no preset is chosen.
        by_scan: what a request on one scan may name; empty where nothing adapts it to one.
        found: what there is to move in its network; None where this is not known, or does not matter.
    """

    summary: str
    adaptable: bool
    masks: Literal["required", "optional", "none"]
    presets: tuple[str, ...] | None
    by_scan: tuple[str, ...]
    found: Movable | None

    @property
    def for_cohorts(self) -> tuple[str, ...]:
        """What a job on a cohort may name, with `masks`; empty where no preset is chosen."""
        if self.presets is None:
            return ()
        return self.presets if self.masks == "none" else (*dict.fromkeys((AUTO, *self.presets)), MASKS)

    def check(self, options: Mapping[str, Any]) -> None:
        """Reject the options of a job with a preset that would change nothing. Raises NothingToMove."""
        preset = options.get("preset", AUTO)
        # What is no preset is rejected with the other options; `masks` moves all that there is.
        known = preset in (AUTO, *PRESETS)
        if self.found is None or self.presets is None or not known or preset in self.presets:
            return
        by_masks = () if self.masks == "none" else (f"{MASKS} (with masks of some scans)",)
        raise NothingToMove(self.found.refusal(preset, [*self.presets, *by_masks]))

    def check_scan(self, preset: str) -> None:
        """Reject a preset that would change nothing for one scan. Raises NothingToMoveByScan."""
        if self.found is not None and preset not in self.by_scan:
            raise NothingToMoveByScan(self.found.refusal(preset, self.by_scan))


def ways_of(store: Store, artefact: Artefact) -> Ways:
    """How an artefact of the federation can be adapted. Reads the manifest of its global model."""
    kind, adaptation, by_masks = kind_of(artefact), adaptation_of(artefact), adaptation_by_masks(artefact)
    if adaptation is None:
        stays = kind.adaptation is not None
        return Ways("answers as it is" if stays else kind.summary, False, "none", None, (), None)
    parts = kind.parts(artefact)
    lens = has_lens(artefact, parts)
    if not (adaptation.presets or lens):
        masks: Literal["required", "none"] = "required" if adaptation.needs_masks else "none"
        return Ways(kind.summary, True, masks, None, (), None)
    found = _movable(store, parts)

    def able(presets: tuple[str, ...], fallbacks: tuple[str, ...]) -> tuple[str, ...]:
        there = [each for each in presets if parts.members or PRESETS[each].models == "global"]
        return suited(found, there, fallbacks)

    presets = able(tuple(adaptation.presets), FALLBACKS)
    by_scan = () if adaptation.scan is None else able(tuple(adaptation.scan.presets), (SCAN_FALLBACK,))
    if lens:
        # Whatever there is to move in the network.
        presets = _with_auto(presets)
        by_scan = _with_auto(by_scan) if has_lens_of_one_scan(artefact, parts) else by_scan
    return Ways(
        summary=in_words(found, presets, by_masks=by_masks is not None),
        adaptable=bool(presets) or by_masks is not None,
        masks="none" if by_masks is None else "optional" if AUTO in presets else "required",
        presets=presets,
        by_scan=by_scan,
        found=found,
    )


def _with_auto(presets: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((AUTO, *presets)))


def _movable(store: Store, parts: Parts) -> Movable | None:
    """What there is to move in the global model; None where its network is not known here."""
    assert parts.global_model is not None
    # Not `by_digest`, which refuses a withdrawn part: here it is only described.
    record = store.lineage.locate(parts.global_model, thorough=False)
    if record is None:
        return None
    try:
        manifest = store.versions.get(record.name, record.number).artefact.expect(ModelManifest).manifest
    except StoreError:
        return None
    network = manifest.network
    return movable(network.name, network.arguments) or (
        None if network.layers is None else Movable(**network.layers.model_dump())
    )
