"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Iterator
from multiprocessing import forkserver

import pytest
from hypothesis import HealthCheck, settings

# torch asks the name server for the name of each peer that it connects to, and waits for seconds
# where an answer is lost. No test needs a name server: those that tests start do not ask one.
os.environ.setdefault("RES_OPTIONS", "attempts:0")

# Many processes share few cores: a second thread of each would spin while it waits for its turn.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The speed of the machine decides nothing, and every run draws the same examples.
settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")


# What is imported stays: the garbage collector need not look through it, now or in any test.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


STARTERS = ("resihp.testing.local_ranks", "tests.checkpoint.helpers")
RUN_IN_CHILDREN = (
    "resihp.demo.training.worker",
    "tests.checkpoint.test_host_cache",
    "tests.checkpoint.test_ranks",
    "tests.checkpoint.test_torch_writer",
    "tests.elastic.engine_job",
    "tests.elastic.ddp_loops",
    "tests.elastic.engine_faults",
    "tests.elastic.test_process_group_faults",
    "tests.elastic.test_engine_resizes",
    "tests.elastic.test_with_sidecar",
    "tests.hooks.ddp_ranks",
)


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> None:
    """The server that forks ranks has imported what they run: a thousand of them need not."""
    if not any(name in sys.modules for name in STARTERS):
        return  # no test of this session starts any
    from resihp.testing import local_ranks

    forkserver.set_forkserver_preload([*local_ranks._PRELOAD, *RUN_IN_CHILDREN])
    forkserver.ensure_running()


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A local port that refuses connections, and that no other process can be given meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
