"""The API: `uvicorn service.app:create_app --factory`, settings from the environment.

This half of the service never imports torch: it validates, stores, enqueues, and runs onnxruntime.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial

from fastapi import Depends, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi_offline import FastAPIOffline

from service.about import locum_version
from service.audit.grouped import GroupedRows
from service.context import ServiceContext
from service.database import Database, check, upgrade
from service.dicom_node.configuration import load_node
from service.errors import BrokerError, PartNotReady
from service.expiry import expire
from service.http import problems
from service.http.authentication import AuthenticationMiddleware
from service.http.dependencies import known_parameters, room_on_disk
from service.http.origins import OriginMiddleware
from service.http.semantics import SemanticsMiddleware
from service.http.uploads.body_limit import BodyLimitMiddleware
from service.http.uploads.coding import ContentCodingMiddleware
from service.identity import keys
from service.identity.authentication import Authenticator
from service.identity.rates import RateLimits
from service.inference.admission import Admission
from service.inference.providers import CPU, FALLBACK, cuda_device_seen
from service.inference.sessions import SessionCache, probe_provider
from service.jobs.followers import Followers
from service.jobs.presence import presence
from service.jobs.reconcile import Reconciler
from service.observation import Reviews
from service.pacs.configuration import load_servers
from service.routes import (
    acceptances,
    adaptations,
    api_keys,
    change_plans,
    classify,
    cohorts,
    corrections,
    display,
    health,
    history,
    hospitals,
    jobs,
    key_usage,
    mask_checks,
    models,
    monailabel,
    observations,
    pacs,
    page,
    quantisations,
    segment,
    serving,
    session,
    shadow,
    watch,
)
from service.runtime import logs
from service.runtime.access_log import AccessLogMiddleware
from service.runtime.broker import Broker
from service.runtime.metrics import Metrics
from service.runtime.queue import Queue
from service.runtime.readiness import Readiness
from service.runtime.reserve import keep_reserve
from service.runtime.spool import prepare_spool
from service.runtime.store_check import Verifier
from service.serving.key_usage import drifts
from service.settings import FileReaders, Settings, graph_limits, ignored_variables, settings_or_exit
from service.shadow import Shadows
from service.watch import watcher
from service.watch.messages import undelivered
from service.watch.views import states

DESCRIPTION = """\
Segments and classifies scans with models that a federation of hospitals trained, personalized to each
hospital.

