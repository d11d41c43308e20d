"""A host cache smaller than the state: saved whole, within the memory given, never torn."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from resihp.checkpoint import (
    Checkpointer,
    HostMemory,
    IndependentRank,
    LocalDisk,
    PeerMemory,
    SharedStorage,
)
from resihp.checkpoint.levels import Level, checkpoint_folder
from resihp.checkpoint.levels.direct_file import DirectFile
from resihp.checkpoint.restore import restore
from resihp.checkpoint.staging import fence, host_buffer
from resihp.checkpoint.staging.copier import Copier
from resihp.checkpoint.staging.host_cache import BLOCK_BYTES, HostCache
from resihp.checkpoint.staging.stager import LEAST_CACHE_BYTES
from resihp.contracts import ContractError
from tests.checkpoint.helpers import (
    GatedDisk,
    assert_stamped,
    back_from,
    room_for,
    run_python,
    run_until_killed,
    stamp,
    stamped,
)

BLOCKS = 4
"""Blocks for copies in the smallest cache."""
PATIENCE_S = 100


def large(step: int) -> dict[str, Tensor]:
    """Nine chunks: a tensor larger than the cache, one at an odd address, one with gaps, small."""
    odd, wide = torch.empty(1_500_001)[1:], torch.empty(600, 1200)[:, ::2]
    small = {f"small{i}": torch.empty(300 + i) for i in range(20)}
    state = {**small, "odd": odd, "wide": wide, "huge": torch.empty(7 << 20)}
    stamp(state, step)
    return state


def assert_restored(level: Level, step: int) -> None:
    """The level has the whole state of a step, with every byte verified."""
    into = large(-1)
    restore([level], into, IndependentRank(), step=step)
    assert_stamped(into, step)


def cache_of(saver: Checkpointer) -> HostCache:
    cache = saver._stager._cache
    assert cache is not None
    return cache


def gives_all_back(saver: Checkpointer) -> bool:
    """True once no block is in use: a copy may end after its checkpoint was given up."""
    deadline = time.monotonic() + PATIENCE_S
    while not cache_of(saver).is_idle and time.monotonic() < deadline:
        time.sleep(0.001)
    return cache_of(saver).is_idle


def before_writes(patch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Call `act` before each write of chunks to a disk."""
    real = DirectFile.write

    def write(file: DirectFile, parts: list[memoryview], at: int) -> None:
        act()
        real(file, parts, at)

    patch.setattr(DirectFile, "write", write)


