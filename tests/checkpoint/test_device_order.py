"""The order of what a device is told, with a stand-in for its streams: nothing here needs one."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
import torch

from resihp.checkpoint import Checkpointer, LocalDisk
from resihp.checkpoint.staging import copier, stager
from resihp.checkpoint.staging.copier import IN_FLIGHT, Copier
from resihp.checkpoint.staging.in_flight import InFlightCheckpoint
from resihp.contracts import ContractError

CHUNKS = 12
PATIENCE_S = 60


class Stream:
    """Notes what it is told. Its events have happened once the test lets them."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.going, self.recorded = name, log, Event(), 0
        self.reached_limit, self.has_all = Event(), Event()

    def wait_stream(self, other: Stream) -> None:
        """What comes here next comes after what the other has been told so far."""
        self.log.append(f"{self.name} after {other.name}")

    def record_event(self, event: CudaEvent) -> CudaEvent:
        """It comes after what this has been told so far."""
        self.recorded += 1
        if self.recorded >= IN_FLIGHT:
            self.reached_limit.set()
        if self.recorded >= CHUNKS:
            self.has_all.set()
        event.going = self.going
        return event


class CudaEvent:
    """Has the host wait asleep."""

    def __init__(self, *, blocking: bool = False) -> None:
        self.blocking, self.going = blocking, Event()

    def synchronize(self) -> None:
        assert self.blocking, "the host would spin"
        assert self.going.wait(PATIENCE_S)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> tuple[Stream, Stream, list[str]]:
    log: list[str] = []
    training, copying = Stream("training", log), Stream("copying", log)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: training)
    monkeypatch.setattr(torch.cuda, "Event", CudaEvent)
    return training, copying, log


def test_copies_come_after_the_optimizer_and_before_its_next_step(
    tmp_path: Path, streams: tuple[Stream, Stream, list[str]]
) -> None:
    _, copying, log = streams
    state, disk = {"w": torch.full((CHUNKS << 20,), 3.0)}, LocalDisk(tmp_path)
    with Checkpointer([disk]) as saver:
        saver.prepare(state)
        copier = saver._stager._copier
        assert copier is not None
        copier._stream = copying  # type: ignore[assignment]
        assert saver.save(0, state)
        assert log == ["copying after training"]
        assert copying.reached_limit.wait(PATIENCE_S)
        assert copying.recorded == IN_FLIGHT, "few are in flight: training's own get in between"
        copying.going.set()
        saver.fence()
        assert log == ["copying after training", "training after copying"]
        state["w"].fill_(9.0)
        assert saver.wait(PATIENCE_S)
        assert copying.recorded >= CHUNKS
        assert not saver.counters.failures
        into = {"w": torch.zeros(CHUNKS << 20)}
        saver.restore(into)
        assert torch.equal(into["w"], torch.full((CHUNKS << 20,), 3.0))


def test_a_fence_that_comes_early_makes_the_stream_wait_and_not_the_host(
    tmp_path: Path, streams: tuple[Stream, Stream, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, copying, log = streams
    start = Copier.start

    def at_once(copier: Copier, checkpoint: InFlightCheckpoint) -> None:
        checkpoint.hurry.set()
        start(copier, checkpoint)

    monkeypatch.setattr(Copier, "start", at_once)
    state, disk = {"w": torch.zeros(CHUNKS << 20)}, LocalDisk(tmp_path)
    with Checkpointer([disk]) as saver:
        saver.prepare(state)
        copier = saver._stager._copier
        assert copier is not None
        copier._stream = copying  # type: ignore[assignment]
        assert saver.save(0, state)
        saver.fence()  # no copy has ended yet
        assert copying.has_all.wait(PATIENCE_S), "the event of a copy comes after its order"
        assert log == ["copying after training", "training after copying"]
        assert disk.steps() == []
        copying.going.set()
    assert disk.steps() == [0]


def test_a_state_on_several_devices_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies would come after what one of them has been told, and not after the other's."""
    lies_on = {1: "cuda:1", 2: "cuda:0", 3: "cpu"}

    def memory_of(source: torch.Tensor) -> list[SimpleNamespace]:
        device = torch.device(lies_on[source.numel()])
        return [SimpleNamespace(device=device, is_cuda=device.type == "cuda")]

    monkeypatch.setattr(stager, "memory_of", memory_of)
    state = {"a": torch.zeros(1), "b": torch.zeros(2), "c": torch.zeros(3)}
    with (
        Checkpointer([LocalDisk(tmp_path)]) as saver,
        pytest.raises(ContractError, match=r"state: lies on several devices \(cuda:0, cuda:1\)"),
    ):
        saver.prepare(state)


def test_the_copying_thread_leaves_captures_of_training_alone(
    streams: tuple[Stream, Stream, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, copying, log = streams
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: copying)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: log.append(stream.name))
    monkeypatch.setattr(copier, "ignore_captures", lambda: log.append("ignores captures"))
    Copier(torch.device("cuda")).close()
    assert log == ["copying", "ignores captures"]
