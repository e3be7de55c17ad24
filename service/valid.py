"""Bodies against their models, refused as FastAPI refuses: 422 with a line per field."""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from service.wording import reason

Asked = TypeVar("Asked", bound=BaseModel)


def valid(kind: type[Asked], found: bytes | dict[str, Any], *where: str) -> Asked:
    """JSON bytes, or what was read from them, as `kind`; `where` in the body it was found.

    Raises:
        RequestValidationError: it does not fit.
    """
    try:
        return kind.model_validate_json(found) if isinstance(found, bytes) else kind.model_validate(found)
    except ValidationError as error:
        entries = error.errors(include_input=False, include_url=False)
        # Here it is known what the fields are, which those who hear of one that is none want to know.
        raise RequestValidationError(
            [
                {**entry, "loc": ("body", *where, *entry["loc"]), "msg": reason(entry, kind.model_fields)}
                for entry in entries
            ]
        ) from None
