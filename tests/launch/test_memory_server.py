"""State of a lost node in the memory of the next one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from resihp.checkpoint import Checkpointer, IndependentRank, NodeMemory
from resihp.checkpoint.levels.host_memory import ImageStore
from resihp.checkpoint.levels.peer_server import PeerServer
from resihp.contracts import CheckpointError
from resihp.contracts.node_memory import MEMORY_SERVERS, NODE_MEMORY, MemoryServers
from resihp.launch.memory_server import FolderImages, serve_memory

TOKEN, NODES, SIZE = "secret", 3, 3000
State = dict[str, torch.Tensor]


class MemoryNode:
    """One node with one rank: its folder, its launcher's server, and what its rank holds."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder = rank, folder
        folder.mkdir()
        self.server: PeerServer = serve_memory(folder, "127.0.0.1")
        self.server.token = TOKEN
        self.state = {f"weight-{rank}": torch.zeros(SIZE), "step": torch.zeros(1)}
        if rank:
            del self.state["step"]

    def level(self, patch: pytest.MonkeyPatch, nodes: list[MemoryNode]) -> NodeMemory:
        """The level as its rank builds it in a job of these nodes."""
        after = nodes[(nodes.index(self) + 1) % len(nodes)]
        servers = MemoryServers(
            token=TOKEN,
            servers=tuple(node.server.address for node in nodes),
            target=after.server.address if after is not self else None,
            timeout_s=30.0,
        )
        given = {NODE_MEMORY: str(self.folder), "RANK": str(self.rank), "LOCAL_RANK": "0"}
        for name, value in {**given, "LOCAL_WORLD_SIZE": "1", **servers.to_environment()}.items():
            patch.setenv(name, value)
        return NodeMemory()

    def lose(self) -> None:
        self.server.close()
        for path in sorted(self.folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[MemoryNode]]:
    """Nodes whose ranks have saved four steps."""
    found = [MemoryNode(rank, tmp_path / f"node-{rank}") for rank in range(NODES)]
    savers = [saver_of(node, found, monkeypatch) for node in found]
    for step in range(4):
        save(step, found, savers)
    for saver in savers:
        saver.close()
    yield found
    for node in found:
        node.server.close()


def saver_of(
    node: MemoryNode, nodes: list[MemoryNode], patch: pytest.MonkeyPatch, run: str = "run"
) -> Checkpointer:
    ranks = IndependentRank(node.rank, range(len(nodes)), run)
    return Checkpointer([node.level(patch, nodes)], ranks=ranks)


def save(step: int, nodes: list[MemoryNode], savers: list[Checkpointer]) -> None:
    for node, saver in zip(nodes, savers, strict=True):
        for value in node.state.values():
            value.fill_(step + node.rank / 10)
        saver.save(step, node.state)
        assert saver.wait(300)


def empty() -> State:
    """State of all ranks, as another layout may hold it on one."""
    return {**{f"weight-{r}": torch.empty(SIZE) for r in range(NODES)}, "step": torch.empty(1)}


def assert_restored(level: NodeMemory, step: int) -> None:
    state = empty()
    assert Checkpointer([level]).restore(state).step == step
    for rank in range(NODES):
        assert state[f"weight-{rank}"].eq(torch.tensor(step + rank / 10)).all()


