"""Memory of processes that train: kept when freed, since the next step asks for as much again."""

from __future__ import annotations

import ctypes

# glibc's names and numbers (mallopt(3))
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_KEPT_BYTES = 2**30


def keep_freed_memory() -> None:
    """Have this process keep up to a gigabyte of freed memory, where the C library can be told to.

    By default what is freed soon goes back to the system, and every page of it that is asked for again is
    cleared again: of a small network's training that is a tenth. Results do not depend on it.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        library.mallopt(_MMAP_THRESHOLD, _KEPT_BYTES)
