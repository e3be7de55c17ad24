"""What the plugins of 3D Slicer and OHIF send to a server of MONAI Label, and what they do with the answers.

Written from the plugins' behaviour on the wire, release 0.8.5.
"""

from __future__ import annotations

import json
import re
from http.client import HTTPConnection, HTTPMessage
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus, urlencode, urlsplit

import httpx
import numpy as np
from numpy.typing import NDArray

BOUNDARY = "----------lImIt_of_THE_fIle_eW_$"


class Slicer:
    """The plugin of 3D Slicer: a client with a server URL, which sends `client_id` with everything."""

    def __init__(self, url: str, folder: Path, token: str | None = None) -> None:
        self._url, self._folder = urlsplit(url.rstrip("/")), folder
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self.info: dict[str, Any] = {}

    def send(
        self, method: str, selector: str, body: bytes | None = None, content_type: str | None = None
    ) -> tuple[int, HTTPMessage, bytes]:
        connection = HTTPConnection(self._url.hostname or "", self._url.port, timeout=60)
        headers = dict(self._headers)
        if body is not None:
            headers |= {"content-type": content_type or "application/json", "content-length": str(len(body))}
        connection.request(method, self._url.path + selector, body=body, headers=headers)
        response = connection.getresponse()
        try:
            return response.status, response.msg, response.read()
        finally:
            connection.close()

    def json(self, method: str, selector: str, body: dict[str, Any] | None = None) -> Any:
        status, _, content = self.send(method, selector, None if body is None else json.dumps(body).encode())
        assert status == 200, (status, content)
        return json.loads(content)

    def multipart(self, method: str, selector: str, fields: dict[str, str], files: dict[str, Path]) -> Any:
        """Lines as the plugin joins them: each file's whole path is its name."""
        lines: list[bytes] = []
        for name, value in fields.items():
            head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'
            lines += [head.encode(), value.encode(), b"\r\n"]
        for name, path in files.items():
            head = (
                f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"; filename="{path}"\r\n'
                "Content-Type: application/octet-stream\r\n\r\n"
            )
            lines += [head.encode(), path.read_bytes(), b"\r\n"]
        body = b"".join([*lines, f"--{BOUNDARY}--\r\n\r\n".encode()])
        return self.send(method, selector, body, f"multipart/form-data; boundary={BOUNDARY}")

    def connect(self) -> bool:
        """Fetch what may be chosen; say whether the plugin would begin to poll for a training."""
        status, _, _ = self.send("GET", "/auth/")
        assert status != 200, "the plugin would ask for a name and a password"
        self.info = self.json("GET", "/info/")
        assert not self.info.get("config"), "the plugin would ask for a newer server"
        status, _, _ = self.send("GET", "/train/?check_if_running=true")
        return status == 200

    def choices(self, model: str) -> dict[str, Any]:
        """What the plugin sends of its boxes: of each list the first value, unless a person chose another."""
        config = self.info["models"][model]["config"]
        return {name: value[0] if isinstance(value, list) else value for name, value in config.items()}

    def choose(self, model: str, name: str, value: str) -> None:
        values = self.info["models"][model]["config"][name]
        values.remove(value)
        values.insert(0, value)

    def create_session(self, scan: Path) -> str:
        url = f"{self._url.geturl()}/session/"
        with scan.open("rb") as file:
            answer = httpx.put(
                url,
                files={"files": (scan.name, file)},
                data={"client_id": "user-xyz"},
                headers=self._headers,
                timeout=60,
            )
        assert answer.status_code == 200, answer.text
        session: str = answer.json()["session_id"]
        return session

    def segment(
        self, model: str, image: str, session: str | None, **chosen: str
    ) -> tuple[Path, list[str], dict[str, Any]]:
        """The saved mask, the names of its values from 1 on, and the parameters; a person sets `chosen`."""
        selector = f"/infer/{quote_plus(model)}?image={quote_plus(image)}"
        if session is not None:
            status, _, _ = self.send("GET", f"/session/{quote_plus(session)}")
            assert status == 200
            selector += f"&session_id={quote_plus(session)}"
        params = {
            **self.choices(model),
            **chosen,
            "result_extension": ".nrrd",
            "result_dtype": "uint8",
            "client_id": "user-xyz",
        }
        status, headers, body = self.multipart("POST", selector, {"params": json.dumps(params)}, {})
        assert status == 200, body
        form, files = read_multipart(headers, body)
        ((name, content),) = files.items()
        saved = self._folder / name
        saved.write_bytes(content)
        answered = json.loads(form["params"])
        labels = answered.get("label_names") or self.info["models"][model]["labels"]
        names = [name for name, _ in sorted(labels.items(), key=lambda item: item[1])]
        return saved, [name for name in names if name != "background"], answered


