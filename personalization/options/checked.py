"""Options as a computation takes them."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from personalization.errors import AdaptationError


class Checked(BaseModel):
    """Mixed into options, rejects what does not fit with an AdaptationError that names the field.

    Types are strict: 2.0 and True are not whole numbers. `model_copy` with an `update` sets fields without
    validation, for an experiment beyond the bounds of what a client may ask.
    """

    model_config = ConfigDict(strict=True)
    WHAT: ClassVar[str]

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            item = error.errors(include_url=False)[0]
            expected = item["msg"].replace("Input should be", "expected").removeprefix("Value error, ")
            name = ".".join(map(str, item["loc"]))
            raise AdaptationError(f"{self.WHAT}: {name}: {expected}, found {item['input']!r}") from None
