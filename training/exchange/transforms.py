"""A bundle's transforms, in the order in which they are written, as fields of a task.

Order is meaning: spleen_ct resamples and then scales; prostate_mri takes labels first and then inverts.
A transform that no field can express is refused. The user may leave it out knowingly (`without`), or declare
what it does in another way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import ValidationError

from model_store.normalisation import Normalisation, Rescale, ZScore
from training.errors import ImportRefused
from training.exchange.config import Component, Config, Plain

# Arguments that do not change what is computed, or change only what is written to a file.
_WITHOUT_EFFECT: Final = frozenset(
    """
    keys allow_missing_keys meta_keys meta_key_postfix orig_keys orig_meta_keys image_only prune_meta_pattern
    prune_meta_sep device track_meta data_type to_tensor wrap_sequence dtype lazy overwriting reader
    ensure_channel_first simple_keys strict_check post_func start_coord_key end_coord_key recompute_affine
    labels allow_smaller
    """.split()  # noqa: SIM905
)
_FLOATS: Final = ("float32", "float", "float64", "torch.float32", "np.float32", "numpy.float32")
_MODULE: Final = "monai.transforms"


@dataclass
class Reading:
    """What the transforms before the network say, filled in as they are read.

    `steps` has the normalisation of each channel; those before and after resampling are counted. `apart` are
    the keys of channels that ConcatItems has yet to put together, `joined` those that it did. `padded` is the
    least side of each axis.
    """

    channels: int
    modality: str | None
    axes: str = "ijk"
    spacing: list[float | None] | None = None
    crop: str = "none"
    steps: list[list[Rescale | ZScore]] = field(default_factory=list)
    before: int = 0
    after: int = 0
    notes: list[str] = field(default_factory=list)
    apart: list[str] = field(default_factory=list)
    joined: list[str] = field(default_factory=list)
    padded: list[int] | None = None

    def of(self, step: Component) -> list[int]:
        """The channels that a transform is for. Raises ImportRefused for keys of other things."""
        if not self.apart:
            return [*range(self.channels)]
        written = step.value("keys")
        keys = [written] if isinstance(written, str) else written
        if not isinstance(keys, list) or not all(key in self.apart for key in keys):
            raise step.refuse(f"expected keys of {', '.join(self.apart)}, found {str(written)[:64]}")
        return [self.apart.index(key) for key in keys]

    def add(self, step: Component, made: Sequence[Rescale | ZScore]) -> None:
        """Add one normalisation for each of the transform's channels."""
        if self.padded is not None:
            raise step.refuse(
                "expected all normalisation before SpatialPad, found it after: it sees the padding"
            )
        for channel, each in zip(self.of(step), made, strict=True):
            self.steps[channel].append(each)
        if self.spacing is None:
            self.before += 1
        else:
            self.after += 1

    @property
    def normalisations(self) -> list[Normalisation]:
        """The normalisation of each channel."""
        return [
            Normalisation(scope="volume", steps=tuple(steps))
            if steps
            else Normalisation(scope="volume", method="none")
            for steps in self.steps
        ]


@dataclass
class Answer:
    """What the transforms after the network say.

    `restore` is what is carried back to the scan's grid, None where nothing is inverted. `largest` are the
    mask values of which the largest component is kept; empty for all, None for none.
    """

    activation: str | None = None
    discrete: str | None = None
    restore: str | None = None
    largest: list[int] | None = None
    notes: list[str] = field(default_factory=list)


def before_network(
    config: Config, place: str, channels: int, modality: str | None, without: Collection[str]
) -> Reading:
    """Read `preprocessing`. Raises ImportRefused naming the transform that cannot be expressed."""
    reading = Reading(channels, modality, steps=[[] for _ in range(channels)])
    joins = [step for step in config.components(place) if step.name.startswith("ConcatItems")]
    if joins and not {"ConcatItems", joins[0].name} & {*without}:
        keys = joins[0].value("keys")
        if (
            len(joins) > 1
            or not isinstance(keys, list)
            or len({*map(str, keys)}) != channels
            or joins[0].value("dim") not in (None, 0)
        ):
            raise joins[0].refuse(f"expected it once, with the keys of {channels} channels and dim 0")
        reading.apart = [str(key) for key in keys]
    _each(config, place, _BEFORE, reading, without)
    if reading.before and reading.after:
        raise ImportRefused(
            f"{config.where}: {place}: expected all normalisation before Spacing or all after it, found both"
        )
    return reading


