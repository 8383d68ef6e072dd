import pytest

from common.errors import UserError


def refusal(call, *arguments, error=UserError, **options) -> str:
    """Returns the message of the error. A UserError's message must be one line."""
    with pytest.raises(error) as raised:
        call(*arguments, **options)
    message = str(raised.value)
    assert error is not UserError or "\n" not in message
    return message
