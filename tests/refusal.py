"""The messages of errors."""

import pytest

from common.errors import UserError


def refusal(call, *arguments, error=UserError, **options) -> str:
    """The message of the error that a call ends with; that of a UserError is one line."""
    with pytest.raises(error) as raised:
        call(*arguments, **options)
    said = str(raised.value)
    assert error is not UserError or "\n" not in said
    return said
