"""A generation is filled, or its change fails: never is it committed with parts left out."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from resihp.contracts import Plan
from resihp.elastic.reshard import transfer
from resihp.elastic.reshard.buffers import ReshardBudget
from resihp.elastic.reshard.build import Generation, ReshardContext
from resihp.elastic.reshard.spreading import CopyPace
from resihp.elastic.reshard.transfer import StateTransfer
from resihp.elastic.step import Setup
from tests.elastic.engine_job import ALONE, MICROBATCHES
from tests.elastic.test_models import MODELS, OPTIMIZER, batch

COMPLETED = 7
PLAN = Plan(version=0, layout=ALONE, quotas=(MICROBATCHES,))


def transfer_of(all_reduce_max: Callable[[torch.Tensor], torch.Tensor]) -> StateTransfer:
    """The part of a rank without a place, which learns the completed steps from the others."""
    transit = SimpleNamespace(device=torch.device("cpu"), rank=0, all_reduce_max=all_reduce_max)
    generation = SimpleNamespace(
        pending=None,
        links={},
        planned=(),
        transit=transit,
        source=0,
        lost=None,
        total=None,
        cancelled=threading.Event(),
        link_s={},
    )
    setup = Setup(MODELS["llama"], OPTIMIZER, batch)
    context = SimpleNamespace(
        setup=setup, rendezvous=SimpleNamespace(rank=0), budget=ReshardBudget()
    )
    return StateTransfer(
        cast(ReshardContext, context),
        cast(Generation, generation),
        None,
        PLAN,
        0,
        on_transfer=lambda _: None,
    )


def told(known: torch.Tensor) -> torch.Tensor:
    """As a rank that has a place answers."""
    known[0] = COMPLETED
    return known


def test_state_is_copied_where_priorities_cannot_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a process under `nice` that may not raise its priority again."""

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "setpriority", refuse)
    copying = transfer_of(told)
    copying.start(0, CopyPace())
    copying.finish()
    assert copying.completed == COMPLETED


def test_state_is_on_the_device_before_it_counts_as_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream of training may be another one than that of the thread which copies."""
    done: list[str] = []

    def copy(known: torch.Tensor) -> torch.Tensor:
        done.append("copied")
        return told(known)

    def finish(device: torch.device) -> None:
        done.append(f"{threading.current_thread().name} finished")
        assert not copying._is_done

    monkeypatch.setattr(transfer, "finish_own_work", finish)
    copying = transfer_of(copy)
    copying.start(0, CopyPace())
    copying.finish()
    assert done == ["copied", "copied", "resihp-transfer finished"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_copy_that_ended_before_its_time_fails_the_change() -> None:
    def end_thread(_: torch.Tensor) -> torch.Tensor:
        raise SystemExit

    copying = transfer_of(end_thread)
    copying.start(0, CopyPace())
    with pytest.raises(RuntimeError, match="before its time"):
        copying.finish()
