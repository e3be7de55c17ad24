"""`python -m service.worklist`: perform the work items of `LOCUM_WORKLIST` until SIGTERM or Ctrl-C."""

from __future__ import annotations

import signal
import sys
import threading
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from service.settings import Settings
    from service.worklist.performer import Performer


def performer_of(settings: Settings, stopping: threading.Event) -> Performer:
    """The performer that the settings describe. Raises SettingsInvalid."""
    from service.errors import SettingsInvalid
    from service.pacs.configuration import load_servers
    from service.worklist.configuration import load_worklist
    from service.worklist.performer import Performer

    if settings.worklist is None or settings.pacs is None:
        raise SettingsInvalid("LOCUM_WORKLIST and LOCUM_PACS: expected two files (YAML), found one or none")
    configuration, servers = load_worklist(settings.worklist), load_servers(settings.pacs)
    for name, worklist in configuration.worklists.items():
        server = servers.get(worklist.pacs)
        if server is None or worklist.hospital not in server.hospitals or not server.store:
            raise SettingsInvalid(
                f"worklist '{name}': expected a PACS of LOCUM_PACS in which hospital "
                f"'{worklist.hospital}' may store, found '{worklist.pacs}'"
            )
        if server.ups_url is None:
            raise SettingsInvalid(f"worklist '{name}': PACS '{worklist.pacs}' has no `ups`, nor a `url`")
    settings.make_state_dir()
    return Performer(configuration, servers, settings.state_dir / "worklist", stopping)


def main() -> None:
    """Claim work items (UPS-RS), have them segmented from and into the PACS, and report on them.

    LOCUM_WORKLIST and LOCUM_PACS name the configurations (YAML), LOCUM_STATE_DIR the folder of the claims,
    which one process uses at a time.
    """
    # Help needs none of them.
    from service.errors import SettingsInvalid
    from service.runtime import logs
    from service.settings import settings_or_exit
    from service.worklist.configuration import load_worklist

    settings = settings_or_exit({"worklist": load_worklist})
    logs.configure(settings, whole_process=True)
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    try:
        performer_of(settings, stopping).run()
    except SettingsInvalid as error:
        sys.exit(f"locum: {error}")


if __name__ == "__main__":
    typer.run(main)
