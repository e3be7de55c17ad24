"""The parts of a running API, built once at startup and bound to the caller for each request."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from service.settings import Settings

if TYPE_CHECKING:
    from model_store.store import Store
    from service.audit.grouped import GroupedRows
    from service.database import Caller, Database
    from service.identity.authentication import Authenticator
    from service.identity.rates import RateLimits
    from service.inference.admission import Admission
    from service.inference.sessions import SessionCache
    from service.jobs.followers import Followers
    from service.observation import Reviews
    from service.runtime.metrics import Metrics
    from service.runtime.queue import Queue
    from service.runtime.readiness import Readiness
    from service.shadow import Shadows


@dataclass(frozen=True)
class ServiceContext:
    """The parts of one API process.

    `admission` bounds how many scans are in memory, `sessions` how many networks; `readiness` is refreshed in
    the background, so that a health request never waits; `queue` is where long work goes; `authenticator`
    knows who sent a request; `followers` are the clients that follow a job; `rows` writes the audit
    trail; `reviews` rank an answer among the hospital's own; `shadows` take scans for a second version;
    `rates` limit the requests of each caller, where callers are known.
    """

    settings: Settings
    store: Store
    database: Database
    sessions: SessionCache
    admission: Admission
    metrics: Metrics
    readiness: Readiness
    queue: Queue
    authenticator: Authenticator
    followers: Followers
    rows: GroupedRows
    reviews: Reviews
    shadows: Shadows
    rates: RateLimits | None

    def for_caller(self, caller: Caller) -> ServiceContext:
        """The same parts, with a store and a database in which the caller finds only what it may see.

        Its scans are in work and in the queue by its share.
        """
        store = self.store.as_of_now()
        if caller.hospitals is not None:
            store = store.visible_to(caller.sees)
        database, admission = self.database.for_caller(caller), self.admission.for_share(caller.share)
        return replace(self, store=store, database=database, admission=admission)