def read_multipart(headers: HTTPMessage, body: bytes) -> tuple[dict[str, str], dict[str, bytes]]:
    """Fields by name and files by file name: a part is a file if it has a file name, and nothing else is."""
    boundary = (headers.get_param("boundary") or "").encode()  # type: ignore[union-attr]
    form, files = {}, {}
    for part in body.split(b"--" + boundary)[1:-1]:
        head, _, content = part.partition(b"\r\n\r\n")
        disposition = re.search(rb"(?i)content-disposition: (.*)", head)
        assert disposition is not None
        name = re.search(rb'\bname="([^"]*)"', disposition[1])
        filename = re.search(rb'filename="([^"]*)"', disposition[1])
        content = content.removesuffix(b"\r\n")
        if filename is not None:
            files[filename[1].decode()] = content
        else:
            assert name is not None
            form[name[1].decode()] = content.decode()
    return form, files


class Ohif:
    """The plugin of OHIF: joins relative URLs to the server's, and posts forms from the browser."""

    def __init__(self, url: str) -> None:
        self._url = url

    def _send(self, method: str, path: str, **sent: Any) -> httpx.Response:
        headers = {"accept": "application/json, multipart/form-data"}
        return httpx.request(method, self._url + path, headers=headers, timeout=60, **sent)

    def info(self) -> dict[str, Any]:
        """With `labels` as the plugin fills them up: it pushes into the list."""
        answer = self._send("GET", "info/")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        for model in found["models"].values():
            found["labels"].extend(model["labels"])
        return found

    def is_training(self) -> bool:
        answer = self._send("GET", "train/", params={"check_if_running": "true"})
        return answer.status_code == 200 and answer.json()["status"] == "RUNNING"

    def next_sample(self) -> dict[str, Any]:
        answer = self._send("POST", "activelearning/random", json={})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def infer(self, model: str, image: str, output: str = "image", **params: Any) -> httpx.Response:
        params = {
            **params,
            "result_extension": ".nrrd",
            "result_dtype": "uint8",
            "result_compress": False,
            "restore_label_idx": False,
            **params,
        }
        query = urlencode({"image": image, "output": output})
        return self._send(
            "POST", f"infer/{quote(model)}?{query}", files={"params": (None, json.dumps(params))}
        )


def voxels_of(nrrd: bytes) -> NDArray[np.uint8]:
    """All that OHIF reads of an NRRD: the bytes after the header, as they come."""
    header, _, voxels = nrrd.partition(b"\n\n")
    assert b"encoding: raw" in header
    return np.frombuffer(voxels, np.uint8)


def parts_as_text(answer: httpx.Response) -> tuple[dict[str, Any], bytes]:
    """How OHIF's plugin read `output=all` for a time: as UTF-8 text, by the literal headers of the parts."""
    matched = re.search(r"boundary=([^;]+)", answer.headers["content-type"])
    assert matched is not None
    parts = [
        part for part in answer.content.decode("utf-8", "replace").split(f"--{matched[1]}") if part.strip()
    ]
    params = next(part for part in parts if "Content-Type: application/json" in part)
    image = next(part for part in parts if "Content-Type: application/octet-stream" in part)
    content = image.split("\r\n\r\n")[1]
    content = content[: content.rindex("\r\n")]
    return (
        json.loads(params[params.index("{") : params.rindex("}") + 1]),
        bytes(ord(character) & 0xFF for character in content),
    )


def labels_of(info: dict[str, Any], model: str) -> dict[str, int]:
    """The value of each label, as OHIF maps them: a list from 1 on, or the values of an object."""
    labels = info["models"][model]["labels"]
    if isinstance(labels, list):
        return {label: place for place, label in enumerate(labels, start=1)}
    return dict(labels)
