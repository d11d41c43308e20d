"""The last collective, from the flight recorder of torch.distributed."""

from __future__ import annotations

import json
import sys
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from resihp.hooks._flight_recorder import last_collective
from tests.hooks.conftest import until


def entry(number: int, *, state: str = "scheduled", retired: bool = False, **more: object) -> dict:
    """One entry of the recorder, in the structure of its version 2.10."""
    document = {
        "record_id": number, "pg_id": 0, "process_group": ["0", "default_pg"],
        "collective_seq_id": number, "p2p_seq_id": 0, "op_id": number, "is_p2p": False,
        "profiling_name": "nccl:all_reduce", "time_created_ns": 1_000 + number,
        "state": state, "retired": retired,
    }  # fmt: skip
    return {**document, **more}


@pytest.fixture
def recorded(monkeypatch):
    """A torch whose recorders of NCCL and of other backends hold these entries."""

    def record(nccl: list[dict], others: list[dict] | None = None) -> None:
        def dump(entries):
            document = {"version": "2.10", "entries": entries} if entries else {"version": "2.10"}
            return lambda collectives, active: json.dumps(document).encode()

        functions = {"_dump_nccl_trace_json": dump(nccl)}
        if others is not None:
            functions["_dump_fr_trace_json"] = dump(others)
        c10d = SimpleNamespace(**functions)
        monkeypatch.setitem(
            sys.modules, "torch", SimpleNamespace(_C=SimpleNamespace(_distributed_c10d=c10d))
        )

    return record


def test_the_oldest_collective_that_has_not_completed(recorded):
    recorded([entry(7, state="completed"), entry(8, state="started"), entry(9)])
    assert last_collective() == "all_reduce number 8 of process group default_pg has not completed"


def test_where_all_have_completed_the_newest(recorded):
    recorded([entry(7, state="completed")], [entry(8, retired=True, profiling_name="gloo:barrier")])
    assert last_collective() == (
        "barrier number 8 of process group default_pg has completed, and none is under way"
    )


def test_a_transfer_has_a_number_of_its_own(recorded):
    send = entry(3, is_p2p=True, p2p_seq_id=41, profiling_name="nccl:send 0->1")
    recorded([{**send, "process_group": ["5", ""]}])
    assert last_collective() == "send 0->1 number 41 of process group 5 has not completed"


def test_a_torch_without_recorder_says_nothing(recorded, monkeypatch):
    recorded([])
    assert last_collective() == ""
    for torch_ in (SimpleNamespace(), SimpleNamespace(_C=SimpleNamespace()), None):
        monkeypatch.setitem(sys.modules, "torch", torch_)
        assert last_collective() == ""


@pytest.mark.skipif(
    not hasattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace_json"),
    reason="this torch has no flight recorder",
)
def test_collectives_of_gloo_are_really_recorded():
    """Two ranks in one process: the second enters the collective later."""
    store = dist.HashStore()
    groups: dict[int, dist.ProcessGroup] = {}

    def connect(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    first = groups[0].allreduce(torch.ones(2))
    assert last_collective().startswith("all_reduce number ")
    assert last_collective().endswith(" has not completed")
    groups[1].allreduce(torch.ones(2)).wait()
    first.wait()
    until(lambda: last_collective().endswith(" has completed, and none is under way"))
