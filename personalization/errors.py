"""What can go wrong in the science.

PersonalizationError
├── NetworkError   a network's name, arguments or input do not fit
├── StateError     states of different networks, a value that is not finite, a weight that is not positive
├── LabelError     a label value outside the classes, or shapes that do not match
└── ExportError    a network that cannot become an onnx graph
"""

from __future__ import annotations


class PersonalizationError(Exception):
    """Base of every error raised by `personalization`."""


class NetworkError(PersonalizationError):
    """A network that cannot be built, or an input it cannot take."""


class StateError(PersonalizationError):
    """States that cannot be combined."""


class LabelError(PersonalizationError):
    """A prediction or a truth that is not a map of class indices."""


class ExportError(PersonalizationError):
    """A network that cannot become an onnx graph."""
