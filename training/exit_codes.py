"""What the commands of training end with, beside 0."""

from __future__ import annotations

FAILED = 2
# As a shell reports a program that Ctrl-C ended.
INTERRUPTED = 130
