"""Ceph's S3 gateway on loopback, before a cluster of one monitor and one store in memory.

Needs Debian's packages ceph-mon, ceph-osd, ceph-common and radosgw; `make test-s3` installs them.
"""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from locum.demo.service_process import free_port
from tests.helpers.waiting import wait_for

_MEMORY = 4 << 30
_CONFIGURATION = """\
[global]
fsid={fsid}
mon_host=[v1:127.0.0.1:{monitor}]
ms_bind_msgr2=false
auth_cluster_required=none
auth_service_required=none
auth_client_required=none
osd_pool_default_size=1
osd_pool_default_min_size=1
osd_pool_default_pg_num=4
mon_allow_pool_size_one=true
mon_max_pg_per_osd=2000
admin_socket={folder}/$name.asok
pid_file={folder}/$name.pid
log_file={folder}/$name.log
[mon.a]
mon_data={folder}/monitor
[osd.0]
osd_data={folder}/store
osd_objectstore=memstore
memstore_device_bytes={memory}
osd_class_update_on_start=false
osd_crush_update_on_start=false
[client.gateway]
rgw_frontends=beast endpoint=127.0.0.1:{gateway}
rgw_data={folder}
"""


@contextmanager
def ceph_gateway(folder: Path, key: str, secret: str) -> Iterator[str]:
    """Start the cluster in `folder` with a user of this key, and give the gateway's URL."""
    fsid, store = uuid.uuid4(), str(uuid.uuid4())
    monitor, gateway = free_port(), free_port()
    for name in ("monitor", "store"):
        (folder / name).mkdir()
    configuration = folder / "ceph.conf"
    configuration.write_text(
        _CONFIGURATION.format(fsid=fsid, folder=folder, monitor=monitor, gateway=gateway, memory=_MEMORY)
    )
    environment = {**os.environ, "CEPH_CONF": str(configuration)}

    def run(*command: str) -> None:
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=120)

    @contextmanager
    def daemon(*command: str) -> Iterator[None]:
        with subprocess.Popen(
            [*command, "-f"], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            try:
                yield
            finally:
                process.kill()

    address, monitors = f"[v1:127.0.0.1:{monitor}]", str(folder / "monitors")
    run("monmaptool", "--create", "--fsid", str(fsid), "--addv", "a", address, monitors)
    run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monitors, "--no-mon-config")
    with ExitStack() as stack:
        stack.enter_context(daemon("ceph-mon", "-i", "a", "--no-mon-config"))
        run("ceph", "osd", "new", store)
        run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", store)
        stack.enter_context(daemon("ceph-osd", "-i", "0"))
        run("ceph", "osd", "crush", "add", "osd.0", "1.0", "root=default", "host=a")
        user = ("--uid", "test", "--display-name", "test", "--access-key", key, "--secret", secret)
        run("radosgw-admin", "user", "create", *user)
        stack.enter_context(daemon("radosgw", "-n", "client.gateway"))
        url = f"http://127.0.0.1:{gateway}"
        wait_for(lambda: _answers(url), pause_s=0.2)
        yield url


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False
