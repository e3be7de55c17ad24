"""The errors of the package `personalization`.

PersonalizationError
├── NetworkError
├── StateError
├── LabelError
├── RoutingError
├── AdaptationError
│   └── CheckpointError
└── ExportError
"""

from __future__ import annotations


class PersonalizationError(Exception):
    """Base of all errors that `personalization` raises on purpose."""


class NetworkError(PersonalizationError):
    """A network's name, arguments or input are invalid."""


class StateError(PersonalizationError):
    """States are of different networks, or not finite, or have a weight that is not positive."""


class LabelError(PersonalizationError):
    """A label is outside the classes, or the shapes of labels do not match."""


class RoutingError(PersonalizationError):
    """A network that cannot be routed, or coefficients or images that do not fit a routed one."""


class AdaptationError(PersonalizationError):
    """An option out of its bounds, or images that cannot be adapted to."""


class CheckpointError(AdaptationError):
    """Bytes that are not a checkpoint, or the checkpoint of another adaptation."""


class ExportError(PersonalizationError):
    """A network that cannot become an onnx graph."""
