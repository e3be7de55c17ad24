"""A real API over real HTTP, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from model_store.store import Store
from service.app import create_app
from service.context import ServiceContext
from service.database import Database
from service.http.connections import KEEP_ALIVE_SECONDS, BoundedProtocol
from service.server import make_server
from service.settings import Settings
from tests.helpers.service.migrated import begin_migrated
from tests.helpers.waiting import wait_for

# Nothing listens there: the API segments without Redis, and starts faster.
NO_REDIS = "redis://127.0.0.1:1"


@dataclass
class Api:
    """A running API and a client of it."""

    app: FastAPI
    settings: Settings
    client: httpx.Client
    loop: asyncio.AbstractEventLoop = field(repr=False)
    server: uvicorn.Server = field(repr=False)

    @property
    def context(self) -> ServiceContext:
        context: ServiceContext = self.app.state.locum
        return context

    @property
    def store(self) -> Store:
        return Store(self.settings.store)

    def cut_connections(self) -> None:
        """Break every open connection, as a network does."""
        for connection in list(self.server.server_state.connections):
            self.loop.call_soon_threadsafe(connection.transport.abort)  # type: ignore[union-attr]

    def segment(self, scan: bytes, *, name: str = "scan", **fields: str) -> httpx.Response:
        return self.send("/segment", scan, name=name, **fields)

    def classify(self, scan: bytes, *, name: str = "scan", **fields: str) -> httpx.Response:
        return self.send("/classify", scan, name=name, **fields)

    def send(self, route: str, scan: bytes, *, name: str = "scan", **fields: str) -> httpx.Response:
        return self.client.post(route, files={"scan": (name, scan)}, data=fields)


@contextmanager
def sent(api: Api, **request: Any) -> Iterator[None]:
    """A request to /segment is sent as `httpx` would; at the end its client leaves without the answer.

    Returns once the API has lost the connection.
    """
    built = api.client.build_request("POST", "/segment", **request)
    connections = api.server.server_state.connections
    before = set(connections)
    client = http.client.HTTPConnection("127.0.0.1", api.client.base_url.port, timeout=60)
    try:
        client.request("POST", "/segment", body=built.read(), headers=dict(built.headers))
        wait_for(lambda: connections - before)
        mine = connections - before
        yield
    finally:
        client.close()
    wait_for(lambda: not mine & connections)


@contextmanager
def running(settings: Settings) -> Iterator[Api]:
    database = Database(settings.resolved_database_url)
    if database.is_sqlite:
        begin_migrated(database)
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        http=BoundedProtocol,
        log_config=None,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )
    server = uvicorn.Server(config)
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the API did not start"
        thread.join(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield Api(app, settings, client, loops[0], server)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the API did not stop"


@contextmanager
def serving(settings: Settings) -> Iterator[int]:
    """The server that `python -m service` runs; gives its port."""
    server = make_server(settings)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)