def test_every_node_reads_what_all_have_written(
    nodes: list[MemoryNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    for node in nodes:
        assert_restored(node.level(monkeypatch, nodes), 3)


@pytest.mark.parametrize("lost", range(NODES))
def test_without_any_one_node_nothing_is_lost(
    lost: int, nodes: list[MemoryNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes[lost].lose()
    for node in nodes:
        if node.rank != lost:
            assert_restored(node.level(monkeypatch, nodes), 3)


def test_a_node_that_comes_anew_reads_too(
    nodes: list[MemoryNode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes[1].lose()
    spare = MemoryNode(7, tmp_path / "spare")
    assert_restored(spare.level(monkeypatch, [nodes[0], nodes[2], spare]), 3)
    spare.server.close()


def test_a_damaged_file_of_this_node_gives_way_to_the_copy(
    nodes: list[MemoryNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = nodes[1].folder / "step-000000003" / "__1_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    assert_restored(nodes[1].level(monkeypatch, nodes), 3)


def test_what_two_nodes_held_is_said_to_be_lost(
    nodes: list[MemoryNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes[1].lose()
    nodes[2].lose()
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        Checkpointer([nodes[0].level(monkeypatch, nodes)]).restore(empty())


def test_a_step_that_one_node_has_not_reached_is_passed_over(
    nodes: list[MemoryNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node is lost while the others are one step ahead."""
    savers = [saver_of(node, nodes, monkeypatch, "later") for node in nodes]
    save(4, nodes, savers)
    save(5, nodes[:1] + nodes[2:], savers[:1] + savers[2:])
    nodes[1].lose()
    assert_restored(nodes[0].level(monkeypatch, nodes), 4)
    for saver in savers:
        saver.close()


def test_a_part_of_a_checkpoint_is_none(
    nodes: list[MemoryNode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node is lost before any copy of its file: what the others hold is not the state."""
    pair = [MemoryNode(rank, tmp_path / f"first-{rank}") for rank in range(2)]
    save(0, pair[:1], [saver_of(pair[0], pair, monkeypatch)])
    pair[1].lose()
    left = pair[0].level(monkeypatch, pair[:1])
    assert (pair[0].folder / "step-000000000").is_dir()
    assert Checkpointer([left]).newest_step() is None
    with pytest.raises(CheckpointError, match="nothing there"):
        Checkpointer([left]).restore(empty())
    pair[0].server.close()


def test_a_next_node_that_is_gone_costs_the_copy_alone(
    nodes: list[MemoryNode], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    savers = [saver_of(node, nodes, monkeypatch, "later") for node in nodes]
    nodes[1].server.close()
    save(4, nodes, savers)
    save(5, nodes, savers)
    assert [saver.counters.failures for saver in savers] == [{}] * NODES
    assert sum("no copy of step" in record.getMessage() for record in caplog.records) == 1
    for node, saver in zip(nodes, savers, strict=True):
        assert (node.folder / "step-000000005").is_dir()
        saver.close()


def test_a_next_node_that_comes_back_gets_the_next_copy(
    nodes: list[MemoryNode], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saver = saver_of(nodes[0], nodes, monkeypatch, "later")
    save(4, nodes[:1], [saver])
    nodes[1].server.close()
    images = ImageStore(1)
    own = FolderImages(nodes[1].folder)
    nodes[1].server = PeerServer(images, own, nodes[1].server.address, TOKEN, 60.0)
    save(5, nodes[:1], [saver])
    assert [(index.rank, index.step) for index in images.indexes()] == [(0, 5)]
    assert caplog.messages == []
    saver.close()


def test_a_copy_that_was_damaged_on_its_way_is_refused(
    nodes: list[MemoryNode], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saver = saver_of(nodes[0], nodes, monkeypatch, "later")
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, n, at: bytes(n) if at == 0 else pread(fd, n, at))
    save(4, nodes[:1], [saver])
    monkeypatch.setattr(os, "pread", pread)
    assert any("no copy of step 4" in record.getMessage() for record in caplog.records)
    assert_restored(nodes[2].level(monkeypatch, nodes), 3)
    saver.close()


def test_a_stranger_without_the_token_learns_nothing(
    nodes: list[MemoryNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    level = nodes[0].level(monkeypatch, nodes)
    document = json.loads(os.environ[MEMORY_SERVERS]) | {"token": "guessed"}
    monkeypatch.setenv(MEMORY_SERVERS, json.dumps(document))
    assert NodeMemory().checkpoints() == []
    assert [one.step for one in level.checkpoints()] != []
