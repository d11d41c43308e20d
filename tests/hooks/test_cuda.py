"""Device time: with scripted events everywhere, with real ones where there is a device."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from resihp import _stream_captures
from resihp.hooks import CudaClock, HostClock
from resihp.hooks._clocks import running_cuda


class Stream:
    """Behaves like `torch.cuda`: events are past once `done_ms` has reached their time."""

    def __init__(self) -> None:
        self.now_ms, self.done_ms = 0.0, 0.0
        self.capturing = self.broken = False
        self.events_made, self.adopted = 0, []

    def Event(self, enable_timing=False):
        self.events_made += 1
        return _Event(self)

    def current_device(self):
        return 5

    def current_stream(self, device=5):
        return self

    def set_device(self, device):
        self.adopted.append(device)

    def is_current_stream_capturing(self):
        return self.capturing

    def is_initialized(self):
        return True

    def synchronize(self):
        raise AssertionError("the training thread must never wait for the device")


class _Event:
    def __init__(self, stream) -> None:
        self.stream, self.at_ms = stream, None

    def record(self, stream):
        self.recorded_on = stream
        if self.stream.broken:
            raise RuntimeError("device lost")
        self.at_ms = self.stream.now_ms

    def query(self):
        return self.at_ms <= self.stream.done_ms

    def elapsed_time(self, later):
        assert self.query()
        assert later.query()
        return later.at_ms - self.at_ms

    def synchronize(self):
        raise AssertionError("the training thread must never wait for the device")


@pytest.fixture
def stream():
    return Stream()


@pytest.fixture
def monitor(make_monitor, stream):
    return make_monitor(clock=CudaClock(stream), interval_s=0.005)


def one_microbatch(monitor, stream):
    with monitor.microbatch(seq_lens=[4]):
        stream.now_ms += 10
        with monitor.waiting():
            stream.now_ms += 3
        with monitor.p2p():
            stream.now_ms += 2


def test_times_are_read_once_the_device_is_past_them(monitor, stream, sidecar, wait_until):
    one_microbatch(monitor, stream)
    with monitor.step():
        pass
    wait_until(lambda: stream.adopted)
    assert sidecar.batches == []  # the device has not come that far
    stream.done_ms = stream.now_ms
    wait_until(lambda: monitor.stats.sent == 3)
    records = sidecar.records
    assert records.compute_ms.tolist() == [2, 10, 0]
    assert records.wait_ms.tolist()[1] == 5
    assert np.isnan(records.wait_ms[[0, 2]]).all()
    assert set(stream.adopted) == {5}


def test_events_are_used_again(monitor, stream, wait_until):
    for turn in range(20):
        one_microbatch(monitor, stream)
        stream.done_ms = stream.now_ms
        wait_until(lambda turn=turn: monitor.stats.sent == 2 * (turn + 1))
    assert stream.events_made == 8


def test_records_that_wait_for_the_sidecar_hold_no_events(monitor, stream, sidecar, wait_until):
    sidecar.script = [503] * 100_000
    entries = monitor._sender.buffer.entries
    for _ in range(20):
        with monitor.microbatch(seq_lens=[4]), monitor.waiting():
            stream.now_ms += 3
        stream.done_ms = stream.now_ms
        wait_until(lambda: monitor._sender._summed == len(entries))
    assert stream.events_made <= 8
    sidecar.script = []
    wait_until(lambda: monitor.stats.sent == 20)
    assert sidecar.records.compute_ms.tolist() == [0] * 20
    assert sidecar.records.wait_ms.tolist() == [3] * 20


def test_a_stream_is_asked_for_once(stream, monkeypatch):
    streams, asked, current = {3: object(), 4: object()}, [], [3]

    def current_stream(device):
        asked.append((device, *current))
        return streams[current[0]]

    monkeypatch.setattr(stream, "current_stream", current_stream)
    clock = CudaClock(stream, lambda device: current[0])
    for handle in (3, 3, 4, 3, 4):
        current[0] = handle
        assert clock.stamp().recorded_on is streams[handle]
        assert clock.stream() == handle
    assert asked == [(5, 3), (5, 4)]


def test_a_graph_capture_is_left_alone(monitor, stream, sidecar):
    stream.capturing = True
    one_microbatch(monitor, stream)
    stream.capturing = False
    one_microbatch(monitor, stream)
    stream.done_ms = stream.now_ms
    monitor.close()
    assert len(sidecar.records) == 2
    assert monitor.stats.failures == 0


def test_the_sender_leaves_captures_of_other_threads_alone(
    monitor, stream, wait_until, monkeypatch
):
    def exchange(pointer):
        modes.append((pointer._obj.value, threading.current_thread().name))

    modes, driver = [], SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr("ctypes.CDLL", {"libcuda.so.1": driver}.__getitem__)
    _stream_captures._exchange_mode.cache_clear()
    one_microbatch(monitor, stream)
    wait_until(lambda: modes)
    monitor.close(0.1)
    _stream_captures._exchange_mode.cache_clear()
    assert set(modes) == {(1, "resihp-sender")}


def test_a_lost_device_is_counted_and_training_goes_on(monitor, stream, caplog):
    stream.broken = True
    for _ in range(3):
        one_microbatch(monitor, stream)
    assert monitor.stats.failures >= 3
    assert len([r for r in caplog.records if "CUDA event" in r.message]) == 1


def test_input_waits_are_told_by_the_host(make_monitor, stream, sidecar):
    monitor = make_monitor(clock=CudaClock(stream))
    with monitor.data():
        pass
    monitor.close()
    assert stream.events_made == 0
    assert len(sidecar.records) == 1


def test_events_that_never_come_do_not_hold_up_the_end(monitor, stream, wait_until):
    one_microbatch(monitor, stream)
    monitor.close(timeout_s=0.2)
    wait_until(lambda: monitor.stats.dropped == 2)


def test_cuda_is_found_only_where_the_process_computes_with_it(
    make_monitor, sidecar, stream, monkeypatch
):
    stream.is_initialized = lambda: False
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=stream))
    assert running_cuda() is None
    monitor = make_monitor(clock=None)
    with monitor.step():
        pass
    assert stream.events_made == 0
    stream.is_initialized = lambda: True
    with monitor.step():
        stream.now_ms += 4
    stream.done_ms = stream.now_ms
    monitor.close()
    assert sidecar.records.compute_ms[1] == 4
    assert stream.events_made == 2


def test_a_clock_of_the_host_is_kept(make_monitor, stream, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=stream))
    monitor = make_monitor(clock=HostClock())
    with monitor.step():
        pass
    assert stream.events_made == 0


@pytest.mark.gpu
def test_on_a_device(make_monitor, sidecar):
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    side = torch.randn(2048, 2048, device="cuda")
    monitor = make_monitor(clock=None)
    cu_seqlens = torch.tensor([0, 3, 7], device="cuda", dtype=torch.int32)
    for _ in range(20):
        with monitor.step(), monitor.microbatch(cu_seqlens=cu_seqlens):
            for _ in range(10):
                side = torch.tanh(side @ side)
    torch.cuda.synchronize()
    monitor.close(10)
    assert len(sidecar.records) == 20
    assert (sidecar.records.compute_ms > 0).all()
    assert (sidecar.records.tokens == 7).all()


def test_events_lie_on_one_timeline_however_far_apart():
    stream = Stream()
    clock, positions = CudaClock(stream), []
    for at_ms in (100.0, 103.5, 20_000.0, 20_001.0, 45_000.0):
        stream.now_ms = stream.done_ms = at_ms
        event = clock.stamp()
        positions.append(clock.position_ms(event))
        clock.recycle(event)
    assert positions == pytest.approx([0.0, 3.5, 19_900.0, 19_901.0, 44_900.0])
    assert stream.events_made == 2
