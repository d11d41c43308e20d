"""Ordinary loops of four processes under `resihp.instrument`, with a rank that turns slow."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from resihp.client import Client
from resihp.contracts import ServiceError, Status, Verdict
from resihp.testing.local_ranks import LocalRanks
from resihp.testing.ordinary_loops import (
    LOOPS,
    DocumentLengths,
    OrdinaryLoop,
    PacedLinks,
    SlowRank,
    run_loop,
)
from service.launch import Sidecar
from tests.service.forked_sidecar import ForkedSidecar

PATIENCE_S = 250.0
NOISE = 2.0
"""Slowdown that a healthy rank may have; that of the slow one is 3."""
LAYOUTS = {
    "ddp": [[[0]], [[1]], [[2]], [[3]]],
    "fsdp2": [[[0]], [[1]], [[2]], [[3]]],
    "hsdp": [[[0]], [[1]], [[2]], [[3]]],
    "tensor_parallel": [[[0, 1]], [[2, 3]]],
    "1f1b": [[[0], [2]], [[1], [3]]],
    "interleaved": [[[0], [2]], [[1], [3]]],
    "zero_bubble": [[[0], [2]], [[1], [3]]],
}


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory) -> Iterator[Sidecar]:
    with ForkedSidecar(tmp_path_factory.mktemp("sidecar")) as sidecar:
        yield sidecar


def train_until_named(sidecar: Sidecar, folder: Path, loop: OrdinaryLoop) -> str:
    """Train until the slow rank is named, and no other was for it, and there is advice on it;
    return the log of rank 0.

    Others may lose speed to whatever else this machine runs; a rank that is blamed for waiting
    would be as slow as the one that it waits for.
    """
    client, stop = Client(sidecar.url), folder / "stop"
    with LocalRanks(loop.job, folder / "ranks") as ranks:
        ranks.start(range(loop.ranks), run_loop, loop, stop)
        deadline = time.monotonic() + PATIENCE_S
        named: dict[int, Verdict] = {}
        while loop.slow.rank not in named:
            ranks.poll(0.2)
            assert not any(ranks.exit_codes.values()), ranks.logs()
            assert time.monotonic() < deadline, ranks.logs()
            with contextlib.suppress(ServiceError):  # the job is registered after its first step
                verdicts = client.verdicts(loop.job)
                named |= {each.rank: each for each in verdicts if each.status is Status.FAIL_SLOW}
            others = [named[rank] for rank in named.keys() - {loop.slow.rank}]
            assert all(each.slowdown < NOISE for each in others), others
        while (advice := client.advice(loop.job)) is None or loop.slow.rank not in advice.ranks:
            ranks.poll(0.2)
            assert time.monotonic() < deadline, ranks.logs()
        plan = client.plan(loop.job)
        assert plan is not None
        assert plan.version == 0, "such a loop can take on no plan"
        stop.touch()
        assert set(ranks.wait(PATIENCE_S).values()) == {0}, ranks.logs()
        return ranks.log(0).read_text()


@pytest.mark.parametrize("kind", LOOPS)
def test_slow_rank_is_named(sidecar, tmp_path, kind):
    count = 4 if len(LAYOUTS[kind][0]) > 1 else 1
    loop = OrdinaryLoop(
        kind,
        steps=10_000,
        slow=SlowRank(1, 3.0, since=15),
        pace=4.0,  # long against what a busy machine adds to each pass
        documents=DocumentLengths(3),
        microbatches=count,
        url=sidecar.url,
        job=f"loop-{kind}",
    )
    log = train_until_named(sidecar, tmp_path, loop)
    replicas = [[str(tuple(stage)) for stage in replica] for replica in LAYOUTS[kind]]
    assert re.findall(r"ranks=(\([^)]*\))", log) == [one for many in replicas for one in many]
    assert f"microbatches={count * len(replicas)}," in log
    assert "failures=0" in log


def test_slow_link_between_stages_is_named_and_no_rank(sidecar, tmp_path):
    loop = OrdinaryLoop(
        "1f1b",
        steps=10_000,
        pace=4.0,
        documents=DocumentLengths(3),
        microbatches=4,
        url=sidecar.url,
        job="loop-link",
        links=PacedLinks(ms=8.0, slow=(1, 3), factor=4.0, since=15),
    )
    client, stop = Client(sidecar.url), tmp_path / "stop"
    with LocalRanks(loop.job, tmp_path / "ranks") as ranks:
        ranks.start(range(loop.ranks), run_loop, loop, stop)
        deadline, named = time.monotonic() + PATIENCE_S, set()
        while (1, 3) not in named:
            ranks.poll(0.2)
            assert not any(ranks.exit_codes.values()), ranks.logs()
            assert time.monotonic() < deadline, ranks.logs()
            with contextlib.suppress(ServiceError):  # the job is registered after its first step
                links = client.links(loop.job)
                named |= {link.ends for link in links if link.status is Status.FAIL_SLOW}
        blamed = [v for v in client.verdicts(loop.job) if v.status is Status.FAIL_SLOW]
        assert all(verdict.slowdown < NOISE for verdict in blamed), blamed
        stop.touch()
        assert set(ranks.wait(PATIENCE_S).values()) == {0}, ranks.logs()
        assert "failures=0" in ranks.log(0).read_text()
