"""What a monitor's heartbeats say, and when they are sent."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from unittest.mock import Mock

import pytest

from resihp.contracts import Heartbeat, Op, SensorSample, ServiceError
from resihp.hooks import Monitor
from resihp.hooks._heartbeat import HeartbeatSender
from resihp.hooks._merger import packed_heartbeat
from resihp.hooks._pace import heartbeat_interval_s, message_interval_s
from resihp.hooks._spans import Recording
from resihp.hooks._stack import stack_of
from resihp.hooks._stats import FailureLog


@pytest.fixture
def beating(make_monitor):
    def make(**options):
        return make_monitor(heartbeat_s=0.02, clock=None, **options)

    return make


def positions(sidecar):
    return [heartbeat.position for heartbeat in sidecar.heartbeats]


def test_heartbeats_begin_with_the_first_step_and_end_with_a_goodbye(beating, sidecar, wait_until):
    monitor = beating(rank=3, interval_s=60)
    assert not sidecar.heartbeats
    with monitor.step():
        wait_until(lambda: len(sidecar.heartbeats) > 3)
    monitor.close()
    *beats, last = sidecar.heartbeats
    assert {heartbeat.ranks for heartbeat in beats} == {(3,)}
    assert len({heartbeat.process for heartbeat in beats}) == 1
    sequences = [heartbeat.sequence for heartbeat in sidecar.heartbeats]
    assert sequences == list(range(1, len(sequences) + 1))
    assert not any(heartbeat.left for heartbeat in beats)
    assert (last.left, last.error) == (True, "")


def test_the_position_is_that_of_the_training_thread(beating, sidecar, wait_until):
    monitor = beating(interval_s=0.01)
    monitor.current_step = 7

    def stay():
        seen = len(sidecar.heartbeats)
        wait_until(lambda: len(sidecar.heartbeats) >= seen + 3)
        return sidecar.heartbeats[-1].position

    with monitor.step():
        assert (stay().op, stay().step, stay().passes) == (None, 7, 0)
        with monitor.forward(seq_lens=[3]):
            pass
        with monitor.backward():
            here = stay()
            assert (here.op, here.microbatch, here.passes) == (Op.BACKWARD, 0, 1)
            assert not here.waiting
            with monitor.waiting():
                assert stay().waiting
            with monitor.collective():
                assert (stay().op, stay().waiting) == (Op.COLLECTIVE, True)
        with monitor.data():
            assert stay().op == Op.DATA
    assert (stay().op, stay().step, stay().passes) == (None, 8, 0)


def test_the_stay_at_a_place_is_timed_and_ends_with_a_record(beating, sidecar, wait_until):
    monitor = beating(interval_s=0.01)
    with monitor.step(), monitor.forward():
        wait_until(lambda: sidecar.heartbeats and positions(sidecar)[-1].for_s > 0.2)
    recorded_s = time.monotonic()
    monitor.record(op=Op.FORWARD, compute_ms=1.0)

    def begun_s() -> float:
        """The time from which the last heartbeat counts the stay."""
        last = len(sidecar.heartbeats) - 1
        return sidecar.heard_s[last] - sidecar.heartbeats[last].position.for_s

    wait_until(lambda: begun_s() >= recorded_s - 0.002)


def stacks(sidecar):
    return [heartbeat.stack for heartbeat in sidecar.heartbeats if heartbeat.stack]


def test_the_stack_of_the_training_thread_is_sent_once_for_each_place(beating, sidecar, wait_until):
    monitor = beating(interval_s=60)
    here = f"{os.path.basename(__file__)}:"

    def stay_in_a_kernel(told):
        """Stay until one stack more than `told` has come: that of this place."""

        def has_come():
            sidecar.asks_for_stacks = True  # from here on, so that no stack is of a place before
            return len(stacks(sidecar)) > told

        wait_until(has_come)
        beats = len(sidecar.heartbeats)
        wait_until(lambda: len(sidecar.heartbeats) > beats + 3)
        assert len(stacks(sidecar)) == told + 1
        return stacks(sidecar)[-1]

    with monitor.step():
        wait_until(lambda: len(sidecar.heartbeats) > 3)
        assert not stacks(sidecar)  # nobody asked
        frames = stay_in_a_kernel(0)
        assert any("in until" in frame for frame in frames[:5])  # perhaps within its condition
        assert any(frame.startswith(here) and "in stay_in_a_kernel" in frame for frame in frames)
        assert len(frames) <= 16
        assert not any("/" in frame for frame in frames)
        with monitor.forward():
            assert stay_in_a_kernel(1)


def test_the_stack_of_a_loop_in_another_thread(beating, sidecar, wait_until):
    """As of a trainer that runs in a thread of a service."""
    monitor = beating(interval_s=60)
    sidecar.asks_for_stacks = True
    held = threading.Event()

    def loop_of_a_trainer():
        with monitor.step():
            held.wait(300)

    thread = threading.Thread(target=loop_of_a_trainer)
    thread.start()
    wait_until(lambda: stacks(sidecar))
    held.set()
    thread.join(300)
    assert any("in loop_of_a_trainer" in frame for frame in stacks(sidecar)[0])


@pytest.mark.parametrize("by_environment", [False, True])
def test_stacks_can_be_forbidden(beating, sidecar, wait_until, monkeypatch, by_environment):
    if by_environment:
        monkeypatch.setenv("RESIHP_STACKS", "0")
    sidecar.asks_for_stacks = True
    monitor = beating(interval_s=60, stacks=None if by_environment else False)
    with monitor.step():
        wait_until(lambda: len(sidecar.heartbeats) > 5)
    monitor.close()
    assert not stacks(sidecar)


def test_a_sidecar_that_refuses_stacks_still_gets_heartbeats(beating, sidecar, wait_until):
    def refuse(job, heartbeat):
        sidecar.heartbeats.append(heartbeat)
        if heartbeat.stack:
            raise ServiceError("a stack is too long", status=422)
        return {"stack": True}

    sidecar.send_heartbeat = refuse
    with beating(interval_s=60).step():
        wait_until(lambda: sum(not beat.stack for beat in sidecar.heartbeats) > 5)


def test_file_names_of_any_bytes_can_be_sent():
    scope = {"__name__": "__main__"}
    code = "def place(look, thread): return look([thread])"
    exec(compile(code, b"/data/caf\xe9.py", "exec"), scope)
    stack = scope["place"](stack_of, threading.get_ident())
    assert stack[0] == "caf?.py:1 in place"
    packed_heartbeat(Heartbeat(ranks=(0,), stack=stack))


def test_a_stack_that_cannot_be_sent_costs_one_heartbeat(sidecar, monkeypatch):
    sidecar.asks_for_stacks = True
    broken = Mock(side_effect=RuntimeError("no frames"))
    monkeypatch.setattr("resihp.hooks._heartbeat.stack_of", broken)
    sender = Clocked(sidecar, monkeypatch)
    with pytest.raises(RuntimeError, match="no frames"):
        sender.beats(1)
    sidecar.asks_for_stacks = False
    assert len(sender.beats(3)) > 1


class Clocked:
    """A heartbeat's sender on a clock of its own."""

    def __init__(self, sidecar, monkeypatch, sampler=None):
        self.now_s, self._sent = 100.0, sidecar.heartbeats
        monkeypatch.setattr("resihp.hooks._heartbeat.monotonic", lambda: self.now_s)
        recording = Recording(FailureLog(), lambda: 0, None, look_for_cuda=False)
        self._sender = HeartbeatSender(
            sidecar, "j", 0, recording, recording.failures, interval_s=1.0, sampler=sampler
        )

    def beats(self, seconds, *, message_every_s=None):
        """The heartbeats sent in that time, with a message of telemetry every so many seconds."""
        before, next_s = len(self._sent), self.now_s
        for _ in range(round(seconds * 10)):
            self._sender.beat_if_due()
            if message_every_s is not None and self.now_s > next_s - 0.05:
                self._sender.telemetry_accepted(message_every_s)
                next_s += message_every_s
            self.now_s += 0.1
        return self._sent[before:]


