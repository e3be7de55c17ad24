"""`python -m service.openapi > openapi.yaml`: the API's description, from the routes themselves."""

from __future__ import annotations

import sys

import yaml

from service.app import create_app
from service.settings import Settings


def description() -> str:
    """The OpenAPI document as YAML, the same for the same code wherever it is made.

    It has the interface for viewers, which is off by default.
    """
    document = create_app(Settings.model_construct(monailabel="prefix")).openapi()
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=110)


if __name__ == "__main__":
    sys.stdout.write(description())
