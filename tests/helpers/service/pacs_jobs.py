"""Submit jobs on a PACS in a workplace, without an API."""

from __future__ import annotations

from tests.helpers.service.workplace import Workplace


class Unqueued:
    """The parts of a context that a submission uses; the message is not sent."""

    def __init__(self, place: Workplace) -> None:
        self.settings, self.database, self.store = place.settings, place.database, place.store
        self.queue = self

    def send(self, task: str, *arguments: str, device_class: str | None = None) -> None:
        pass