def before_waits(patch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Call `act` before each wait of the fence for room in the cache."""
    real = fence.FenceWait._wait_for_room

    def wait_for_room(wait: fence.FenceWait) -> bool:
        act()
        return real(wait)

    patch.setattr(fence.FenceWait, "_wait_for_room", wait_for_room)


def levels_in(folder: Path, kind: str) -> list[Level]:
    """One disk writes from the tensors; with two, or none, every chunk goes through the cache."""
    disks = {"disk": "a", "two disks": "ab"}.get(kind, "")
    levels: list[Level] = [LocalDisk(folder / name, keep=9) for name in disks]
    return levels or [SharedStorage(f"file://{folder}/s", keep=9)]


@settings(max_examples=10, deadline=None)
@given(
    naps=st.lists(st.sampled_from([0.0, 0.001, 0.03]), min_size=2, max_size=4),
    kind=st.sampled_from(["disk", "two disks", "no disk"]),
    parts=st.sampled_from([1, 2, 7]),
    write_s=st.sampled_from([0.0, 0.001, 0.005]),
)
def test_a_state_larger_than_the_cache_is_saved_whole(
    naps: list[float], kind: str, parts: int, write_s: float
) -> None:
    state = large(-2)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        before_writes(patch, lambda: time.sleep(write_s))
        levels = levels_in(Path(name), kind)
        with Checkpointer(levels, host_cache_bytes=LEAST_CACHE_BYTES) as saver:
            for step, nap in enumerate(naps):
                stamp(state, step)
                saver.save(step, state)
                time.sleep(nap)
                for turn in range(parts):  # an optimizer that writes the last tensors first
                    some = [*reversed(state.values())][turn::parts]
                    saver.fence(some)
                    for tensor in some:
                        tensor.fill_(-7.0)
                saver.fence()
            assert cache_of(saver).capacity == BLOCKS
            assert saver.wait(PATIENCE_S)
            assert gives_all_back(saver), "what is done with gives its blocks back"
            assert not saver.counters.failures
            assert not saver._problems.is_open("host cache"), "a wait without end"
        for level in levels:
            assert level.steps(), "the first one always finds room"
            for step in level.steps():
                assert_restored(level, step)


def test_the_fence_waits_for_what_does_not_fit_and_says_how_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    before_writes(monkeypatch, lambda: gate.wait(PATIENCE_S) and None)
    before_waits(monkeypatch, gate.set)
    state, disk = large(0), LocalDisk(tmp_path)
    with Checkpointer([disk], host_cache_bytes=LEAST_CACHE_BYTES) as saver:
        saver.save(0, state)
        saver.fence()
        assert gate.is_set(), "the fence came back before the disk took anything"
        stamp(state, 1)
        assert saver.wait(PATIENCE_S)
        assert 0 < saver.counters.cache_wait_s <= saver.counters.blocking_s
    assert_restored(disk, 0)


def test_a_fence_for_the_last_tensors_does_not_fill_the_cache_with_what_none_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Copier, "start", lambda *_: None)  # the fence alone copies
    state, levels = large(0), levels_in(tmp_path, "two disks")
    with Checkpointer(levels, host_cache_bytes=LEAST_CACHE_BYTES) as saver:
        saver.save(0, state)
        saver.fence([state["huge"]])
        state["huge"].fill_(-7.0)
        saver.fence()
    for level in levels:
        assert_restored(level, 0)


def test_a_cache_for_the_whole_state_never_waits(tmp_path: Path) -> None:
    state, disk = large(0), GatedDisk(tmp_path)
    with Checkpointer([disk]) as saver:
        saver.save(0, state)
        saver.fence()  # while the disk is shut
        stamp(state, 1)
        assert not saver.counters.cache_wait_s
        disk.gate.set()
    assert_restored(disk, 0)


@pytest.mark.parametrize("kind", ["disk", "two disks", "no disk"])
def test_close_right_after_save(tmp_path: Path, kind: str) -> None:
    levels = levels_in(tmp_path, kind)
    with Checkpointer(levels, host_cache_bytes=LEAST_CACHE_BYTES) as saver:
        assert saver.save(3, large(3))
    for level in levels:
        assert_restored(level, 3)


def test_a_save_while_two_others_drain_is_skipped_at_once(tmp_path: Path) -> None:
    state, memory, disk = stamped(-1), HostMemory(), GatedDisk(tmp_path, keep=9)
    with Checkpointer([memory, disk], host_cache_bytes=room_for(4)) as saver:
        begun = []
        for step in range(5):
            saver.fence()
            stamp(state, step)
            begun.append(saver.save(step, state))
            while begun[-1] and saver.counters.levels[memory.name].saved < sum(begun):
                time.sleep(0.001)
        assert begun[:3] == [True, True, True], "two on their way to the disk, one in memory alone"
        assert saver.counters.levels[disk.name].skipped
        disk.gate.set()
    assert not saver.counters.failures
    assert disk.steps() == [0, 1, 4], "the last one is made up for"
    for step in disk.steps():
        assert_stamped(back_from(disk, step=step)[1], step)


def test_a_disk_that_hangs_holds_training_up_once_and_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fence, "STALL_TIMEOUT_S", 0.3)
    state, disk = large(-1), GatedDisk(tmp_path)
    with Checkpointer([disk], host_cache_bytes=LEAST_CACHE_BYTES) as saver:
        for step in range(4):
            stamp(state, step)
            saver.save(step, state)
            saver.fence()
        assert saver.counters.no_buffer == 4, "one given up, and no room while it hangs"
        assert saver.counters.started == 1
        disk.gate.set()
        assert saver.wait(PATIENCE_S)
        assert gives_all_back(saver)
        stamp(state, 9)
        assert saver.save(9, state)
    assert disk.steps() == [9]
    assert_restored(disk, 9)
    assert len([line for line in caplog.messages if "step 0 does not fit" in line]) == 1


def test_a_write_that_ends_after_its_checkpoint_was_given_up_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All chunks are being written when the fence fails, and nothing is left to begin after."""
    entered, gate = threading.Semaphore(0), threading.Event()

    def act() -> None:
        entered.release()
        assert gate.wait(PATIENCE_S)

    before_writes(monkeypatch, act)
    state, disk = {"w": torch.zeros(3 << 19)}, LocalDisk(tmp_path)
    with Checkpointer([disk]) as saver:
        saver.save(0, state)
        assert all(entered.acquire(timeout=PATIENCE_S) for _ in range(2))
        saver.fence([None])  # type: ignore[list-item]
        state["w"].fill_(1.0)
        gate.set()
        assert saver.wait(PATIENCE_S)
    assert disk.steps() == []


@pytest.mark.parametrize("kind", ["disk", "two disks"])
def test_a_disk_that_fills_up_in_the_middle_frees_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    left = [10**9]

    def act() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")

    before_writes(monkeypatch, act)
    state, levels = large(0), levels_in(tmp_path, kind)
    with Checkpointer(levels, host_cache_bytes=LEAST_CACHE_BYTES) as saver:
        for step in range(5):
            left[0] = 3 if step in (1, 2) else 10**9
            stamp(state, step)
            assert saver.save(step, state)
            saver.fence()
            stamp(state, -7)
            assert saver.wait(PATIENCE_S)
            assert gives_all_back(saver)
        assert not saver.counters.failures
        assert not saver._problems.is_open("host cache"), "a wait without end"
    for level in levels:
        assert saver.counters.levels[level.name].failed == 2
        assert {1, 2}.isdisjoint(level.steps())
        assert {3, 4} <= set(level.steps())
        assert_restored(level, 4)


def test_shared_storage_gets_all_through_the_cache_if_the_disk_fails_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_writes(monkeypatch, lambda: (_ for _ in ()).throw(OSError("the disk is gone")))
    state, disk = large(4), LocalDisk(tmp_path / "d")
    shared = SharedStorage(f"file://{tmp_path}/s")
    with Checkpointer([disk, shared], host_cache_bytes=LEAST_CACHE_BYTES) as saver:
        saver.save(4, state)
        assert saver.wait(PATIENCE_S)
        assert saver.counters.levels[disk.name].failed == 1
        saver.fence()
        stamp(state, 5)
    assert_restored(shared, 4)


def test_a_peer_is_sent_more_than_the_cache_holds() -> None:
    own, other = HostMemory(), HostMemory()
    peers, theirs = (PeerMemory(each, token="ours") for each in (own, other))
    try:
        for rank, level in enumerate((peers, theirs)):
            level.connect(rank, {0: peers.address, 1: theirs.address})
        ranks, state = IndependentRank(0, (0,), run="one"), large(6)
        with Checkpointer([peers], ranks=ranks, host_cache_bytes=LEAST_CACHE_BYTES) as saver:
            saver.save(6, state)
            saver.fence()
            stamp(state, 7)
            assert saver.wait(PATIENCE_S)
            assert cache_of(saver).capacity == BLOCKS
            assert_restored(theirs, 6)
    finally:
        peers.close()
        theirs.close()


def test_host_memory_keeps_whole_images_or_is_refused(tmp_path: Path) -> None:
    for levels in ([HostMemory()], [HostMemory(), LocalDisk(tmp_path)]):
        with Checkpointer(levels, host_cache_bytes=LEAST_CACHE_BYTES) as saver:
            with pytest.raises(ContractError, match="HostMemory keeps 1 whole checkpoint"):
                saver.prepare(large(0))
            assert not saver.save(0, large(0))
            (text,) = saver.counters.failures
            assert text.startswith("save: host_cache_bytes: HostMemory keeps")
    with Checkpointer([HostMemory()], host_cache_bytes=room_for(2)) as saver:
        assert saver.save(0, stamped(0)), "a cache with room for both"


PEAK = """
import sys, time, torch
from pathlib import Path
from resihp.checkpoint import Checkpointer, LocalDisk

def resident(field):
    (line,) = [l for l in open("/proc/self/status") if l.startswith(field)]
    return int(line.split()[1]) << 10

folder, mib, cache, disks = sys.argv[1], *map(int, sys.argv[2:])
count = mib >> 4
state = {f"layer{i}": torch.full((4 << 20,), -1.0) for i in range(count)}
levels = [LocalDisk(f"{folder}/{i}", keep=1) for i in range(disks)]
before = None
with Checkpointer(levels, host_cache_bytes=cache) as saver:
    for step in range(3):
        for tensor in state.values():
            tensor.fill_(step)
        if before is None:
            Path("/proc/self/clear_refs").write_text("5")
            before = resident("VmRSS")
        assert saver.save(step, state)
        saver.fence()
    assert saver.wait()
    assert not saver.counters.failures, saver.counters
    print(resident("VmHWM") - before)
"""


@pytest.mark.parametrize("disks", [1, 2])
def test_memory_stays_within_the_cache_of_a_quarter_of_the_state(
    tmp_path: Path, disks: int
) -> None:
    mib, cache = 256, 64 << 20
    extra = int(run_python(PEAK, tmp_path, mib, cache, disks))
    assert extra <= cache + (24 << 20), "the cache, and what the modules and threads of a save take"
    for disk in range(disks):
        into = {f"layer{i}": torch.zeros(4 << 20) for i in range(mib >> 4)}
        assert restore([LocalDisk(tmp_path / str(disk))], into, IndependentRank()).step == 2
        assert_stamped(into, 2)


def save_until_killed(rank: int, host: str, port: int, folder: Path, phase: str) -> None:
    """Save three steps; the process kills itself in this phase of the last one."""
    is_armed, calls = False, 0

    def die_at(owner: Any, name: str, call: int) -> None:
        real = getattr(owner, name)

        def act(*arguments: object) -> object:
            nonlocal calls
            calls += is_armed
            if is_armed and calls >= call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)

        setattr(owner, name, act)

    def hold_writes_until_helped() -> None:
        write, help_once, helped = DirectFile.write, Copier.help, threading.Event()

        def late(*arguments: Any) -> None:
            if is_armed:
                helped.wait()
            write(*arguments)

        def first(*arguments: Any) -> bool:
            done = help_once(*arguments)
            if is_armed:
                helped.set()
            return done

        DirectFile.write = late
        Copier.help = first

    if phase == "fence":  # which finds more chunks than the cache has room for
        hold_writes_until_helped()
    match phase:
        case "first write":
            die_at(DirectFile, "write", 1)
        case "half the writes":
            die_at(DirectFile, "write", 4)
        case "fence":
            die_at(Copier, "help", 2)
        case "index":
            die_at(checkpoint_folder, "write_index", 1)
        case "publication":
            die_at(checkpoint_folder, "publish_folder", 1)
        case "retirement":
            die_at(LocalDisk, "_drop_old", 1)
    state = {"w": torch.zeros(12 << 20), "b": torch.zeros(3)}
    with Checkpointer([LocalDisk(folder)], host_cache_bytes=32 << 20) as saver:
        for step in range(3):
            for tensor in state.values():
                tensor.fill_(step)
            is_armed = step == 2
            saver.save(step, state)
            saver.fence()
            saver.wait()


