"""Delivery: a sidecar that is slow, broken or away costs records, never training."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections import deque
from unittest.mock import Mock

import numpy as np
import pytest

from resihp.contracts import Op, ServiceError
from resihp.hooks import Monitor
from resihp.hooks._buffer import Buffer
from resihp.hooks._spans import Span
from resihp.hooks._workload import Features


def record(monitor, *steps):
    for step in steps:
        monitor.record(op=Op.FORWARD, compute_ms=1, step=step)


def test_records_arrive_without_being_asked_for(monitor, sidecar, wait_until):
    record(monitor, 0, 1)
    wait_until(lambda: monitor.stats.sent == 2)
    record(monitor, 2)
    wait_until(lambda: monitor.stats.sent == 3)
    assert sidecar.records.step.tolist() == [0, 1, 2]
    assert len(set(sidecar.keys)) == len(sidecar.keys)


@pytest.mark.parametrize("fault", [500, 503, 429, None])
def test_a_message_is_repeated_under_its_key_until_it_is_taken(
    make_monitor, sidecar, wait_until, fault
):
    sidecar.script = [fault, fault]
    monitor = make_monitor()
    record(monitor, 0)
    wait_until(lambda: monitor.stats.sent == 1)
    assert len(sidecar.keys) == 3
    assert len(set(sidecar.keys)) == 1
    assert (monitor.stats.retries, monitor.stats.dropped) == (2, 0)


def test_a_refused_message_is_dropped_counted_and_logged_once(monitor, sidecar, wait_until, caplog):
    sidecar.script = [400, 422]
    for step in range(2):
        record(monitor, step)
        wait_until(lambda step=step: monitor.stats.refused == step + 1)
    record(monitor, 2)
    wait_until(lambda: monitor.stats.sent == 1)
    assert sidecar.batches[0].dropped == 2
    assert monitor.stats.dropped == 2
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


def test_a_full_buffer_drops_counts_and_reports(make_monitor, sidecar, wait_until):
    monitor = make_monitor(capacity=4)
    sidecar.open.clear()
    record(monitor, 0)
    wait_until(lambda: sidecar.keys)  # the first message is held up on its way
    record(monitor, *range(1, 10))
    assert monitor.stats.dropped == 5
    assert monitor.stats.queued == 5  # four wait, one is on its way
    sidecar.open.set()
    wait_until(lambda: monitor.stats.sent == 5)
    assert sidecar.records.step.tolist() == [0, 1, 2, 3, 4]
    assert sum(batch.dropped for batch in sidecar.batches) == 5


def test_batches_are_bounded(make_monitor, sidecar):
    monitor = make_monitor(batch_records=3, interval_s=60)
    record(monitor, *range(8))
    monitor.close()
    assert [len(batch) for batch in sidecar.batches] == [3, 3, 2]


def test_an_unforeseen_error_does_not_end_the_sender(monitor, sidecar, wait_until):
    sidecar.script = [RuntimeError("unforeseen")]
    record(monitor, 0)
    wait_until(lambda: monitor.stats.failures == 1)
    record(monitor, 1)
    wait_until(lambda: monitor.stats.sent == 1)
    assert monitor.stats.dropped == 1
    assert sidecar.batches[0].dropped == 1


def test_closing_is_bounded_and_counts_what_is_left(make_monitor, sidecar, wait_until):
    monitor = make_monitor()
    sidecar.script = [503] * 10_000
    record(monitor, 0)
    wait_until(lambda: sidecar.keys)
    record(monitor, 1, 2)
    monitor.close(timeout_s=0.3)
    wait_until(lambda: monitor.stats.dropped == 3)  # by the sender, which may still be at it
    wait_until(lambda: monitor.stats.queued == 0)
    record(monitor, 3)
    assert monitor.stats.dropped == 4
    assert monitor.stats.queued == 0


@pytest.mark.timeout(60)
def test_a_signal_handler_may_close_what_it_interrupts():
    """It runs in the thread that holds the lock: while the sender starts, or as a record drops."""

    def close():
        buffer.close()

    buffer = starting = Buffer(1, close)
    starting.put(())
    starting.put(())
    assert (starting.dropped, len(starting.entries)) == (2, 0)

    class Interrupted(deque):
        def __len__(self):
            buffer.close()
            return super().__len__()

    buffer = full = Buffer(1, lambda: None)
    full.entries = Interrupted([()])
    full.put(())
    assert full.dropped == 1


def test_what_waits_for_the_sidecar_takes_little_memory(make_monitor, sidecar, wait_until):
    mask = np.tril(np.ones((1, 300, 300), bool))
    monitor = make_monitor()
    sidecar.script = [503] * 10_000
    record(monitor, 0)
    wait_until(lambda: sidecar.keys)
    for given in ({"attention_mask": mask}, {"seq_lens": [300]}, {"seq_lens": (300,)}):
        with monitor.forward(**given):
            pass
    waiting = [span for span in monitor._sender.buffer.entries if isinstance(span, Span)]
    wait_until(lambda: all(isinstance(span.work, Features) for span in waiting), timeout_s=25.0)
    sidecar.script = []
    wait_until(lambda: monitor.stats.sent == 4)
    assert sidecar.records.max_len.tolist() == [-1, 300, 300, 300]


def test_many_threads_lose_nothing(make_monitor, sidecar):
    monitor = make_monitor()

    def work(base):
        record(monitor, *range(base, base + 2000))

    threads = [threading.Thread(target=work, args=(base,)) for base in range(0, 8000, 2000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    monitor.close()
    assert sorted(sidecar.records.step.tolist()) == list(range(8000))


def test_a_forgotten_monitor_sends_what_it_has_and_ends(sidecar, wait_until):
    monitor = Monitor(job="j", client=sidecar, interval_s=60)
    record(monitor, 0)
    gone, sender = weakref.ref(monitor), monitor._sender._thread
    del monitor
    gc.collect()
    assert gone() is None
    wait_until(lambda: not sender.is_alive())
    assert sidecar.records.step.tolist() == [0]


def test_nobody_waits_for_a_forgotten_monitor(sidecar, monkeypatch, wait_until):
    monitor = Monitor(job="j", client=sidecar, interval_s=60)
    record(monitor, 0)
    join = Mock(side_effect=AssertionError("the collecting thread waits"))
    monkeypatch.setattr(threading.Thread, "join", join)
    del monitor
    gc.collect()
    wait_until(lambda: sidecar.batches)
    assert not join.called


def test_a_forked_child_starts_afresh(make_monitor, sidecar):
    """The child neither repeats the parent's records nor loses its own."""
    monitor = make_monitor(interval_s=60)
    record(monitor, 0, 1)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        record(monitor, 7)
        monitor.close()
        os.write(writing, repr([b.step.tolist() for b in sidecar.batches]).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert pipe.read() == "[[7]]"
    os.waitpid(child, 0)
    monitor.close()
    assert [b.step.tolist() for b in sidecar.batches] == [[0, 1]]


SCRIPT = """
import resihp
monitor = resihp.Monitor(job="j", url="http://127.0.0.1:{port}")
@monitor.step
def train():
    with monitor.microbatch(seq_lens=[3]):
        pass
for _ in range(5):
    train()
print("trained")
"""


def test_without_a_sidecar_a_script_trains_and_ends(closed_port):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(port=closed_port)],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert done.stdout == "trained\n"
    assert "Traceback" not in done.stderr


def test_service_errors_without_status_are_those_without_answer(monitor, sidecar, wait_until):
    sidecar.script = [ServiceError("no answer")]
    record(monitor, 0)
    wait_until(lambda: monitor.stats.sent == 1)
    assert monitor.stats.retries == 1