def test_while_telemetry_is_accepted_few_heartbeats_are_sent(sidecar, monkeypatch):
    sender = Clocked(sidecar, monkeypatch)
    assert len(sender.beats(30, message_every_s=0.5)) == 4  # one at once: the job is known now
    assert len(sender.beats(10)) in (9, 10)


def test_heartbeats_are_fewer_while_the_sidecar_asks_for_fewer_messages(sidecar, monkeypatch):
    assert len(Clocked(sidecar, monkeypatch).beats(30, message_every_s=1.8)) == 4
    assert len(Clocked(sidecar, monkeypatch).beats(60, message_every_s=30)) in range(14, 18)


def test_sensors_are_told_in_every_fifth_heartbeat(sidecar, monkeypatch):
    sampler = Mock(sample=lambda: SensorSample(seconds=5.0, busy=0.5))
    beats = Clocked(sidecar, monkeypatch, sampler).beats(20)
    told = [number for number, beat in enumerate(beats) if beat.sensors is not None]
    assert told == list(range(0, len(beats), 5))


def test_no_heartbeats_where_they_are_forbidden(make_monitor, sidecar):
    monitor = make_monitor(heartbeat_s=0)
    monitor.record(op=Op.FORWARD, compute_ms=1.0)
    monitor.close()
    assert sidecar.batches
    assert not sidecar.heartbeats


def test_heartbeats_go_on_while_telemetry_is_repeated(beating, sidecar, wait_until):
    sidecar.script = [503] * 1000
    monitor = beating(interval_s=0.01)
    monitor.record(op=Op.FORWARD, compute_ms=1.0)
    wait_until(lambda: len(sidecar.heartbeats) > 4)
    assert monitor.stats.sent == 0