@pytest.mark.parametrize(
    ("phase", "newest"),
    [
        ("first write", 1),
        ("half the writes", 1),
        ("fence", 1),
        ("index", 1),
        ("publication", 1),
        ("retirement", 2),
    ],
)
def test_a_kill_at_any_phase_leaves_the_checkpoint_before(
    tmp_path: Path, phase: str, newest: int
) -> None:
    run_until_killed(save_until_killed, tmp_path, phase)
    disk, state = LocalDisk(tmp_path), {"w": torch.zeros(12 << 20), "b": torch.zeros(3)}
    assert max(disk.steps()) == newest
    with Checkpointer([disk], host_cache_bytes=LEAST_CACHE_BYTES) as saver:
        assert saver.restore(state).step == newest
        assert_stamped(state, newest)
        assert saver.save(newest + 1, state), "the next start goes on"
    assert max(disk.steps()) == newest + 1


class Stream:
    """Stand-in for a device's stream whose work is done at once."""

    def wait_stream(self, other: object) -> None:
        """Come after the other's work."""

    def record_event(self, event: object) -> object:
        """It comes after the work so far."""
        return event


def test_a_device_state_larger_than_the_pinned_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: Stream())
    event = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: event)
    state, disk = large(-1), GatedDisk(tmp_path, keep=9)
    before_waits(monkeypatch, disk.gate.set)
    with Checkpointer([disk], host_cache_bytes=LEAST_CACHE_BYTES) as saver:
        saver.prepare(state)
        copier = saver._stager._copier
        assert copier is not None
        copier._stream = Stream()  # type: ignore[assignment]
        for step in range(3):
            stamp(state, step)
            saver.save(step, state)
            saver.fence()
        stamp(state, -7)
        assert saver.wait(PATIENCE_S)
        assert saver.counters.cache_wait_s
        assert not saver.counters.failures
        assert gives_all_back(saver)
    assert 0 in disk.steps()
    for step in disk.steps():
        assert_restored(disk, step)


