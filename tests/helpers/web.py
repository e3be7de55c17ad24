"""What ties the page to its sources and to the API, without Node.

    python -m tests.helpers.web subset   the operations that web/src names, as JSON for openapi-typescript
    python -m tests.helpers.web sign     note in web/src/api/schema.d.ts which operations it was made from
    python -m tests.helpers.web stamp    note in service/static/build.json which sources it was built from

`make web` runs all three. Tests compare what was noted with what is there.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
WEB = ROOT / "web"
STATIC = ROOT / "service/static"
TYPES = WEB / "src/api/schema.d.ts"
STAMP = STATIC / "build.json"
_SIGNATURE = "// operations: "
_QUOTED = re.compile(r"""["'](/[A-Za-z0-9_{}/-]+)["']""")


def subset(document: dict[str, Any]) -> dict[str, Any]:
    """The part of the API's description that the types of web/src depend on: the rest may change freely.

    That is the paths that web/src names, their parameters, and the JSON that they take and answer with.
    """
    sources = [path for path in WEB.glob("src/**/*.ts*") if path != TYPES]
    named = {found for path in sources for found in _QUOTED.findall(path.read_text(encoding="utf-8"))}
    paths = {path: _of_json(document["paths"][path]) for path in sorted(named & document["paths"].keys())}
    schemas: dict[str, Any] = {}
    waiting = _references(paths)
    while waiting:
        name = waiting.pop()
        schemas[name] = document["components"]["schemas"][name]
        waiting |= _references(schemas[name]) - schemas.keys()
    components = {"schemas": dict(sorted(schemas.items()))}
    bare = _typed({"paths": paths, "components": components})
    return {"openapi": document["openapi"], "info": {"title": "Locum", "version": "0"}, **bare}


def described() -> dict[str, Any]:
    """The committed description of the API."""
    loaded: dict[str, Any] = yaml.load(
        (ROOT / "openapi.yaml").read_text(encoding="utf-8"),
        Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader),
    )
    return loaded


def digest_of_operations() -> str:
    """Digest of what the page's types are made from."""
    return hashlib.sha256(json.dumps(subset(described()), sort_keys=True).encode()).hexdigest()


def signed_operations() -> str:
    """What the committed types were made from."""
    return TYPES.read_text(encoding="utf-8").partition("\n")[0].removeprefix(_SIGNATURE)


def digest_of_sources() -> str:
    """Of everything that the build reads. Types are no part of it: they leave no trace in a build."""
    names = ["index.html", "package-lock.json", "package.json", "tsconfig.json", "vite.config.ts"]
    files = [WEB / name for name in names]
    files += sorted(path for path in WEB.glob("src/**/*") if path.is_file() and path != TYPES)
    found = hashlib.sha256()
    for path in files:
        found.update(f"{path.relative_to(WEB).as_posix()} {_digest(path)}\n".encode())
    return found.hexdigest()


def built_files() -> dict[str, str]:
    """The files of the build, with their digests."""
    files = sorted(path for path in STATIC.rglob("*") if path.is_file() and path != STAMP)
    return {path.relative_to(STATIC).as_posix(): _digest(path) for path in files}


def main(task: str) -> None:
    """Run one of the commands above."""
    if task == "subset":
        sys.stdout.write(json.dumps(subset(described()), indent=1))
    elif task == "sign":
        text = TYPES.read_text(encoding="utf-8")
        TYPES.write_text(f"{_SIGNATURE}{digest_of_operations()}\n{text}", encoding="utf-8")
    elif task == "stamp":
        stamp = {"sources": digest_of_sources(), "files": built_files()}
        STAMP.write_text(json.dumps(stamp, indent=1) + "\n", encoding="utf-8")
    else:
        raise SystemExit(f"expected subset, sign or stamp, found {task}")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _references(part: object) -> set[str]:
    return set(re.findall(r"#/components/schemas/(\w+)", json.dumps(part)))


def _of_json(operations: dict[str, Any]) -> dict[str, Any]:
    """The operations of a path without forms, files and rejections."""
    kept = {}
    for method, operation in operations.items():
        answers = {
            status: _json_alone(answer) for status, answer in operation["responses"].items() if status < "3"
        }
        kept[method] = {"parameters": operation.get("parameters", []), "responses": answers}
        if "application/json" in operation.get("requestBody", {}).get("content", {}):
            kept[method]["requestBody"] = _json_alone(operation["requestBody"])
    return kept


def _json_alone(body: dict[str, Any]) -> dict[str, Any]:
    content = {kind: found for kind, found in body.get("content", {}).items() if kind == "application/json"}
    required = {"required": body["required"]} if "required" in body else {}
    return {**required, **({"content": content} if content else {}), "description": ""}


# What makes a type, of all that a schema may say. Under `properties` and `schemas` every name is one.
_NAMING = ("properties", "schemas", "paths")
_UNTYPED = {
    *("title", "summary", "example", "default", "pattern", "format", "minLength", "maxLength", "minimum"),
    *("maximum", "exclusiveMinimum", "exclusiveMaximum", "minItems", "maxItems", "description"),
    # Definitions inside a body, which become a property of it.
    "$defs",
}


def _typed(part: Any, naming: bool = False) -> Any:
    if isinstance(part, list):
        return [_typed(each) for each in part]
    if not isinstance(part, dict):
        return part
    kept = {name: value for name, value in part.items() if naming or name not in _UNTYPED or value == ""}
    return {name: _typed(value, name in _NAMING) for name, value in kept.items()}


if __name__ == "__main__":
    main(*sys.argv[1:])