def test_heartbeats_go_on_while_a_repetition_waits_as_long_as_it_is_told(
    beating, sidecar, wait_until
):
    sidecar.script = [ServiceError("busy", status=429, retry_after_s=600.0)]
    monitor = beating(interval_s=0.01)
    monitor.record(op=Op.FORWARD, compute_ms=1.0)
    wait_until(lambda: not sidecar.script)
    heard = len(sidecar.heartbeats)
    wait_until(lambda: len(sidecar.heartbeats) > heard + 4, timeout_s=25.0)
    assert monitor.stats.sent == 0


def test_large_jobs_beat_and_send_less_often():
    assert heartbeat_interval_s(1.0, 8) == 1.0
    assert heartbeat_interval_s(1.0, 10_000) == 10.0
    assert heartbeat_interval_s(0.0, 10_000) == 0.0
    for ranks, together in [(4, 1), (8, 1), (64, 8), (64, 1), (1_024, 8), (1_024, 1), (16_384, 8)]:
        interval_s = message_interval_s(None, ranks, together)
        per_second = ranks / together / interval_s
        assert 0.5 <= interval_s <= 1.0 or per_second == pytest.approx(400)
        assert per_second <= 8.0 or interval_s >= 1.0
        assert per_second <= 400.0001
        given_s = message_interval_s(0.01, ranks, together)
        assert given_s == max(0.01, ranks / together / 400)
    assert message_interval_s(0.5, 100_000, 1) == 30.0
    assert message_interval_s(60.0, 100_000, 1) == 60.0


def test_a_monitor_spreads_its_messages_by_the_senders_of_its_job(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8000")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    for shares, interval_s in [(True, 2.5), (False, 20.0)]:
        with Monitor(job="j", rank=0, share_sender=shares) as monitor:
            assert monitor._sender._pace.base_s == pytest.approx(interval_s)


def test_a_forked_child_that_records_nothing_does_not_beat(beating, sidecar, wait_until):
    monitor = beating()
    monitor.record(op=Op.FORWARD, compute_ms=1.0)
    wait_until(lambda: sidecar.heartbeats)
    child = os.fork()
    if child == 0:
        seen = len(sidecar.heartbeats)
        threading.Event().wait(0.2)
        os._exit(0 if len(sidecar.heartbeats) == seen else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_block_that_is_left_by_an_error_gives_it_as_the_reason(beating, sidecar):
    failing = pytest.raises(ValueError, match="bad")
    with failing, beating(interval_s=60) as monitor, monitor.step():
        raise ValueError("bad batch")
    assert (sidecar.heartbeats[-1].left, sidecar.heartbeats[-1].error) == (
        True, "ValueError: bad batch",
    )  # fmt: skip


def test_an_error_without_text_passes_and_is_named(beating, sidecar):
    class SilentError(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    with pytest.raises(SilentError), beating(interval_s=60) as monitor, monitor.step():
        raise SilentError
    assert sidecar.heartbeats[-1].error == "SilentError"


@pytest.mark.parametrize(
    "error", ["Connection closed by peer [127.0.0.1]:1", "[../gloo/transport/tcp/pair.cc:1] read"]
)
def test_the_loss_of_a_peer_is_not_the_fault_of_this_rank(beating, sidecar, error):
    with pytest.raises(RuntimeError), beating(interval_s=60) as monitor, monitor.step():
        raise RuntimeError(error)
    assert (sidecar.heartbeats[-1].left, sidecar.heartbeats[-1].error) == (True, "")


SCRIPT = """
import sys
from resihp.hooks import Monitor, _sender, monitor
_sender._EXIT_TIMEOUT_S = monitor._CLOSE_TIMEOUT_S = 300.0  # however busy this machine is
class Receiver:
    def register(self, job): pass
    def send_telemetry(self, *message): return {}
    def send_heartbeat(self, job, heartbeat): print(heartbeat.left, heartbeat.error, flush=True)
monitor = Monitor(job="j", client=Receiver(), interval_s=60)
with monitor.step():
    pass
"""


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("", "True "),
        ("sys.exit(3)", "True "),
        ("raise KeyError('k')", "True KeyError: 'k'"),
        ("del monitor", "True "),
    ],
)
def test_the_end_of_a_script_is_told_with_its_error(end, said):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + end],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == said


class _Pipe:
    def __init__(self, pipe):
        self.pipe = pipe

    def register(self, job): ...

    def send_telemetry(self, *message):
        return {}

    def send_heartbeat(self, job, heartbeat: Heartbeat):
        self.pipe.send((heartbeat.left, heartbeat.error))


def _child(pipe, error):
    from resihp.hooks import Monitor, _sender

    _sender._EXIT_TIMEOUT_S = 300.0  # however busy this machine is
    monitor = Monitor(job="j", client=_Pipe(pipe), interval_s=60)
    with monitor.step():
        pass
    if error:
        raise error


@pytest.mark.parametrize("error", [None, ValueError("bad")])
def test_a_process_of_multiprocessing_says_goodbye(error):
    """It runs no `atexit` callback."""
    reading, writing = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_child, args=(writing, error))
    child.start()
    writing.close()
    said = []
    with suppress(EOFError):
        while reading.poll(300):
            said.append(reading.recv())
    child.join(300)
    assert said[-1] == (True, "ValueError: bad" if error else "")
