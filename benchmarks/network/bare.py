"""NVFLARE alone: numpy arrays to every site and back, by its own cells, encoding and streaming.

    python -m benchmarks.network.bare KIT [MEGABYTES ROUNDS FILE]

With the operator's kit, the process sends, waits for all sites, takes the mean as the engine does, writes the
result to FILE, synchronised, and prints the seconds of each round as JSON. With another kit it echoes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.network.echo import weights_of
from personalization.state import StreamingMean, to_safetensors
from training.network.kits import SERVER, KitFile

CHANNEL, TOPIC = "bare", "echo"


def main(kit: Path, *arguments: str) -> None:
    """Send, or echo."""
    from nvflare.app_common.decomposers import numpy_decomposers
    from nvflare.fuel.f3.cellnet.cell import Cell
    from nvflare.fuel.f3.drivers.driver_params import DriverParams

    numpy_decomposers.register()
    content = KitFile.model_validate_json((kit / "kit.json").read_bytes())
    base = "server" if content.name == SERVER else "client"
    keys = {
        "server": (DriverParams.SERVER_CERT, DriverParams.SERVER_KEY),
        "client": (DriverParams.CLIENT_CERT, DriverParams.CLIENT_KEY),
    }[base]
    credentials = {
        DriverParams.CA_CERT.value: str(kit / "rootCA.pem"),
        keys[0].value: str(kit / f"{base}.crt"),
        keys[1].value: str(kit / f"{base}.key"),
    }
    cell = Cell(content.name, f"grpc://{content.address}", True, credentials)
    if content.name == SERVER:
        cell.core_cell.start()
        _send(cell, content, float(arguments[0]), int(arguments[1]), Path(arguments[2]))
        os._exit(0)
    cell.register_request_cb(channel=CHANNEL, topic=TOPIC, cb=_echo)
    cell.core_cell.start()
    while True:
        time.sleep(60)


def _echo(request: Any) -> Any:
    from nvflare.fuel.f3.cellnet.utils import make_reply

    return make_reply("ok", body=request.payload)


def _send(cell: Any, kit: KitFile, megabytes: float, rounds: int, file: Path) -> None:
    import torch
    from nvflare.fuel.f3.message import Message

    weights = weights_of(megabytes)
    end = time.monotonic() + 60
    while not all(cell.core_cell.is_cell_connected(site) for site in kit.sites):
        if time.monotonic() > end:
            raise TimeoutError("the sites did not connect")
        time.sleep(0.1)
    transport, whole = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        payload = {name: tensor.numpy() for name, tensor in weights.items()}
        replies = cell.broadcast_request(
            channel=CHANNEL, topic=TOPIC, targets=list(kit.sites), request=Message(None, payload), timeout=300
        )
        arrived = time.perf_counter()
        mean = StreamingMean()
        for site in kit.sites:
            found = {name: torch.from_numpy(array) for name, array in replies[site].payload.items()}
            mean.add(found, 1.0, site)
        weights = mean.result()
        with file.open("wb") as out:
            out.write(to_safetensors(weights))
            out.flush()
            os.fsync(out.fileno())
        transport.append(arrived - began)
        whole.append(time.perf_counter() - began)
    print(json.dumps({"transport_s": transport, "round_s": whole}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