def after_network(config: Config, place: str, without: Collection[str]) -> Answer:
    """Read `postprocessing`, where there is one. Raises ImportRefused."""
    answer = Answer()
    if config.has(place):
        _each(config, place, _AFTER, answer, without)
    return answer


def _each(
    config: Config,
    place: str,
    known: Mapping[str, Callable[[Component, Any], None]],
    state: Any,
    without: Collection[str],
) -> None:
    for step in config.components(place):
        name = step.name.removesuffix("d").removesuffix("D").removesuffix("Dict")
        module = step.target.rpartition(".")[0]
        if {step.name, name} & {*without}:
            state.notes.append(f"{step.name} is left out, as you asked: answers can differ from the bundle's")
            continue
        if name not in known or not (module == _MODULE or module.startswith(f"{_MODULE}.") or not module):
            raise step.refuse(
                f"expected one of {', '.join(known)}, found {step.target[:96]!r}. If masks are acceptable "
                "without it, "
                f"add --without {step.name}; if it makes the labels, declare them with --label NAME=VALUES"
            )
        known[name](step, state)


def _only(step: Component, *names: str, allowed: Collection[str] = ()) -> dict[str, Plain]:
    """The plain values of these arguments; others may only be `allowed` ones, or such that change nothing."""
    harmless = {*names, *allowed, *_WITHOUT_EFFECT}
    strange = [name for name in step.arguments if name not in harmless]
    if strange:
        raise step.refuse(
            f"expected {', '.join(names) or 'no argument'}, found {strange[0][:64]!r}, which cannot be "
            "expressed"
        )
    return {name: step.value(name) for name in names}


def _nothing(_: Component, __: Any) -> None:
    """Of loading, devices and files, which Locum does itself."""


def _cast(step: Component, _: Any) -> None:
    """Casts to a float change nothing: the network sees float32."""
    if "dtype" not in step.arguments:
        return
    # Written as an expression: it is compared, not evaluated.
    found = step.written("dtype").lstrip("$")
    if found not in _FLOATS:
        raise step.refuse(f"expected a dtype of {', '.join(_FLOATS)}, found {found[:64]!r}")


def _joined(_: Component, reading: Reading) -> None:
    """Channels are one array from here on."""
    reading.apart, reading.joined = [], reading.apart


def _spatial_pad(step: Component, reading: Reading) -> None:
    """Zeros around scans that are smaller than the window, which every sliding window puts there itself."""
    given = _only(step, "spatial_size", "method", "mode", "value", "constant_values")
    sides = given["spatial_size"]
    sides = [sides] * 3 if isinstance(sides, int) else sides
    zeros = given["mode"] in (None, "constant") and not given["value"] and not given["constant_values"]
    whole = isinstance(sides, list) and len(sides) == 3 and all(isinstance(side, int) for side in sides)
    if not zeros or not whole or reading.padded is not None:
        raise step.refuse(
            f"expected it once, with zeros up to 3 sides, found {sides!r}, mode {given['mode']!r}: add "
            f"--without {step.name} if masks are acceptable without it"
        )
    assert isinstance(sides, list)
    reading.padded = [int(side) for side in sides]
    if given["method"] not in (None, "symmetric"):
        reading.notes.append(
            f"{step.name} pads scans that are smaller than the window behind them, here they are padded all "
            "around: masks of larger scans are not affected"
        )


def _for_all(step: Component, reading: Reading) -> None:
    """Raise ImportRefused for a change of the grid of some channels alone, or behind padding."""
    if len({*reading.of(step)}) != reading.channels or reading.padded is not None:
        raise step.refuse("expected it for all channels, and before SpatialPad")


def _orientation(step: Component, reading: Reading) -> None:
    _for_all(step, reading)
    given = _only(step, "axcodes", "as_closest_canonical")
    axes = "RAS" if given["as_closest_canonical"] else given["axcodes"]
    if not isinstance(axes, str) or reading.spacing is not None:
        raise step.refuse(f"expected axcodes such as RAS, before Spacing, found {axes!r}")
    reading.axes = axes.upper()


