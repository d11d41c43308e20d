"""Nodes and ranks of attempts: who takes part, in which order, and who is lost."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from resihp import __version__
from resihp._preemption import PreemptionNotice
from resihp.contracts import JobStoppedError, from_json, to_json
from resihp.elastic.rendezvous.store import connect_store, host_store
from resihp.launch.attempts import (
    Attempt,
    AttemptEnd,
    EndKind,
    JobEnd,
    JobIdentity,
    NodeOffer,
    place,
)
from resihp.launch.launcher_store import LauncherStore
from resihp.launch.nodes import Nodes
from resihp.launch.options import Options
from resihp.launch.restart_policy import Failure

OFFERS = st.lists(st.integers(0, 4), min_size=1, max_size=6).map(
    lambda ranks: [NodeOffer(f"{i}", i, tuple(range(count))) for i, count in enumerate(ranks)]
)


@given(OFFERS, st.integers(1, 4), st.data())
def test_ranks_are_numbered_without_gaps_and_members_come_first(
    offers: list[NodeOffer], most: int, data: st.DataObject
) -> None:
    ids = [offer.id for offer in offers]
    before = data.draw(st.lists(st.sampled_from(ids), unique=True))
    nodes = place(offers, before=before, most=most)
    assert [rank for node in nodes for rank in node.ranks] == list(range(sum(map(size, nodes))))
    useful = [launcher for launcher in before if offers[int(launcher)].local_ranks]
    assert [node.id for node in nodes][: len(useful)] == useful[:most]
    assert len(nodes) == min(most, sum(bool(offer.local_ranks) for offer in offers))


@given(OFFERS, st.data())
def test_ranks_that_are_left_out_take_no_part(offers: list[NodeOffer], data: st.DataObject) -> None:
    without = {
        offer.id: data.draw(st.sets(st.sampled_from(offer.local_ranks)))
        for offer in offers
        if offer.local_ranks
    }
    nodes = place(offers, most=len(offers), left_out=without)
    kept = {(node.id, rank) for node in nodes for rank in node.local_ranks}
    offered = {(offer.id, rank) for offer in offers for rank in offer.local_ranks}
    assert kept == {(launcher, r) for launcher, r in offered if r not in without[launcher]}


def size(node: object) -> int:
    return len(node.local_ranks)  # type: ignore[attr-defined]


def test_a_node_that_leaves_makes_room_for_a_standby() -> None:
    offers = [NodeOffer(name, i, (0,)) for i, name in enumerate("abc")]
    offers[1] = replace(offers[1], leaves=True)
    assert [node.id for node in place(offers, before=["a", "b"], most=2)] == ["a", "c"]


def test_documents_survive_the_store() -> None:
    nodes = place([NodeOffer("a", 0, (0, 2), least=2)], most=1)
    attempt = Attempt(3, 29500, nodes, "rank 1 failed", "{}")
    assert from_json(Attempt, to_json(attempt)) == attempt
    end = AttemptEnd(EndKind.FAILURE, "node 1 was lost", Failure(3, 2, -9, node=1))
    assert from_json(AttemptEnd, to_json(end)) == end


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_joiner_waits_for_the_first_attempt(has_ended: bool) -> None:
    """The launcher that hosts the store is not ready yet."""
    limit, host = timedelta(minutes=1), "127.0.0.1"
    server = host_store(host, 0, limit)
    store = f"{host}:{server.port}"
    options = Options.parse(["--join", "2", "--rdzv-endpoint", store, "script.py"])
    others = LauncherStore(dist.PrefixStore("resihp-run", connect_store(host, server.port, limit)))
    others.identify(JobIdentity("run7", __version__))
    nodes = Nodes(options, PreemptionNotice())
    assert nodes.run == "run7"
    attempt = Attempt(0, server.port, place([NodeOffer("a", 0, (0, 1))], most=1))
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(nodes.begin, NodeOffer("b", 1, (0,)), bool)
        with pytest.raises(TimeoutError):
            begun.result(0.5)
        others.publish(0, JobEnd(0, "completed") if has_ended else attempt)
        if not has_ended:
            assert begun.result(60) == attempt
        else:
            with pytest.raises(JobStoppedError, match="the job has ended"):
                begun.result(60)


@pytest.mark.parametrize(
    ("options", "version", "words"),
    [
        ("--nnodes 2 --node-rank 1 --rdzv-id run7", __version__, ""),
        ("--nnodes 2 --node-rank 1", __version__, ""),
        ("--nnodes 2 --node-rank 1 --rdzv-id run8", __version__, "job 'run7', not 'run8'"),
        ("--join 2 --rdzv-id run8", __version__, "job 'run7', not 'run8'"),
        ("--nnodes 2 --node-rank 1", "0.0", "launchers of the job 'run7' have ResiHP 0.0, this"),
        ("--join 2 --heartbeat 1", "", "no launcher has said whose store 127.0.0.1:"),
    ],
)
def test_a_launcher_of_another_job_or_version_is_refused(
    options: str, version: str, words: str
) -> None:
    """Before it announces itself; one that is not told its job is of that of the store."""
    server = host_store("127.0.0.1", 0, timedelta(minutes=1))
    store = LauncherStore(dist.PrefixStore("resihp-run", server))
    if version:
        store.identify(JobIdentity("run7", version))
    line = f"{options} --rdzv-endpoint 127.0.0.1:{server.port} script.py"
    if not words:
        nodes = Nodes(Options.parse(line.split()), PreemptionNotice())
        assert nodes.run == "run7"
        nodes.close()
        return
    with pytest.raises(JobStoppedError, match=words):
        Nodes(Options.parse(line.split()), PreemptionNotice())
    assert store.announced() == []
