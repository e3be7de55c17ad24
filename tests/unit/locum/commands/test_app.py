"""What the command says of an error."""

from __future__ import annotations

from locum.commands.app import in_words
from locum.errors import Problem


def test_hospital_that_is_not_registered_is_registered_by_a_command() -> None:
    said = "no hospital 'heath' is registered: PUT /hospitals/heath registers it"
    assert in_words(Problem(said, status=404)) == (
        "no hospital 'heath' is registered: `locum register heath` registers it"
    )
