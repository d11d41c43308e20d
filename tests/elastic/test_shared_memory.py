"""Shared-memory transport: equal bytes, a lost peer, or the fallback to sockets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from resihp.contracts import Layout, PeerLostError
from resihp.elastic.models import Llama
from resihp.elastic.process_groups.abortable import ProcessGroupFactory
from resihp.elastic.reshard import host_memory
from resihp.elastic.reshard.exchange import GradientParts, TensorExchange, pairs_of, view_of
from resihp.elastic.reshard.host_memory import (
    IOV_MAX,
    CrossMemoryAttach,
    TensorAddress,
    is_supported,
    read,
    slices,
)
from resihp.elastic.reshard.shared_memory import (
    PeerLink,
    PeerProcess,
    SharedMemoryTransport,
    is_readable,
    place_table,
    probe_peer_memory,
)
from resihp.layout import Move, Param, holdings, moves
from tests.elastic.engine_job import ALONE, GRID, SHAPE, SHIFTED, UNEVEN
from tests.elastic.late_copies import late_device_memory
from tests.elastic.threads import on_ranks

needs_attach = pytest.mark.skipif(not is_supported(), reason="not Linux")
PARAMETERS = Llama(SHAPE).parameters
BYTES = 1 << 16

# Holds zeros; `token` says where a number lies, `forget` overwrites it.
HOLDER = f"""
import ctypes, sys
held, token = ctypes.create_string_buffer({BYTES}), (ctypes.c_int64 * 2)(7, 8)
print(ctypes.addressof(held), ctypes.addressof(token), flush=True)
for line in sys.stdin:
    token[0] = 0
    print(flush=True)
"""


@dataclass
class Holder:
    """A process that holds `BYTES` zeros at `address`."""

    process: subprocess.Popen[str]
    address: int
    token_address: int

    def source(self, token: tuple[int, int] = (7, 8)) -> PeerProcess:
        return PeerProcess(1, CrossMemoryAttach(), (self.process.pid, self.token_address, 8), token)

    def recv(
        self, target: torch.Tensor, slice_bytes: int, *, address: int | None = None
    ) -> tuple[Iterator[int], mock.Mock]:
        """A transfer from this process, and the group in which it told the address."""
        group, told = mock.Mock(), self.address if address is None else address

        def start_broadcast(table: torch.Tensor, source: int) -> None:
            table.copy_(torch.tensor([[self.process.pid, told, 4]]))

        group.start_broadcast = start_broadcast
        memory = CrossMemoryAttach(slice_bytes)
        transport = SharedMemoryTransport(group, 1, memory, self.source(), torch.zeros(2))
        return transport.recv([target]), group

    def forget(self) -> None:
        """Be as another process that has got the same id."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.process.stdout.readline()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=30)


@contextmanager
def a_holder() -> Iterator[Holder]:
    command, pipe = [sys.executable, "-c", HOLDER], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        addresses = map(int, process.stdout.readline().split())
        try:
            yield Holder(process, *addresses)
        finally:
            process.kill()


