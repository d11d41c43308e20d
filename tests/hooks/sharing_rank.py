"""A rank as a process: records a step every `pause_s`, and answers to the lines of its input.

`state` prints which step comes next and whether this process is the node's sender; `end`, or the
end of the input, closes the monitor and prints its counts. `silence_s` is the time after which a
silent sender of the node counts as stopped, and for which one that closes finishes its messages.
"""

from __future__ import annotations

import dataclasses
import json
import select
import sys
import threading

from resihp.contracts import Op
from resihp.hooks import Monitor, _node_link, _node_sender, _node_socket


def main(url: str, options: str) -> None:
    given = json.loads(options)
    pause_s, silence_s = given.pop("pause_s", 0.01), given.pop("silence_s")
    for module in (_node_link, _node_sender, _node_socket):
        module.SILENCE_S = silence_s
    _node_sender._CLOSE_S = silence_s
    monitor = Monitor(job="j", url=url, **given)
    while True:
        if select.select([sys.stdin], [], [], pause_s)[0]:
            if sys.stdin.readline().strip() != "state":
                break
            sends = any(thread.name == "resihp-node" for thread in threading.enumerate())
            say(step=monitor.current_step, sends=sends, **counts(monitor))
        with monitor.step():
            monitor.record(op=Op.FORWARD, compute_ms=1.0, microbatch=0)
    monitor.close(20)
    say(step=monitor.current_step, **counts(monitor))


def counts(monitor: Monitor) -> dict[str, int]:
    return dataclasses.asdict(monitor.stats)


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)  # noqa: T201 the answer to the test


if __name__ == "__main__":
    main(*sys.argv[1:])