def _spacing(step: Component, reading: Reading) -> None:
    _for_all(step, reading)
    given = _only(step, "pixdim", "mode", "padding_mode", "align_corners", "diagonal", "scale_extent")
    pixdim = given["pixdim"]
    values = [pixdim] * 3 if isinstance(pixdim, int | float) else pixdim
    if (
        not isinstance(values, list)
        or not values
        or not all(isinstance(each, int | float) for each in values)
    ):
        raise step.refuse(
            f"expected 3 spacings in millimetres, found {pixdim!r}: declare them with --set "
            f"{step.place}::pixdim=[x,y,z]"
        )
    mode = given["mode"][0] if isinstance(given["mode"], list) and given["mode"] else given["mode"]
    if mode not in (None, "bilinear", 1) or given["padding_mode"] not in (None, "border"):
        raise step.refuse(
            f"expected mode bilinear and padding_mode border, found {mode!r}, {given['padding_mode']!r}"
        )
    if given["diagonal"] or given["scale_extent"] or reading.spacing is not None:
        raise step.refuse("expected it once, without diagonal and scale_extent")
    # MONAI's rule: the last stands for those that are not there, and none above 0 for the scan's own.
    filled = [*values, *[values[-1]] * 3][:3]
    reading.spacing = [float(each) if isinstance(each, int | float) and each > 0 else None for each in filled]


def _scale_range(step: Component, reading: Reading) -> None:
    given = _only(step, "a_min", "a_max", "b_min", "b_max", "clip")
    low, high = given["b_min"], given["b_max"]
    made = _step(
        step,
        lambda: Rescale(
            window=(given["a_min"], given["a_max"]),
            to=(0.0 if low is None else low, 1.0 if high is None else high),
            clip=bool(given["clip"]),
        ),
    )
    reading.add(step, [made] * len(reading.of(step)))


def _scale(step: Component, reading: Reading) -> None:
    given = _only(step, "minv", "maxv", "factor", "channel_wise")
    _per_channel(step, given["channel_wise"], reading)
    if given["factor"] is not None:
        raise step.refuse("expected minv and maxv, found factor")
    low, high = step.value("minv", 0.0), step.value("maxv", 1.0)
    made = _step(step, lambda: Rescale(to=(low, high)))
    reading.add(step, [made] * len(reading.of(step)))


def _scale_percentiles(step: Component, reading: Reading) -> None:
    given = _only(step, "lower", "upper", "b_min", "b_max", "clip", "relative", "channel_wise")
    _per_channel(step, given["channel_wise"], reading)
    if given["relative"]:
        raise step.refuse("expected relative false, found true")
    low, high = given["b_min"], given["b_max"]
    made = _step(
        step,
        lambda: Rescale(
            percentiles=(given["lower"], given["upper"]),
            to=(0.0 if low is None else low, 1.0 if high is None else high),
            clip=bool(given["clip"]),
        ),
    )
    reading.add(step, [made] * len(reading.of(step)))


def _normalise(step: Component, reading: Reading) -> None:
    given = _only(step, "subtrahend", "divisor", "nonzero", "channel_wise")
    own = given["subtrahend"] is None and given["divisor"] is None
    if own:
        _per_channel(step, given["channel_wise"], reading)
    count = len(reading.of(step))
    means, stds = (_numbers(step, given[name], count) for name in ("subtrahend", "divisor"))
    within = "nonzero" if given["nonzero"] else "all"
    reading.add(
        step,
        [
            _step(step, lambda mean=mean, std=std: ZScore(mean=mean, std=std, within=within))  # type: ignore[misc]
            for mean, std in zip(means, stds, strict=True)
        ],
    )


def _numbers(step: Component, found: Plain, count: int) -> list[Any]:
    values = found if isinstance(found, list) else [found] * count
    if len(values) != count:
        raise step.refuse(f"expected a number for each of {count} channels, found {len(values)}")
    return values


def _crop(step: Component, reading: Reading) -> None:
    _for_all(step, reading)
    given = _only(
        step, "source_key", "margin", "allow_smaller", "k_divisible", "mode", "channel_indices", "select_fn"
    )
    plain = given["margin"] in (None, 0) and given["k_divisible"] in (None, 1) and given["select_fn"] is None
    first = not (reading.before or reading.after) and reading.spacing is None
    if not plain or given["channel_indices"] is not None or not first or reading.modality != "MR":
        raise step.refuse(
            "it keeps what is above zero, which is what Locum's `crop: nonzero` does for MR, first of all "
            "and without "
            f"a margin; this one is another. Add --without {step.name} to leave it out: masks are nearly "
            "the same"
        )
    reading.crop = "nonzero"