def register_with(
    monkeypatch: pytest.MonkeyPatch, registered: dict[int, int], unregister: Callable[[int], int]
) -> None:
    """Stand in for CUDA's runtime, with addresses and sizes in `registered`."""
    cudart = SimpleNamespace(
        cudaHostRegister=lambda at, nbytes, flags: registered.update({at: nbytes}) or 0,
        cudaHostUnregister=unregister,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)


def test_pinned_memory_is_registered_to_the_byte_and_unregistered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registered: dict[int, int] = {}
    register_with(monkeypatch, registered, lambda at: 0 if registered.pop(at) else 1)
    cache = HostCache(pinned=True)
    cache.grow(3)
    assert [*registered.values()] == [3 * BLOCK_BYTES]
    view = cache.view(2)
    cache.grow(5)
    assert sorted(registered.values()) == [3 * BLOCK_BYTES, 5 * BLOCK_BYTES], "a level reads there"
    del view
    assert [*registered.values()] == [5 * BLOCK_BYTES]


def is_mapped(address: int) -> bool:
    """Whether an address is in a mapping of this process."""
    spans = (
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()
    )
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in spans)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_pinned_memory_is_unregistered_before_it_is_unmapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registered: dict[int, int] = {}
    was_mapped: list[bool] = []
    mappings: list[weakref.ref[mmap.mmap]] = []
    register_with(monkeypatch, registered, lambda at: was_mapped.append(is_mapped(at)) or 0)
    map_memory = host_buffer._map

    def noted(nbytes: int, *, huge: bool) -> mmap.mmap:
        memory = map_memory(nbytes, huge=huge)
        mappings.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(host_buffer, "_map", noted)
    cache = HostCache(pinned=True)
    cache.grow(1)
    assert was_mapped == []
    del cache
    assert was_mapped == [True]
    assert [mapping() for mapping in mappings] == [None]


def test_memory_that_stays_registered_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    register_with(monkeypatch, {}, lambda at: 713)
    HostCache(pinned=True).grow(1)
    assert caplog.messages == [
        f"{BLOCK_BYTES} bytes of host memory stay registered with the device (CUDA error 713)"
    ]


def test_a_cache_lends_the_lowest_free_block_and_grows_beside_those_in_use() -> None:
    cache = HostCache()
    assert cache.take() is None
    cache.grow(2)
    assert [cache.take(), cache.take(), cache.take()] == [0, 1, None]
    cache.view(1)[:3] = b"abc"
    cache.grow(4)
    assert bytes(cache.view(1)[:3]) == b"abc"
    assert [cache.take(), cache.free, cache.capacity] == [2, 1, 4]
    cache.put_back(1)
    cache.put_back(2)
    assert cache.take() == 1
