"""Helps tests to check the messages of expected errors."""

import pytest

from common.errors import UserError


def refusal(call, *arguments, error=UserError, **options) -> str:
    """Asserts that a call raises `error`; returns the message. A UserError's message must be one line."""
    with pytest.raises(error) as raised:
        call(*arguments, **options)
    said = str(raised.value)
    assert error is not UserError or "\n" not in said
    return said
