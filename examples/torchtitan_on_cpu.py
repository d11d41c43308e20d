"""torchtitan 0.3 on torch 2.13 and on machines without an accelerator, which it does not foresee.

It takes CUDA where no accelerator is found, asks it for its name and memory, and imports kernels
in Triton for parallel experts. None of that is needed to train a small model on CPUs with gloo.
It expects a torch newer than 2.13, too.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from inspect import signature
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch.distributed.fsdp import FSDPModule


def _nothing(*_: Any) -> None:
    """Do nothing."""


KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"
DEVICE = SimpleNamespace(
    set_device=_nothing,
    device_count=lambda: 1,
    current_device=lambda: 0,
    synchronize=_nothing,
    get_device_name=lambda _: "CPU",
    get_device_properties=lambda _: SimpleNamespace(total_memory=1 << 30),
    memory_stats=lambda _: {},
    reset_peak_memory_stats=_nothing,
    empty_cache=_nothing,
)


def import_torchtitan() -> None:
    """Import torchtitan, so that it computes on CPUs if there is no accelerator."""
    if not hasattr(torch.distributed, "set_timeout"):  # it expects a torch newer than 2.13
        torch.distributed.set_timeout = torch.distributed.distributed_c10d._set_pg_timeout
    if torch.accelerator.is_available():
        import torchtitan.trainer

        return
    if not find_spec("triton"):
        sys.modules[KERNELS] = MagicMock()
    with (
        patch("torch._utils._get_available_device_type", lambda: "cpu"),
        patch("torch._utils._get_device_module", lambda _: DEVICE),
    ):
        import torchtitan.trainer  # noqa: F401


def reduce_by_sums(model: torch.nn.Module) -> None:
    """Have FSDP2 reduce gradients in a way that gloo knows."""
    for part in model.modules():
        if isinstance(part, FSDPModule) and not torch.accelerator.is_available():
            part.set_force_sum_reduction_for_comms(True)


def accept_microbatches(schedule: Any) -> None:
    """Have a pipeline's schedule take lists of microbatches, as in a torch newer than 2.13."""
    step_of_batch = schedule.step
    if "arg_mbs" in signature(step_of_batch).parameters:
        return

    def step(arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, **options: Any) -> Any:
        names = kwarg_mbs[0]
        return step_of_batch(
            *([torch.cat([inputs for (inputs,) in arg_mbs])] if arg_mbs else []),
            target=torch.cat(target_mbs) if target_mbs else None,
            **{name: torch.cat([one[name] for one in kwarg_mbs]) for name in names},
            **options,
        )

    schedule.step = step
