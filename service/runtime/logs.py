"""One line per event on standard error, with its time (UTC), level and request id: JSON, or plain text."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

from service.settings import Settings
from service.tracing import current_request

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}


class JsonFormatter(logging.Formatter):
    """A record as one JSON object; what was passed as `extra` becomes members of it."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "request": current_request.get(),
            "message": record.getMessage(),
            **{name: value for name, value in vars(record).items() if name not in _STANDARD},
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class PlainFormatter(logging.Formatter):
    """A record for a person at a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the traceback if there is one."""
        milliseconds = getattr(record, "milliseconds", None)
        took = "" if milliseconds is None else f" in {milliseconds} ms"
        line = f"{_time(record)} {record.levelname:<7} {record.getMessage()}{took}"
        request = current_request.get()
        line += "" if request == "-" else f" [{request}]"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def configure(settings: Settings, *, whole_process: bool = False) -> None:
    """Log Locum and uvicorn to standard error, without uvicorn's access log, which has paths in it.

    With `whole_process`, the warnings of every library too: for a process that is Locum's own. Calling it
    again changes nothing.
    """
    logging.getLogger("locum").setLevel(settings.log_level)
    logging.getLogger("uvicorn").setLevel(settings.log_level)
    logging.getLogger("uvicorn.access").disabled = True
    # A logger without a name is the root, through which everything passes.
    for name in ("",) if whole_process else ("locum", "uvicorn"):
        logger = logging.getLogger(name)
        if not any(isinstance(handler, _Handler) for handler in (*logger.handlers, *logging.root.handlers)):
            for other in logger.handlers[:] if name else []:
                logger.removeHandler(other)
            logger.addHandler(_Handler(settings))


class _Handler(logging.StreamHandler[TextIO]):
    def __init__(self, settings: Settings) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(JsonFormatter() if settings.log_format == "json" else PlainFormatter())


def _time(record: logging.LogRecord) -> str:
    return (
        datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )
