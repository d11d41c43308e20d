"""The examples in the formatting module."""

import doctest

from resihp import formatting


def test_the_examples_of_every_function_hold() -> None:
    result = doctest.testmod(formatting)
    assert result.attempted >= 12
    assert not result.failed
