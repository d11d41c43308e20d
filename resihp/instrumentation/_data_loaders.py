"""Waiting for input in the data loaders of torch.

Every batch of a `torch.utils.data.DataLoader` comes through the `__next__` of torch's base class of
loaders' iterators; `DataLoader.__iter__` starts the workers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.data.dataloader

from ._pass_timer import PassTimer
from ._patches import Patches


def time_data_loaders(timer: PassTimer, patches: Patches) -> bool:
    """Time the loop's waiting for data loaders; return False if this torch does not show it.

    Loading where gradients are off belongs to an evaluation, and is left out.
    """
    begin, end = timer.safely(timer.begin_data), timer.safely(timer.end_data)

    def timed(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(original)
        def load(loader: Any) -> Any:
            block = begin() if torch.is_grad_enabled() else None
            if block is None:
                return original(loader)
            try:
                return original(loader)
            finally:
                end(block)

        return load

    loading = torch.utils.data.dataloader
    iterator = getattr(loading, "_BaseDataLoaderIter", None)
    places = ((iterator, "__next__"), (loading.DataLoader, "__iter__"))
    return all(patches.wrap(owner, name, timed) for owner, name in places)
