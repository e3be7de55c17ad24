"""What a worker says of the user that it runs as."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import pytest
from celery.platforms import check_privileges
from celery.signals import celeryd_init

from service.worker import celery


@pytest.mark.parametrize(("user", "lines"), [(0, 1), (1000, 0)])
def test_root_is_one_line_in_place_of_celery_s_warning(
    user: int, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def nothing(*_: Any, **__: Any) -> None:
        """Leave the logging of this process as it is."""

    monkeypatch.setattr(celery.logs, "configure", nothing)
    for name in ("getuid", "geteuid"):
        monkeypatch.setattr(os, name, lambda: user)
    # Not that of this process, which may be one of those that Celery warns of.
    for name in ("getgid", "getegid"):
        monkeypatch.setattr(os, name, lambda: 65534)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # The order of Celery's worker; its check follows `celeryd_init`.
        celeryd_init.send(sender="worker@here", instance=None, conf=celery.worker.conf, options={})
        check_privileges(celery.worker.conf.accept_content)
        with caplog.at_level(logging.WARNING, "locum.worker"):
            celery._configure_logging()
    assert [message.partition(":")[0] for message in caplog.messages] == ["the worker runs as root"] * lines
