"""A rank as a process: records a step every `pause_s`, and answers to the words that it receives.

To `state`, which step comes next and whether this process is the node's sender; `end` closes the
monitor, and the answer are its counts. `silence_s` is the time after which a
silent sender of the node counts as stopped, and for which one that closes finishes its messages.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from multiprocessing.connection import Connection
from typing import Any

from resihp.contracts import Op
from resihp.hooks import Monitor, _node_link, _node_sender, _node_socket


def main(url: str, given: dict[str, Any], asked: Connection) -> None:
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    pause_s, silence_s = given.pop("pause_s", 0.01), given.pop("silence_s")
    for module in (_node_link, _node_sender, _node_socket):
        module.SILENCE_S = silence_s
    _node_sender._CLOSE_S = silence_s
    monitor = Monitor(job="j", url=url, **given)
    while True:
        if asked.poll(pause_s):
            if asked.recv() != "state":
                break
            sends = any(thread.name == "resihp-node" for thread in threading.enumerate())
            asked.send({"step": monitor.current_step, "sends": sends, **counts(monitor)})
        with monitor.step():
            monitor.record(op=Op.FORWARD, compute_ms=1.0, microbatch=0)
    monitor.close(20)
    asked.send({"step": monitor.current_step, **counts(monitor)})


def counts(monitor: Monitor) -> dict[str, int]:
    return dataclasses.asdict(monitor.stats)
