"""The errors of the package `personalization`.

PersonalizationError
├── NetworkError   a network's name, arguments or input are invalid
├── StateError     states of different networks, a value that is not finite, a weight that is not positive
├── LabelError     a label value outside the classes, or shapes that do not match
├── RoutingError   a network that cannot be routed, or coefficients or images that do not fit it
├── AdaptationError      an option out of its bounds, or images that cannot be adapted to
│   └── CheckpointError  bytes that are not a checkpoint, or the checkpoint of another adaptation
└── ExportError    a network that cannot become an onnx graph
"""

from __future__ import annotations


class PersonalizationError(Exception):
    """Base of all errors that `personalization` raises on purpose."""


class NetworkError(PersonalizationError):
    """A network that cannot be built, or an input that does not fit it."""


class StateError(PersonalizationError):
    """States that cannot be combined."""


class LabelError(PersonalizationError):
    """A prediction or ground truth that does not consist of valid class indices."""


class RoutingError(PersonalizationError):
    """A network that cannot be routed, or coefficients or images that do not fit a routed one."""


class AdaptationError(PersonalizationError):
    """An option out of its bounds, or images that cannot be adapted to."""


class CheckpointError(AdaptationError):
    """Bytes that are not a checkpoint, or the checkpoint of another adaptation."""


class ExportError(PersonalizationError):
    """A network that cannot become an onnx graph."""
