"""Threads of a rank that use its device, which is not the one that a new thread has."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from resihp.checkpoint import SavePolicy
from resihp.elastic.checkpointing.manager import Writer
from resihp.elastic.process_groups.abortable import AbortableProcessGroup, close_groups
from resihp.elastic.process_groups.communicators import at_once
from resihp.elastic.process_groups.staged import DeviceCopies, StagedGroup
from resihp.elastic.reshard.build import Generation
from resihp.elastic.reshard.device_memory import CudaIpc
from resihp.elastic.reshard.spreading import CopyPace
from resihp.elastic.reshard.transfer import StateTransfer
from resihp.layout import Parameters
from tests.elastic.engine_job import ALONE, plan
from tests.elastic.late_copies import LateDriver

PATIENCE_S = 30.0
DEVICE = torch.device("cuda", 3)
CONTEXT: Any = SimpleNamespace(
    setup=SimpleNamespace(
        device=DEVICE,
        model=SimpleNamespace(parameters=Parameters(())),
        deterministic=True,
        state_copies=None,
        steal_ahead=None,
    ),
    rendezvous=SimpleNamespace(recovery=0, rank=0),
    budget=SimpleNamespace(buffer_bytes=1),
)


def prepare() -> None:
    proposal: Any = SimpleNamespace(plan=plan(0, ALONE), missing_state=False)
    Generation(CONTEXT, 1, proposal, before=None)


def transfer() -> None:
    generation: Any = SimpleNamespace(links={}, pending=None, planned=())
    StateTransfer(CONTEXT, generation, None, plan(0, ALONE), 0, on_transfer=lambda _: None).start(
        0, CopyPace()
    )


def stage() -> None:
    communicators: Any = SimpleNamespace(device=DEVICE, is_aborted=False)
    StagedGroup(cast(dist.ProcessGroup, None), cast(DeviceCopies, None), communicators).close()


def close() -> None:
    group: Any = SimpleNamespace(device=DEVICE, is_idle=True, close=lambda: None)
    close_groups([cast(AbortableProcessGroup, group)])


def abort() -> None:
    at_once([lambda: None] * 2, DEVICE)


def unmap() -> None:
    memory = CudaIpc(DEVICE, LateDriver())
    memory._opened[b""] = 0
    memory._driver.opened[0] = 1  # type: ignore[attr-defined]


def prepare_checkpoint() -> None:
    saver: Any = SimpleNamespace(prepare=lambda pieces: None)
    settings = SimpleNamespace(groups=lambda parameters: ())
    shard: Any = SimpleNamespace(scalars=list, settings=settings)
    policy, setup = cast(SavePolicy, None), CONTEXT.setup
    Writer(saver, policy, setup, plan(0, ALONE), (), shard, connect=lambda: None)


@pytest.mark.parametrize(
    ("start", "name"),
    [
        (prepare, "resihp-prepare"),
        (transfer, "resihp-transfer"),
        (stage, "resihp-staged"),
        (close, "resihp-close"),
        (abort, "resihp-abort"),
        (unmap, "resihp-unmap"),
        (prepare_checkpoint, "resihp-checkpoint-prepare"),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_begins_with_the_device_of_its_rank(
    start: Callable[[], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda device: found.append((threading.current_thread().name, device)),
    )
    start()
    deadline = time.monotonic() + PATIENCE_S
    while not found and time.monotonic() < deadline:
        time.sleep(0.001)
    assert {(name, DEVICE)} == {(of.partition("_")[0], device) for of, device in found}
