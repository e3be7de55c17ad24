"""`python -m service.dicom_node`: run the node of `LOCUM_DICOM_NODE` until SIGTERM or Ctrl-C."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from service.settings import Settings

_log = logging.getLogger("locum.node")


def run(settings: Settings, stopping: threading.Event) -> None:
    """Receive and forward until `stopping` is set.

    Raises:
        SettingsInvalid: there is no configuration, the port is taken, or another node has the queue.
    """
    from service.dicom_node.configuration import load_node
    from service.dicom_node.forward import Forwarder
    from service.dicom_node.scp import StorageScp
    from service.dicom_node.spool import Spool
    from service.errors import SettingsInvalid

    if settings.dicom_node is None:
        raise SettingsInvalid("LOCUM_DICOM_NODE: expected the node's configuration (YAML), found none")
    node = load_node(settings.dicom_node)
    settings.make_state_dir()
    with ExitStack() as stack:
        spool = Spool(settings.state_dir / "dicom-node", node.max_queue_bytes)
        stack.callback(spool.close)
        try:
            scp = StorageScp(node, spool)
        except OSError as error:
            raise SettingsInvalid(
                f"the node cannot listen on {node.host}:{node.port} ({type(error).__name__}): another "
                "process has the port, or a certificate cannot be read"
            ) from error
        stack.callback(scp.close)
        _log.info("AE %s listens on %s:%d", node.ae_title, node.host, scp.port)
        Forwarder(node, spool, stopping).run(lambda: scp.open_series)


def main() -> None:
    """Receive series by C-STORE, and store their segmentations, until SIGTERM or Ctrl-C.

    LOCUM_DICOM_NODE names the configuration (YAML), LOCUM_STATE_DIR the folder of the queue.
    """
    # They import the readers of scans, which help does not need.
    from service.dicom_node.configuration import load_node
    from service.errors import SettingsInvalid
    from service.runtime import logs
    from service.settings import settings_or_exit

    settings = settings_or_exit({"dicom_node": load_node})
    logs.configure(settings, whole_process=True)
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    try:
        run(settings, stopping)
    except SettingsInvalid as error:
        sys.exit(f"locum: {error}")


if __name__ == "__main__":
    typer.run(main)
