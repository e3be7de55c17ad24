"""A member's process that misuses NVFLARE's cell; prints what each attempt was answered, as JSON.

python -m tests.helpers.training.hostile_cell KIT ADDRESS SECONDS

It makes them once it is served, or is not within so many seconds.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from training.network.messages import PROTOCOL, Asking, pack

ASKING = pack(Asking(protocol=PROTOCOL))


def main(kit: Path, address: str, seconds: float) -> None:
    from nvflare.fuel.f3.cellnet.core_cell import CoreCell
    from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey
    from nvflare.fuel.f3.drivers.driver_params import DriverParams
    from nvflare.fuel.f3.message import Message

    credentials = {
        DriverParams.CA_CERT.value: str(kit / "rootCA.pem"),
        DriverParams.CLIENT_CERT.value: str(kit / "client.crt"),
        DriverParams.CLIENT_KEY.value: str(kit / "client.key"),
    }
    cell = CoreCell(kit.name, f"grpc://{address}", True, credentials)
    cell.start()

    def ask(channel: str, topic: str, payload: Any, target: str = "server", origin: str | None = None) -> str:
        if origin is not None:
            cell.add_outgoing_request_filter(
                channel, topic, lambda m: m.set_header(MessageHeaderKey.ORIGIN, origin)
            )
        reply = cell.send_request(channel, topic, target, Message(None, payload), timeout=1.5, optional=True)
        return str(reply.get_header(MessageHeaderKey.RETURN_CODE))

    end = time.monotonic() + seconds
    while ask("locum", "invite", ASKING) != "ok" and time.monotonic() < end:
        time.sleep(0.2)
    answers = {
        "own name": ask("locum", "invite", ASKING),
        "object for bytes": ask("locum", "next", {"session": [1, 2]}),
        "too long": ask("locum", "write", b"x" * (6 << 20)),
        "to another hospital": ask("locum", "wake", b"", target="cedar"),
        "admin command": ask(CellChannel.SERVER_COMMAND, "heartbeat", {"a": 1}),
        "job task": ask(CellChannel.SERVER_MAIN, "register", {"a": 1}),
        "certificate exchange": ask("credential_manager", "key_exchange", {"cert_content": b""}),
        "bulk": ask(CellChannel.CELLNET, "bulk", [{"target": "server"}]),
        "still served": ask("locum", "invite", ASKING),
        "as another hospital": ask("locum", "invite", ASKING, origin="cedar"),
    }
    print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
    # NVFLARE's threads would keep the process.
    import os

    os._exit(0)
