"""What test-time presets can move in a network, by the name and arguments that a manifest records.

Without torch: what offers and accepts jobs asks it. A test holds it against every registered network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from personalization.options.presets import AUTO, PRESETS

# A network that was imported as a finished graph: nothing changes it.
OPAQUE: Final = "graph"
# What `auto` of a cohort does where an artefact does not say how far its members are apart: the first that
# the network suits, with its defaults. Instance norm that tracks has `blend`: no shift is measured of it.
FALLBACKS: Final = ("ladder", "blend")
_NEEDS: Final = {
    "batch": "batch norm that keeps running statistics",
    "instance": "instance norm that tracks, trained with norm_name: [instance, {track: true}]",
    "either": "batch norm that keeps running statistics, or instance norm that tracks",
    "ttt": "a head that predicts quarter turns, trained with --rotation-head",
    "models": "models of members to weigh",
}


@dataclass(frozen=True)
class Movable:
    """What there is to move: batch norm that keeps running statistics (`batch`), instance norm that tracks
    (`tracked`), a head that tells quarter turns (`turns`). `norm` names the norms in words.
    """

    norm: str
    batch: bool = False
    tracked: bool = False
    turns: bool = False

    def suits(self, preset: str) -> bool:
        """Whether there is what a preset moves in a network, or learns from."""
        if preset == "ttt":
            return self.turns
        norm = PRESETS[preset].norm
        return norm is None or (self.batch if norm == "batch" else self.tracked)

    def refusal(self, preset: str, suited: Iterable[str]) -> str:
        """Say what a preset needs that is not there, and what the network can be adapted by."""
        if preset in (AUTO, "ttt"):
            needed = "ttt" if preset == "ttt" else "either"
        else:
            needed = "models" if self.suits(preset) else str(PRESETS[preset].norm)
        ways = ", ".join(suited)
        return (
            f"preset '{preset}' would change nothing: it needs {_NEEDS[needed]}, and this network has "
            f"{self.norm}. {f'It can be adapted by {ways}' if ways else 'Nothing else adapts it'}"
        )


def in_words(found: Movable | None, presets: Sequence[str], *, by_masks: bool = True) -> str:
    """What a network is adapted by: masks, if it has weights to fit, and these presets, or nothing."""
    if not by_masks:
        return "adapts to a hospital without masks"
    if found is None:
        return "adapts to a hospital with masks of a few scans, or without, as far as its norms allow"
    if AUTO in presets:
        return "adapts to a hospital without masks, or with a few"
    without = f"without only by preset {' or '.join(presets)}" if presets else "not without"
    return f"adapts to a hospital with masks of a few scans, {without}: its network has {found.norm}"


def suited(found: Movable | None, presets: Iterable[str], fallbacks: Sequence[str]) -> tuple[str, ...]:
    """Those of `presets` that a network suits, after `auto` where it suits what that stands for."""
    able = [each for each in presets if found is None or found.suits(each)]
    return (AUTO, *able) if {*able} & {*fallbacks} else tuple(able)


_BATCH: Final = Movable("batch norm", batch=True)
_GROUP: Final = Movable("group norm")


def movable(network: str, arguments: Mapping[str, Any]) -> Movable | None:
    """What presets can move in this network; None of one that is not Locum's own, which is not known here."""
    find = _NETWORKS.get(network)
    return None if find is None else find(arguments)


def _of_layer(name: str, default: Any) -> Callable[[Mapping[str, Any]], Movable]:
    """Read the norm from the argument `name` of a network: a name, or [name, options]."""

    def found(arguments: Mapping[str, Any]) -> Movable:
        norm = arguments.get(name, default)
        kind, options = (norm, {}) if isinstance(norm, str) else (norm[0], dict(norm[1]))
        if kind.lower() == "instance" and options.get("track"):
            return Movable("instance norm that tracks", tracked=True)
        return Movable(f"{kind.lower()} norm", batch=kind.lower() == "batch")

    return found


def _inside(name: str) -> Callable[[Mapping[str, Any]], Movable | None]:
    """Look inside a network around another, which the arguments `name` and `arguments` say."""

    def found(arguments: Mapping[str, Any]) -> Movable | None:
        inside = movable(str(arguments[name]), arguments["arguments"])
        # The head of one inside is not asked.
        return None if inside is None else replace(inside, turns=False)

    return found


def _unet(arguments: Mapping[str, Any]) -> Movable:
    return replace(_BATCH, turns=bool(arguments.get("rotation_head")))


_NETWORKS: Final[Mapping[str, Callable[[Mapping[str, Any]], Movable | None]]] = {
    "averaged": _inside("network"),
    "blended": _inside("backbone"),
    "efficientnet_unet": lambda _: _BATCH,
    "fedoap": lambda _: Movable("instance norm"),
    OPAQUE: lambda _: Movable("no layer that is known"),
    "monai.attentionunet": lambda _: _BATCH,
    "monai.basicunet": _of_layer("norm", "instance"),
    "monai.dynunet": _of_layer("norm_name", "instance"),
    # Its encoder has batch norm, whatever its decoder has.
    "monai.flexibleunet": lambda given: replace(
        _of_layer("norm", "batch")(given), norm=_BATCH.norm, batch=True
    ),
    "monai.mednext": lambda _: _GROUP,
    "monai.segresnet": _of_layer("norm", "group"),
    "monai.unet": _of_layer("norm", "instance"),
    "projected": _inside("network"),
    "resenc": lambda given: (
        Movable("instance norm that tracks", tracked=True) if given.get("track") else Movable("instance norm")
    ),
    "resnet18": lambda _: _BATCH,
    "unet": _unet,
    "vit": lambda _: Movable("layer norm"),
}
