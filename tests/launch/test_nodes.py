"""Nodes that are lost, leave and come: the others restart without them, or with those that wait.

Launchers of one machine stand for nodes.
"""

from __future__ import annotations

import errno
import re
import signal
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from resihp.contracts import JobStoppedError
from resihp.elastic.rendezvous.store import address_towards, host_store
from resihp.launch.supervisor import main
from tests.elastic.engine_job import is_running
from tests.launch.launchers import launchers


def test_nodes_are_lost_leave_and_are_replaced(tmp_path: Path) -> None:
    """Two nodes of 2 and 1 ranks and two spares: a spare dies, a node is lost, one leaves.

    Its rank ends when the others have made a step without it.
    """
    (tmp_path / "late-1-2").touch()
    with launchers(tmp_path) as job:
        job.start(0, "--nproc-per-node", "2")
        job.start(1)
        pids = job.runs(0, 3)
        file = str(tmp_path / "notice")
        job.start(2, "--preemption-file", file, "--shutdown-timeout", "300")
        job.until(lambda: "waits as a standby" in job.log(2))
        job.start(3)
        job.until(lambda: "waits as a standby" in job.log(3))
        job.kill(3)
        job.kill(1)
        job.until(lambda: not is_running(pids[2]))
        job.runs(1, 3)
        assert "node 1 was lost: restart" in job.log(0)
        job.until(lambda: "attempt 1 begins, with ranks [2]" in job.log(2))
        (tmp_path / "notice").write_text("maintenance")
        # The spare that died within the last heartbeat may be taken first, and cost a restart.
        job.until(lambda: job.has_run(2, 2) or job.has_run(3, 2))
        assert job.status(2) == 128 + signal.SIGTERM, job.logs()
        assert re.search(
            r"found \S+notice: maintenance: this node leaves the job$", job.log(2), re.M
        )
        assert "node 2 leaves the job (found" in job.log(0)
        (tmp_path / "finish").touch()
        assert job.status(0) == 0, job.logs()
        restarts = 3 if "node 3 was lost" in job.log(0) else 2
        assert job.log(0).count(": restart") == restarts


def test_the_job_ends_with_fewer_nodes_than_it_needs(tmp_path: Path) -> None:
    """The launcher that is stopped for too long learns that it was given up."""
    with launchers(tmp_path) as job:
        job.start(0, nodes="2")
        job.start(1, nodes="2")
        pids = job.runs(0, 2)
        job.stop(1, signal.SIGSTOP)
        assert job.status(0) == 69, job.logs()
        assert "node 1 was lost: 1 of at least 2 nodes is left: the job ends" in job.log(0)
        job.stop(1, signal.SIGCONT)
        assert job.status(1) != 0, job.logs()
        job.until(lambda: not any(map(is_running, pids)))


def test_a_notice_at_node_0_ends_the_job_on_all(tmp_path: Path) -> None:
    with launchers(tmp_path) as job:
        job.start(0)
        job.start(1)
        pids = job.runs(0, 2)
        job.stop(0, signal.SIGUSR1)
        job.until(lambda: "got SIGUSR1" in job.log(0))  # of two at once either may come first
        job.stop(0, signal.SIGTERM)  # the second notice changes nothing
        assert job.status(0) == 128 + signal.SIGUSR1, job.logs()
        assert job.status(1) == 128 + signal.SIGTERM, job.logs()
        for node in (0, 1):
            assert "node 0 leaves the job (got SIGUSR1): the job ends" in job.log(node)
        assert not any(map(is_running, pids))


def test_a_port_that_is_taken_is_said_in_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        store = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main(["--rdzv-endpoint", store, __file__]) == 69
    assert f"no store can be hosted at {store}: [Errno {errno.EADDRINUSE}]" in caplog.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_launcher_that_waits_for_node_0_is_interrupted_in_a_line(
    tmp_path: Path, number: signal.Signals
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]  # nobody listens there from now on
    with launchers(tmp_path) as job:
        job.store = f"127.0.0.1:{port}"
        job.start(1)
        job.until(lambda: "waiting for the store" in job.log(1))
        job.stop(1, number)
        assert job.status(1) == 128 + number, job.log(1)
        assert f"got {number.name}: this node has not joined the job" in job.log(1)
        assert "Traceback" not in job.log(1)


@pytest.mark.parametrize("is_known_at_last", [True, False])
def test_the_name_of_the_stores_host_may_be_late(
    monkeypatch: pytest.MonkeyPatch, is_known_at_last: bool
) -> None:
    """As that of the first pod, which waits for its own."""
    asked: list[str] = []

    def look_up(host: str, *arguments: Any, **named: Any) -> Any:
        asked.append(host)
        if len(asked) < 3 or not is_known_at_last:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known(host, *arguments, **named)

    known = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    if is_known_at_last:
        assert host_store("127.0.0.1", 0, timedelta(minutes=1)).port
    else:
        with pytest.raises(JobStoppedError, match=r"hosted at node-0:1: .*not known"):
            host_store("node-0", 1, timedelta(seconds=0.3))
        with pytest.raises(JobStoppedError, match=r"no route to node-0:1: .*not known"):
            address_towards("node-0", 1)
    assert len(asked) >= 3


@pytest.mark.parametrize(
    ("host", "has_route", "address"),
    [
        ("node-0", True, "10.0.0.5"),
        ("node-0", False, "127.0.1.1"),
        ("localhost", True, "127.0.1.1"),
        ("127.0.1.1", True, "127.0.1.1"),
    ],
)
def test_other_nodes_are_told_no_loopback_address(
    monkeypatch: pytest.MonkeyPatch, host: str, has_route: bool, address: str
) -> None:
    """As of a node whose `/etc/hosts` has `127.0.1.1 node-0`."""

    class Probe(socket.socket):
        def connect(self, towards: Any) -> None:
            is_elsewhere = towards[0] == "192.0.2.1"
            self.source = "10.0.0.5" if is_elsewhere else "127.0.1.1"
            if is_elsewhere and not has_route:
                raise OSError(errno.ENETUNREACH, "Network is unreachable")

        def getsockname(self) -> Any:
            return (self.source, 1)

    found = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 1))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(socket, "socket", Probe)
    assert address_towards(host, 1) == address
