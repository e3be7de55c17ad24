"""A process that serves: uvicorn with the API, and the embedded Redis and worker beside it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from types import FrameType
from typing import Any

import typer
import uvicorn

from service.app import FILES, create_app
from service.commands.database import opened
from service.errors import ServiceError, SettingsInvalid
from service.http.connections import KEEP_ALIVE_SECONDS, BoundedProtocol
from service.inference.sessions import probe_provider
from service.runtime import logs
from service.runtime.broker import Broker
from service.runtime.embedded_worker import EmbeddedWorker
from service.settings import Settings, read_settings

_log = logging.getLogger("locum.service")


def settings_of(given: Mapping[str, Any]) -> Settings:
    """The settings with these values, which the command line gave. Raises SettingsInvalid."""
    return read_settings(FILES, **{**_for_a_terminal(), **given})


def run(settings: Settings) -> None:
    """Serve until a signal ends it. Raises typer.Exit where it cannot start."""
    logs.configure(settings, whole_process=True)
    signal.signal(signal.SIGTERM, _end)
    server = make_server(settings)
    try:
        _check_port(settings)
        settings.make_state_dir()
        if settings.device.startswith("cuda") or settings.device == "openvino":
            probe_provider(settings.device)
        with ExitStack() as stack:
            # Before anything is started, so that what is wrong with it is one line.
            with opened(settings):
                pass
            # Opened in this order, so that at the end the worker goes before the Redis it works on.
            broker = Broker(settings)
            stack.callback(broker.stop)
            if broker.embedded:
                broker.start()
            if settings.embedded_worker and _can_adapt():
                stack.enter_context(EmbeddedWorker(settings, ready=lambda: server.started))
            server.run()
    except KeyboardInterrupt:
        # Ctrl-C is how one ends it: uvicorn has finished its requests, and repeats the signal.
        return
    except ServiceError as error:
        typer.echo(f"locum: {error}", err=True)
        raise typer.Exit(1) from error
    if not server.started:
        raise typer.Exit(1)


class _Server(uvicorn.Server):
    """Uvicorn waits for every answer to end; this lets the endless ones know."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by the first signal that asks the process to end."""
        self.config.app.state.closing.set()  # type: ignore[union-attr]
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the port; at a terminal, say where."""
        await super().startup(sockets=sockets)
        if self.started and _at_a_terminal():
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            host = f"[{host}]" if ":" in host else host
            scheme = "https" if self.config.is_ssl else "http"
            typer.echo(f"Locum is at {scheme}://{host}:{port}{self.config.root_path}, until Ctrl-C.")


def make_server(settings: Settings) -> uvicorn.Server:
    """Uvicorn with the API, as it is served."""
    config = uvicorn.Config(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        http=BoundedProtocol,
        root_path=settings.root_path,
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
        log_config=None,
        access_log=False,
        # Do not reveal the name and version of the server.
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        # A client that holds its connection open must not hold up the end.
        timeout_graceful_shutdown=30,
    )
    return _Server(config)


def _can_adapt() -> bool:
    """Whether a worker could start: the distribution locum-serve has neither its modules nor torch."""
    if find_spec("torch") is not None:
        return True
    _log.warning("torch is not installed here: scans are answered, and jobs wait for a worker elsewhere")
    return False


def _at_a_terminal() -> bool:
    return sys.stderr.isatty()


def _for_a_terminal() -> dict[str, Any]:
    """Settings of the log for a person who looks on: warnings as text, if the environment does not say."""
    wanted = {"log_format": "plain", "log_level": "WARNING"} if _at_a_terminal() else {}
    return {name: value for name, value in wanted.items() if f"LOCUM_{name.upper()}" not in os.environ}


def _check_port(settings: Settings) -> None:
    """Raise SettingsInvalid if the port cannot be opened: before anything is migrated or started."""
    try:
        places = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, kind, protocol, _, address in places:
            with socket.socket(family, kind, protocol) as listener:
                # As servers do: connections that ended a moment ago do not occupy the port.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
    except OSError as error:
        raise SettingsInvalid(
            f"port {settings.port} of {settings.host} (LOCUM_PORT, LOCUM_HOST): expected a free one, found: "
            f"{error.strerror}; stop what listens there, or choose another with --port"
        ) from error


def _end(_: int, __: FrameType | None) -> None:
    # uvicorn has shut down in good order by the time it repeats the signal; this lets the children be
    # stopped too.
    raise SystemExit(0)
