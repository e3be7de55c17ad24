"""Report the epochs of a job that learns, and continue after the last one that a lost worker reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from model_store.task import Task
from personalization.errors import CheckpointError
from service.jobs import records
from service.worker.attempt import Attempt
from service.worker.pictures import Preview

Checkpoint = TypeVar("Checkpoint")
Learned = TypeVar("Learned")


class EpochReports:
    """What a job reports of each epoch: its checkpoint, an event, a picture and the progress."""

    def __init__(self, attempt: Attempt, stage: str, epochs: int, images_NCHW: Tensor, task: Task) -> None:
        """Enter the stage. The pictures show a few of the images, which are prepared for the task."""
        self._attempt, self._stage, self._epochs = attempt, stage, epochs
        attempt.set_stage(stage, epoch=0, epochs=epochs)
        with attempt.database.read() as session:
            events = records.events_of_type(session, attempt.job.id, "epoch")
            self._noted = {event.data["epoch"] for event in events}
        self._preview = Preview(attempt, images_NCHW, task)

    def report(
        self,
        epoch: int,
        checkpoint: bytes,
        history: Mapping[int, Mapping[str, Any]],
        class_maps: Callable[[Tensor], NDArray[np.uint8]],
        seconds_left: int | None = None,
    ) -> None:
        """Report the epoch that has ended.

        Args:
            epoch: its number.
            checkpoint: continues after it.
            history: the data of every epoch's event, by its number.
            class_maps: the masks [N, H, W] of images [N, C, H, W] by the present state.
            seconds_left: an estimate, where there is one.

        Raises:
            JobCancelled, LeaseLost.
        """
        attempt = self._attempt
        attempt.check_cancelled()
        # The file comes before the event, so that an epoch with an event is never repeated.
        attempt.folder.write(attempt.folder.CHECKPOINT, checkpoint)
        for number, data in history.items():
            if number not in self._noted:
                self._noted.add(number)
                attempt.emit("epoch", data)
        self._preview.draw(epoch, class_maps)
        more = {} if seconds_left is None else {"seconds_left": seconds_left}
        attempt.set_stage(self._stage, epoch=epoch, epochs=self._epochs, preview=True, **more)


def resume(
    attempt: Attempt,
    what: str,
    parse: Callable[[bytes], Checkpoint],
    learn: Callable[[Checkpoint | None], Learned],
) -> Learned:
    """Learn from the checkpoint of an earlier attempt on; where it does not fit, warn and start over.

    `what` names the learning in the warning. `parse` and `learn` raise CheckpointError.
    """
    try:
        content = attempt.read_checkpoint()
        return learn(None if content is None else parse(content))
    except CheckpointError as error:
        attempt.warn(f"{what} started over: {error}")
        return learn(None)
