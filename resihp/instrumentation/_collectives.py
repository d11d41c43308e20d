"""Waiting for other ranks in collectives and transfers of torch.distributed.

Waits of Python code go through `Work.wait`: collectives that a loop calls, the unsharding and
reduction of FSDP2, transfers of pipelines; or through `Future.wait` of `Work.get_future()`, as in
communication hooks of DDP. Functional collectives, which DTensor uses, go through `wait_tensor`. On
CUDA, FSDP2 has its stream wait for events of other streams. DDP waits in C++: see `_modules`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._pass_timer import PassTimer
from ._patches import Patches, lock

_timers: list[PassTimer] = []
_patches = Patches()


def listen(timer: PassTimer) -> bool:
    """Credit waits of this process to the passes of `timer` until `forget`.

    Return False if this torch cannot tell them; a process without torch.distributed never waits.
    """
    if not torch.distributed.is_available():
        return True
    with lock:
        if not _timers and not _install():
            _patches.remove()
            return False
        _timers.append(timer)
    return True


def forget(timer: PassTimer) -> None:
    """Undo `listen`; the last one restores torch as it was."""
    with lock:
        if timer in _timers:
            _timers.remove(timer)
            if not _timers:
                _patches.remove()


def _install() -> bool:
    import torch.distributed._functional_collectives as functional

    places = [
        (getattr(torch.distributed, "Work", None), "wait"),
        (functional, "wait_tensor"),
        (getattr(torch._C, "Future", None), "wait"),  # also that of `torch.futures.Future`
        (getattr(torch.distributed, "ProcessGroup", None), "monitored_barrier"),
    ]
    if torch.cuda.is_available():
        places.append((torch.cuda.Stream, "wait_event"))
    return all(owner is not None and _patches.wrap(owner, name, _timed) for owner, name in places)


def _timed(original: Callable[..., Any]) -> Callable[..., Any]:
    compiling = torch.compiler.is_compiling  # a constant for the compiler, which sees no more

    def wait(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            return original(*args, **kwargs)
        waiting = []
        for timer in _timers:
            span = timer.begin_wait()
            if span is not None:
                waiting.append(span)
        try:
            return original(*args, **kwargs)
        finally:
            for span in waiting:
                span.end_wait()

    return wait