Every rejection is a problem (RFC 9457, `application/problem+json`). Every answer carries `Locum-Request`, the
request's id. **For research use only: no answer of this service is a diagnosis.**
"""

# Less than this, and neither a scan nor a decision may find room.
_LEAST_FREE_BYTES = 64 * 2**20

FILES: FileReaders = {"pacs": load_servers, "dicom_node": load_node}
"""What the API's process reads when it starts; it only checks the node's."""

_log = logging.getLogger("locum.service")


def create_app(settings: Settings | None = None) -> FastAPI:
    """Build the application. Nothing is opened or started before its lifespan begins.

    Args:
        settings: from the environment when None; the process ends where it has a wrong one.
    """
    chosen = settings_or_exit(FILES) if settings is None else settings
    measured = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        logs.configure(chosen)
        async with AsyncExitStack() as stack:
            for line in ignored_variables():
                _log.warning(line)
            app.state.locum = await _open(chosen, measured, app.state.closing, stack)
            if chosen.auth in ("keys", "both"):
                await asyncio.to_thread(_warn_without_keys, app.state.locum.database)
            _log.info("ready on store %s", chosen.store)
            yield

    # Its /docs loads nothing from elsewhere.
    app = FastAPIOffline(
        redoc_url=None,
        title="Locum",
        version=locum_version(),
        description=DESCRIPTION,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        lifespan=lifespan,
        # A redirect answers a form with nothing, which a client that does not follow takes for its mask.
        redirect_slashes=False,
    )
    # Set by the server's runner, before it waits for the last answers.
    app.state.closing = threading.Event()
    for routes in (
        segment,
        classify,
        display,
        models,
        hospitals,
        serving,
        change_plans,
        shadow,
        key_usage,
        observations,
        corrections,
        history,
        watch,
        api_keys,
        cohorts,
        adaptations,
        jobs,
        mask_checks,
        quantisations,
        acceptances,
        pacs,
        session,
    ):
        app.include_router(routes.router, dependencies=[Depends(known_parameters), Depends(room_on_disk)])
    app.include_router(health.router)
    if chosen.page:
        app.include_router(page.router)
    if chosen.monailabel != "off":
        # Plugins add parameters of their own.
        app.include_router(monailabel.router, dependencies=[Depends(room_on_disk)])
    app.add_middleware(SemanticsMiddleware)
    app.add_middleware(AuthenticationMiddleware)
    app.add_middleware(BodyLimitMiddleware)
    app.add_middleware(ContentCodingMiddleware)
    if chosen.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=chosen.allowed_origins,
            allow_methods=["*"],
            allow_headers=["Authorization", "Content-Type", "If-Match", "Idempotency-Key", "Last-Event-ID"],
            expose_headers=["*"],
        )
    app.add_middleware(OriginMiddleware, hosts=chosen.allowed_hosts, origins=chosen.allowed_origins)
    app.add_middleware(AccessLogMiddleware, metrics=measured)
    if chosen.monailabel == "root":
        app.add_middleware(monailabel.AtRoot)
    # Last, and so outermost: the request's id is there for everything else.
    problems.install(app)
    return app


async def _open(
    settings: Settings, measured: Metrics, closing: threading.Event, stack: AsyncExitStack
) -> ServiceContext:
    """Open every part, and leave on the stack how it is closed. Whatever blocks does so in a thread."""
    if settings.device.startswith("cuda") or settings.device == "openvino":
        # Else the first scan would find it out.
        await asyncio.to_thread(probe_provider, settings.device)
    settings.make_state_dir()
    prepare_spool(settings.spool)
    store = settings.open_store()
    if settings.trusted_keys is not None:
        _log.info("only versions that a key of %s signed are opened", settings.trusted_keys)
        if settings.signing_key is None:
            _log.warning("LOCUM_SIGNING_KEY is not set: no job can publish a version that would be opened")
    else:
        # Without authentication the service is one person's: it answers loopback only.
        _log.log(
            logging.INFO if settings.auth == "none" else logging.WARNING,
            "LOCUM_TRUSTED_KEYS is not set: everyone who can write to the store %s is trusted with what "
            "hospitals are served",
            settings.store,
        )
    names = await asyncio.to_thread(store.versions.names)
    if not names:
        _log.warning("no artefact in the store %s: publish one, or name another store", store.root)
    database = Database(settings.resolved_database_url)
    stack.callback(database.dispose)
    broker = Broker(settings)
    stack.push_async_callback(asyncio.to_thread, broker.stop)
    # Side by side; without Redis the service starts all the same: it segments, and says that it is not ready.
    await asyncio.gather(asyncio.to_thread(upgrade, database), asyncio.to_thread(_start, broker))
    queue = Queue(settings, broker)
    stack.callback(queue.close)
    verifier = Verifier(settings, database, queue, measured)

    def store_check() -> str:
        store.check()
        names = store.versions.names()
        return f"{len(names)} names in the store" if names else "the store is empty: publish a model"

    def database_check() -> str:
        check(database)
        return "migrated and readable"

    def disk_check() -> str:
        reserved = keep_reserve(settings)
        free = shutil.disk_usage(settings.state_dir).free
        if free < _LEAST_FREE_BYTES:
            raise PartNotReady(f"{free} bytes are free in {settings.state_dir}: free some space")
        if not reserved:
            raise PartNotReady(f"{settings.state_dir} has no room for the reserve: free some space")
        return "there is space in the state folder"

    def queue_check() -> str:
        # Restart an embedded Redis that died or lost its owner.
        broker.start()
        return "embedded Redis answers" if broker.embedded else "Redis answers"

    def device_check() -> str:
        provider = probe_provider(settings.device)
        if settings.device == "auto" and provider == CPU and cuda_device_seen():
            raise PartNotReady(FALLBACK)
        return f"scans are answered by {provider}"

    def worker_check() -> str:
        with database.read() as session:
            found = presence(session, None if settings.jobs_on == "any" else settings.jobs_on)
        measured.workers.labels("running").set(found.running)
        measured.workers.labels("silent").set(found.silent)
        if found.absence is not None:
            raise PartNotReady(found.absence)
        return f"{found.running} running" + (f", {found.silent} silent" if found.silent else "")

    def webhooks_check() -> str:
        with database.read() as session:
            found = undelivered(session, settings.webhooks)
        measured.webhooks_undelivered.set(sum(each.count for each in found))
        if found:
            raise PartNotReady("; ".join(map(str, found)))
        return f"{len(settings.webhooks)} configured"

    def files_check() -> str:
        files = settings.open_files()
        files.check()
        return f"{files.location} answers"

    checks = {
        "store": store_check,
        "database": database_check,
        "disk": disk_check,
        "queue": queue_check,
        "worker": worker_check,
        "device": device_check,
    }
    if settings.files is not None:
        checks["files"] = files_check
    if settings.webhooks:
        checks["webhooks"] = webhooks_check
    readiness = Readiness(
        checks,
        observe=lambda part, ok: measured.ready.labels(part).set(ok),
        # Scans are answered without a worker or webhooks, and, unless a GPU is demanded, on the CPU.
        optional=frozenset(
            {"worker", "webhooks"} | (set() if settings.device.startswith("cuda") else {"device"})
        ),
        late=frozenset({"worker"} if settings.embedded_worker else ()),
    )
    stack.callback(readiness.close)
    await readiness.look()
    reconciler = Reconciler(
        settings,
        database,
        queue,
        measured,
        partial(expire, database, settings),
        partial(watcher.look, database, hooks=settings.webhooks),
    )
    rates = None
    if settings.auth != "none":
        rates = RateLimits(settings.rate_limit, broker.url)
        stack.push_async_callback(rates.close)
    followers = Followers(database, settings.max_followers, closing)
    watchers = [readiness.watch(), verifier.watch(), reconciler.watch(), followers.watch()]
    if settings.webhooks:
        # Its imports would cost every start a tenth of a second.
        from service.watch.sender import Sender

        watchers.append(Sender(database, settings.webhooks, settings.reconcile_every_seconds).watch())
    for watching in watchers:
        stack.push_async_callback(_cancel, asyncio.create_task(watching))
    admission = Admission(settings.inference_slots, settings.inference_queue)
    sessions = SessionCache(
        settings.session_cache,
        threads=settings.threads,
        device=settings.device,
        limits=graph_limits(settings),
    )
    measured.watch(admission, sessions)
    measured.watch_drift(partial(drifts, database, store))
    measured.watch_watches(partial(states, database))
    return ServiceContext(
        settings,
        store,
        database,
        sessions,
        admission,
        measured,
        readiness,
        queue,
        Authenticator(settings, database),
        followers,
        GroupedRows(database),
        Reviews(database),
        Shadows(database),
        rates,
    )


def _warn_without_keys(database: Database) -> None:
    with database.read() as session:
        if not keys.listed(session):
            _log.warning(
                "there is no API key yet: `python -m service keys create first --role admin` makes one"
            )


def _start(broker: Broker) -> None:
    with suppress(BrokerError):
        broker.start()


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
