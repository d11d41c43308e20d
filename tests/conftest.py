"""What holds for all tests."""

from __future__ import annotations

import os

# torch asks the name server for the name of each peer that it connects to, and waits for seconds
# where an answer is lost. No test needs a name server: those that tests start do not ask one.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
