"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Iterable, Iterator
from multiprocessing import forkserver, resource_tracker
from typing import Any

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


IN_FORK_SERVER = (
    "encodings.idna",
    "torch._dynamo",
    "torch.utils._sympy.reference",
    "torch.utils.serialization.config",
    "resihp.demo.training.worker",
    "resihp.instrumentation._instrument",
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
    "tests.hooks.sharing_rank",
    "tests.launch.launcher_process",
    "tests.service.forked_sidecar",
)
"""What the server that forks ranks has imported: a thousand of them need not."""


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """All processes of pytest-xdist share one fork server, which imports while they collect."""
    _share_cores()
    _start_fork_server(IN_FORK_SERVER)
    node.workerinput["fork_server"] = forkserver._forkserver._forkserver_address


def _share_cores() -> None:
    """Let no process of this one interrupt another when it is woken: that one may hold a lock for
    which a thread of gloo polls, which takes a quarter of the time of the cores in some tests."""
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _start_fork_server(modules: Iterable[str]) -> None:
    forkserver.set_forkserver_preload([*modules])
    forkserver.ensure_running()


@pytest.fixture(scope="session", autouse=True)
def _fork_server(request: pytest.FixtureRequest) -> None:
    if hasattr(request.config, "workerinput"):
        _share_cores()
        server = forkserver._forkserver
        server._forkserver_address = request.config.workerinput["fork_server"]
        server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
        server.ensure_running = resource_tracker.ensure_running
    elif collected := [name for name in IN_FORK_SERVER if name in sys.modules]:
        _start_fork_server(collected)


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A local port that refuses connections, and that no other process can be given meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
