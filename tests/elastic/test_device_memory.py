"""Device memory of another process, with a stand-in for the device: values, order, mappings."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from hypothesis import given

from resihp.contracts import PeerLostError
from resihp.elastic.process_groups.abortable import ProcessGroupFactory
from resihp.elastic.reshard import device_memory
from resihp.elastic.reshard.device_memory import CudaIpc, tensor_at
from resihp.elastic.reshard.shared_memory import PeerLink, memory_of, probe_peer_memory
from tests.elastic.late_copies import LateDriver, late_device_memory
from tests.elastic.test_shared_memory import two_views
from tests.elastic.threads import on_ranks

HERE = torch.device("cpu")


def a_memory() -> tuple[CudaIpc, LateDriver]:
    driver = LateDriver()
    return CudaIpc(HERE, driver), driver


def unmapped() -> None:
    """Wait until what nobody refers to is let go."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "resihp-unmap":
            thread.join(30)


@pytest.fixture
def drivers() -> Iterator[list[LateDriver]]:
    with late_device_memory() as drivers:
        yield drivers


@given(views=two_views())
def test_what_is_read_is_what_a_slice_would_be(views: tuple[torch.Tensor, torch.Tensor]) -> None:
    source, target = views
    memory, _ = a_memory()
    assert sum(memory.read([target], [memory.place(source)])) == target.nbytes
    assert target.equal(source)


def test_a_tensor_on_foreign_memory_is_forgotten_with_it() -> None:
    source = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    there = tensor_at(source.data_ptr(), [2, 6, 99], torch.empty(3, 2, dtype=torch.bfloat16))
    assert there.equal(source.t())
    assert there.stride() == (1, 3)
    view = there[1]
    del there
    assert len(device_memory._managed) == 1
    del view
    assert not device_memory._managed


def test_bytes_are_told_once_they_are_there() -> None:
    memory, _ = a_memory()
    source, target = torch.ones(4), torch.zeros(4)
    told = []
    for count in memory.read([target], [memory.place(source)]):
        told.append(count)
        assert target.equal(source) == bool(count)
    assert told == [0, 0, 16]


def test_an_allocation_is_mapped_once_and_let_go_with_the_memory() -> None:
    memory, driver = a_memory()
    source = torch.arange(8.0)
    for part in source.split(4):
        sum(memory.read([torch.zeros(4)], [memory.place(part)]))
    assert set(driver.opened.values()) == {1}
    started = memory.read([torch.zeros(8)], [memory.place(source)])
    assert next(started) == 0
    del started, memory
    unmapped()
    assert set(driver.opened.values()) == {0}, "after the copies that had been started"


def probed(factory: ProcessGroupFactory) -> PeerLink:
    return probe_peer_memory(factory.group("pair", (0, 1)), factory.rank, attach=True)


def test_two_ranks_read_each_other(drivers: list[LateDriver]) -> None:
    links = on_ranks((0, 1), probed)
    assert [set(link.memory) for link in links.values()] == [{0, 1}, {0, 1}]
    del links
    unmapped()
    assert [set(driver.opened.values()) for driver in drivers] == [{0}, {0}]


def test_memory_that_cannot_be_exported_is_sent(drivers: list[LateDriver]) -> None:
    """As under `expandable_segments`."""
    with mock.patch.object(LateDriver, "export", side_effect=OSError("INVALID_VALUE")):
        assert not any(link.memory for link in on_ranks((0, 1), probed).values())


def test_memory_that_torch_cannot_take_is_sent(drivers: list[LateDriver]) -> None:
    with mock.patch.object(LateDriver, "copy", side_effect=RuntimeError("no such DLPack")):
        assert not any(link.memory for link in on_ranks((0, 1), probed).values())


def test_who_may_not_map_may_still_be_read(
    drivers: list[LateDriver], caplog: pytest.LogCaptureFixture
) -> None:
    original, refused = LateDriver.open, list[LateDriver]()

    def open_(driver: LateDriver, handle: bytes) -> int:
        if driver is drivers[0]:
            refused.append(driver)
            raise OSError("cuIpcOpenMemHandle_v2: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED (217)")
        return original(driver, handle)

    caplog.set_level("DEBUG", "resihp.elastic")
    with mock.patch.object(LateDriver, "open", open_):
        links = on_ranks((0, 1), probed)
    assert refused
    assert sorted(len(link.memory) for link in links.values()) == [1, 1]
    assert len({rank for link in links.values() for rank in link.memory}) == 1
    assert "PEER_ACCESS_UNSUPPORTED" in caplog.text


def test_a_later_allocation_that_cannot_be_exported_ends_the_transfer(
    drivers: list[LateDriver],
) -> None:
    def work(factory: ProcessGroupFactory) -> None:
        link = probed(factory)
        if factory.rank == 0:
            with (
                mock.patch.object(LateDriver, "export", side_effect=OSError("INVALID_VALUE")),
                pytest.raises(PeerLostError, match=r"no peer can read .* INVALID_VALUE"),
            ):
                link.memory[0].send([torch.ones(3)])

    on_ranks((0, 1), work)


def test_nothing_of_a_device_is_asked_for_on_a_host() -> None:
    assert memory_of(torch.device("cpu")).words == 2