def _refuse_resize(step: Component, _: Any) -> None:
    raise step.refuse(
        "it stretches every scan to one number of voxels, so that the network knows no millimetres: export "
        "the "
        "network to onnx and use `import onnx` with a task.yaml"
    )


def _per_channel(step: Component, channel_wise: Plain, reading: Reading) -> None:
    if reading.channels > 1 and not reading.apart and channel_wise is not True:
        raise step.refuse(
            f"expected channel_wise true for {reading.channels} channels, found statistics of all together"
        )


def _largest(step: Component, answer: Answer) -> None:
    given = _only(step, "applied_labels", "is_onehot", "independent", "connectivity", "num_components")
    applied = given["applied_labels"]
    values = [applied] if isinstance(applied, int) else (applied or [])
    plain = isinstance(values, list) and all(isinstance(each, int) and each > 0 for each in values)
    if (
        answer.discrete != "argmax"
        or answer.largest is not None
        or not plain
        or given["is_onehot"]
        or given["independent"] is False
        or given["connectivity"] not in (None, 3)
        or given["num_components"] not in (None, 1)
    ):
        raise step.refuse(
            "expected the largest component of each label by itself, after argmax, with voxels that touch at "
            f"a corner together; this one is another. Add --without {step.name} to leave it out: masks then "
            "keep small islands"
        )
    assert isinstance(values, list)
    answer.largest = [each for each in values if isinstance(each, int)]
    if answer.restore is None:
        answer.notes.append(
            f"{step.name} looks for components on the network's grid; here they are looked for on the scan's "
            "own"
        )


def _step(step: Component, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except ValidationError as error:
        raise step.refuse("; ".join(each["msg"] for each in error.errors()[:3])) from error


def _activations(step: Component, answer: Answer) -> None:
    given = _only(step, "sigmoid", "softmax", "other")
    found = [name for name in ("sigmoid", "softmax", "other") if given[name]]
    if len(found) != 1 or found == ["other"] or answer.discrete:
        raise step.refuse(
            f"expected softmax or sigmoid, before AsDiscrete, found {' and '.join(found) or 'nothing'}"
        )
    answer.activation = found[0]
    if answer.restore is not None:
        answer.restore = "logits"


def _discrete(step: Component, answer: Answer) -> None:
    given = _only(step, "argmax", "threshold", "to_onehot", "rounding")
    if given["to_onehot"] is not None or given["rounding"] is not None:
        raise step.refuse("expected argmax or threshold, found to_onehot or rounding")
    if given["argmax"] and given["threshold"] is None:
        answer.discrete = "argmax"
    elif given["threshold"] in (True, 0.5) and not given["argmax"]:
        answer.discrete = "threshold"
    else:
        raise step.refuse(f"expected argmax: true or threshold: 0.5, found {given['threshold']!r}")


def _invert(step: Component, answer: Answer) -> None:
    _only(step, "nearest_interp", allowed=("transform",))
    nearest = step.value("nearest_interp", True) is not False
    if answer.discrete and not nearest:
        answer.notes.append(
            f"{step.name} interpolates the numbers of labels linearly; here each voxel takes the nearest "
            "label"
        )
    answer.restore = "labels" if answer.discrete or nearest else "probabilities"
    if not answer.discrete and not answer.activation and not nearest:
        answer.restore = "logits"


_BEFORE: Final[Mapping[str, Callable[[Component, Any], None]]] = {
    "LoadImage": _nothing,
    "EnsureChannelFirst": _nothing,
    "EnsureType": _cast,
    "CastToType": _cast,
    "ToTensor": _cast,
    "Orientation": _orientation,
    "Spacing": _spacing,
    "ScaleIntensityRange": _scale_range,
    "ScaleIntensity": _scale,
    "ScaleIntensityRangePercentiles": _scale_percentiles,
    "NormalizeIntensity": _normalise,
    "CropForeground": _crop,
    "Resize": _refuse_resize,
    "ConcatItems": _joined,
    "SpatialPad": _spatial_pad,
}
_AFTER: Final[Mapping[str, Callable[[Component, Any], None]]] = {
    "EnsureType": _nothing,
    "ToDevice": _nothing,
    "Activations": _activations,
    "AsDiscrete": _discrete,
    "Invert": _invert,
    "KeepLargestConnectedComponent": _largest,
    "SaveImage": _nothing,
}
