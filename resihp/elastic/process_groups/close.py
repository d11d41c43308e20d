"""Lets go of the groups of old generations, off the training thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from resihp._shutdown import torch_lock

from .abortable import AbortableProcessGroup

_LOOK_S = 0.01


def close_groups(groups: Iterable[AbortableProcessGroup]) -> None:
    """Close groups that this rank does not use any more, each as soon as it is idle.

    In a thread, because closing connections takes longer than a switch; `groups` is iterated there
    and may block. A group that was given up may have an exchange under way. It ends when a peer
    dies or closes its own end, so ranks that all let go of a generation set each other free; only a
    peer that was stopped is waited for until the exchange times out.
    """
    threading.Thread(target=_close, args=(groups,), name="resihp-dispose", daemon=True).start()


def _close(groups: Iterable[AbortableProcessGroup]) -> None:
    left = list(groups)
    while left:
        with torch_lock():
            for group in [group for group in left if group.is_idle]:
                group.close()
                left.remove(group)
        if left:
            time.sleep(_LOOK_S)
