"""Observed loops, and a clock set by hand."""

from __future__ import annotations

import pytest

from tests.hooks.conftest import hands, no_hurry
from tests.instrumentation.observed import Observed

__all__ = ["hands", "no_hurry"]


@pytest.fixture
def observe():
    made = []

    def make(*args, **options):
        made.append(Observed(*args, **options))
        return made[-1]

    yield make
    for observed in made:
        observed.monitor.remove()
        observed.monitor.close()