@st.composite
def two_views(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the same shape on two tensors; each narrow along any dimensions, or transposed."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8]))
    views = []
    for start in (1, -1):
        room = [(draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in shape]
        order = draw(st.permutations(range(len(shape))))
        sizes = [shape[d] + sum(room[d]) for d in order]
        held = (torch.arange(torch.Size(sizes).numel()) % 50 * start).to(dtype).view(sizes)
        view = held.permute([order.index(d) for d in range(len(shape))])
        for dim, (before, _) in enumerate(room):
            view = view.narrow(dim, before, shape[dim])
        views.append(view)
    return views[0], views[1]


@needs_attach
@given(views=two_views(), most=st.integers(1, 200))
def test_what_is_read_is_what_a_slice_would_be(
    views: tuple[torch.Tensor, torch.Tensor], most: int
) -> None:
    source, target = views
    for there, here in slices(target, TensorAddress.of(source), most):
        assert len(there) <= IOV_MAX
        assert len(here) <= IOV_MAX
        due = int(here[:, 1].sum())
        assert due <= most
        assert read(os.getpid(), there, here) == due
    assert target.equal(source)


@needs_attach
def test_what_lies_beside_is_left_alone_and_many_rows_take_several_calls() -> None:
    source, whole = torch.arange(4 * 3000.0).view(3000, 4), torch.zeros(3000, 8)
    calls = list(slices(whole[:, 2:6], TensorAddress.of(source), 1 << 20))
    assert len(calls) == 3
    assert all(len(there) == 1 for there, _ in calls), "what is contiguous there is one stretch"
    for there, here in calls:
        read(os.getpid(), there, here)
    assert whole[:, 2:6].equal(source)
    assert whole.sum() == source.sum()


@needs_attach
def test_a_holder_that_is_killed_in_mid_read_is_lost() -> None:
    target = torch.ones(BYTES // 4)
    with a_holder() as holder:
        reading, _ = holder.recv(target, BYTES // 4)
        assert next(reading) == BYTES // 4
        holder.kill()
        with pytest.raises(PeerLostError, match="lost rank 1"):
            next(reading)


@needs_attach
def test_a_holder_whose_memory_ends_is_lost() -> None:
    with a_holder() as holder:
        reading, _ = holder.recv(torch.ones(4), BYTES, address=0)
        with pytest.raises(PeerLostError, match="lost rank 1"):
            list(reading)


@needs_attach
def test_what_a_process_with_the_same_id_holds_is_not_taken() -> None:
    """All bytes were read, but from whom is not certain any more."""
    target = torch.ones(BYTES // 4)
    with a_holder() as holder:
        assert sum(holder.recv(target, BYTES)[0]) == BYTES
        assert not target.any()
        reading, _ = holder.recv(target, BYTES)
        assert next(reading) == BYTES
        holder.forget()
        with pytest.raises(PeerLostError, match="another process"):
            next(reading)


@needs_attach
def test_reading_ends_between_two_slices_when_the_world_is_given_up() -> None:
    with a_holder() as holder:
        reading, group = holder.recv(torch.ones(8), 16)
        next(reading)
        group.check_aborted.side_effect = PeerLostError("given up")
        with pytest.raises(PeerLostError, match="given up"):
            next(reading)


@needs_attach
def test_a_foreign_process_is_not_read() -> None:
    """The number is somewhere else, or another one: a process of another host, or none."""
    with a_holder() as holder:
        holder.source().check()
        with pytest.raises(OSError, match="another process"):
            holder.source(token=(7, 9)).check()
        with pytest.raises(OSError, match=r"\S"):
            replace(holder.source(), place=(holder.process.pid, 8, 8)).check()
        holder.kill()
        with pytest.raises(OSError, match="No such process"):
            holder.source().check()


def meet(wanted: tuple[bool, bool]) -> dict[int, PeerLink]:
    def work(factory: ProcessGroupFactory) -> PeerLink:
        group = factory.group("pair", (0, 1))
        return probe_peer_memory(group, factory.rank, attach=wanted[factory.rank])

    return on_ranks((0, 1), work)


@needs_attach
def test_two_ranks_read_each_other_if_both_enable_it() -> None:
    assert all(set(link.memory) == {0, 1} for link in meet((True, True)).values())
    for wanted in [(True, False), (False, False)]:
        assert not any(link.memory for link in meet(wanted).values())


def test_without_the_system_call_no_memory_is_read() -> None:
    with mock.patch.object(host_memory, "_process_vm_readv", return_value=None):
        assert not any(link.memory for link in meet((True, True)).values())


@needs_attach
def test_who_may_not_read_may_still_be_read(caplog: pytest.LogCaptureFixture) -> None:
    """Refused is what one of the two asks for; so the other learns that it has to send."""
    original = PeerProcess.check

    def check(source: PeerProcess) -> None:
        if source.rank == 1:
            raise PermissionError("Operation not permitted")
        original(source)

    caplog.set_level("DEBUG", "resihp.elastic")
    with mock.patch.object(PeerProcess, "check", check):
        met = meet((True, True))
    assert [set(met[rank].memory) for rank in (0, 1)] == [{0}, {0}]
    assert "rank 0 does not read rank 1's memory: Operation not permitted" in caplog.text


CHANGES = [(GRID, UNEVEN), (UNEVEN, SHIFTED), (GRID, ALONE)]


@pytest.mark.parametrize("apart", [(), (0,), tuple(range(8))])
@pytest.mark.parametrize(("old", "new"), CHANGES)
def test_ranges_arrive_whoever_is_on_the_same_host(
    old: Layout, new: Layout, apart: tuple[int, ...]
) -> None:
    check_ranges(old, new, apart)


def test_ranges_arrive_from_device_to_device() -> None:
    with late_device_memory():
        check_ranges(*CHANGES[0], apart=(0,))


def check_ranges(old: Layout, new: Layout, apart: tuple[int, ...]) -> None:
    """Ranks of `apart` are alone on their hosts. Rows of all lengths, so that some are sent."""
    planned = moves(old, new, PARAMETERS)
    assert len({is_readable(move) for move in planned}) == 2
    before, after = holdings(old, PARAMETERS), holdings(new, PARAMETERS)
    copies = 2

    def work(factory: ProcessGroupFactory) -> int:
        rank, pairs = factory.rank, {}
        for pair in pairs_of(planned, rank):
            group = factory.group("pair", pair)
            pairs[pair] = probe_peer_memory(group, rank, attach=rank not in apart)
        numbers: list[int] = []
        exchange = TensorExchange(pairs, rank, buffer_bytes=4096, on_transfer=numbers.append)
        held, due = (ranges.get(rank, {}) for ranges in (before, after))
        giver, taker = (
            GradientParts(
                [{(p, span): fill(p, span, copy) for p, span in ranges.items()} for copy in which]
            )
            for ranges, which in ((held, (1, 2)), (due, (0, 0)))
        )
        received = exchange.run(planned, copies, view_of(giver), view_of(taker))
        for move in (move for move in planned if move.target == rank):
            start = move.start - due[move.param][0]
            for copy, part in enumerate(taker.parts):
                found = part[move.param, due[move.param]]
                found = found.narrow(move.param.dim or 0, start, move.stop - move.start)
                assert found.equal(fill(move.param, (move.start, move.stop), copy + 1)), move
        factory.group("end", tuple(range(8))).all_reduce(torch.zeros(1))  # as a vote would
        assert numbers == list(range(len(numbers)))
        return received

    received = on_ranks(tuple(range(8)), work)
    for rank, count in received.items():
        due = sum(move.numel for move in planned if move.target == rank)
        assert count == 4 * copies * due


def fill(param: Param, span: tuple[int, int], copy: int) -> torch.Tensor:
    """Rows `span` of a tensor that is another one for each `copy`; zeros for 0."""
    whole = torch.arange(float(param.size * param.row_numel)).view(param.shape) + 0.5
    return (whole * copy).narrow(param.dim or 0, span[0], span[1] - span[0]).clone()


def test_short_rows_that_lie_apart_are_sent() -> None:
    wide, tall = Param("layers.0.w", (64, 4096), 1), Param("layers.0.v", (4096, 2), 0)
    assert is_readable(Move(wide, 0, 64, 0, 1))
    assert not is_readable(Move(wide, 0, 63, 0, 1))
    assert is_readable(Move(tall, 0, 1, 0, 1)), "one row is one stretch"
    assert is_readable(Move(replace(wide, dim=None), 0, 1, 0, 1))


def test_a_table_tells_where_views_lie() -> None:
    whole = torch.zeros(4, 6)
    flat, narrow = whole[2], whole[:, 1:3]
    assert place_table(CrossMemoryAttach(), [flat, narrow]).tolist() == [
        [os.getpid(), whole.data_ptr() + 48, 4, 0],
        [os.getpid(), whole.data_ptr() + 4, 24, 4],
    ]
