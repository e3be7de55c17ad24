"""What `locum` ends with; documented in docs/reference/command-line.md and below every --help."""

from __future__ import annotations

DONE, FAILED, USAGE, UNREACHABLE, NOT_ALLOWED, INTERRUPTED = 0, 1, 2, 3, 4, 130
