"""The hospital's line to the operator."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from training.network import link
from training.network.kits import Kit


class Swallowing:
    """A cell that is interrupted while it sends, and catches it as NVFLARE's does."""

    def __init__(self, *_: Any) -> None:
        self.requests = 0

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def request(self, *_: Any) -> bytes:
        self.requests += 1
        with suppress(BaseException):
            os.kill(os.getpid(), signal.SIGINT)
        return b"answer"


def test_ctrl_c_that_the_communication_swallows_is_obeyed_at_the_next_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(link, "Cell", Swallowing)
    line = link.Link(cast("Kit", Path()), lambda _: None)
    try:
        line.start()
        assert line.ask("next") == b"answer"
        with pytest.raises(KeyboardInterrupt):
            line.ask("next")
        assert cast("Swallowing", line.cell).requests == 1
        line.stop()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
