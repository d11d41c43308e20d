"""A process whose job is done ends with the status of its script, whatever its threads still do."""

from __future__ import annotations

import subprocess
import sys

import pytest

PATIENCE_S = 300.0

SLOW = """
import gc, threading, time
from datetime import timedelta
import torch.distributed as dist

begun = threading.Event()
server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

def in_torch():
    begun.set()
    try:
        server.wait(["never"], timedelta(seconds=0.5))
    except dist.DistError:
        pass

class LongEnd:
    def __init__(self):
        self.cycle, self.sleep = self, time.sleep

    def __del__(self):
        self.sleep(2.0)

gc.disable()
LongEnd()
"""

DISPOSING = """
import torch
from resihp.elastic.process_groups.abortable import close_groups

class Group:
    device = torch.device("cpu")
    is_idle = property(lambda self: in_torch())

close_groups([Group()])
assert begun.wait(300)
"""

ASKING = """
from types import SimpleNamespace
from resihp.elastic.planning.publisher import PlanPublisher
from resihp.elastic.planning.sources import NoPlans

store = SimpleNamespace(check=lambda keys: in_torch())
stores = SimpleNamespace(store=store)
rendezvous = SimpleNamespace(stores=stores, rank=0, alive=(0,), recovery=0)
plan = SimpleNamespace(version=0)
state = SimpleNamespace(generation=0, plan=plan, completed=0, phase="idle")
publisher = PlanPublisher(NoPlans(), rendezvous, state, lambda plan: None)
publisher.start()
assert begun.wait(300)
publisher.close()
"""

MOVING_PAGES = """
from resihp.checkpoint.staging.host_buffer import begin

begin(lambda tensors, is_over: in_torch(), [0])
assert begun.wait(300)
"""

COPYING = """
import torch
from resihp.checkpoint.staging.copier import Copier

class Filling:
    changed, problem, is_safe = threading.Condition(), None, False

    def __getattr__(self, name):
        return lambda *_: in_torch()

Copier(torch.device("cpu")).start(Filling())
assert begun.wait(300)
"""

RELEASING = """
from types import SimpleNamespace
import torch
from resihp.elastic.coordinator import ReshardCoordinator

cpu = SimpleNamespace(setup=SimpleNamespace(device=torch.device("cpu")))
ReshardCoordinator._release(SimpleNamespace(_context=cpu), SimpleNamespace(release=in_torch))
assert begun.wait(300)
"""


@pytest.mark.parametrize(
    "doing",
    [DISPOSING, ASKING, MOVING_PAGES, COPYING, RELEASING],
    ids=["disposing", "asking", "moving pages", "copying", "releasing"],
)
def test_a_thread_in_torch_does_not_abort_a_process_that_ends(doing: str) -> None:
    """The interpreter takes long to end, so that the thread comes out of torch meanwhile."""
    ended = subprocess.run(
        [sys.executable, "-c", SLOW + doing],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
