"""Launchers that a cluster's manager starts find their place by themselves."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import pytest

from resihp.launch.cluster_environment import NodePlacement, first_host, node_placement
from resihp.launch.options import Options

SLURM = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[07-09],cpu1",
}


SetVariables = Callable[..., None]


@pytest.fixture
def set_variables(monkeypatch: pytest.MonkeyPatch) -> SetVariables:
    """Sets variables of an environment that has none of a cluster."""
    for name in os.environ:
        if name.startswith(("PET_", "SLURM_", "JOB_COMPLETION_INDEX")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(socket, "getfqdn", lambda: "train-1.workers.ns.svc")

    def set_all(**values: str) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_all


def parsed(line: str) -> Options:
    return Options.parse(line.split())


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("a1,b2", "a1"),
        ("n[1-2]", "n1"),
        ("n[001,007-9]-ib,m2", "n001-ib"),
        ("rack[0-1]n[00-15]", "rack0n00"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_a_task_of_a_slurm_step(set_variables: SetVariables) -> None:
    set_variables(**SLURM)
    options = parsed("--nproc-per-node 8 train.py")
    assert (options.node, options.least_nodes, options.nodes) == (1, 4, 4)
    assert (options.host, options.port, options.run) == ("gpu07", 23456, "123456.0")
    elastic = parsed("--nnodes 2:4 --rdzv-endpoint redis://store/0 train.py")
    assert (elastic.node, elastic.least_nodes, elastic.run) == (1, 2, "123456.0")
    assert elastic.store_url == "redis://store/0"
    assert parsed("--rdzv-endpoint head:1 --rdzv-id x train.py").host == "head"


def test_what_the_command_line_says_is_done(set_variables: SetVariables) -> None:
    set_variables(**SLURM)
    by_hand = parsed("--nnodes 2 --node-rank 0 --master-addr h train.py")
    assert (by_hand.node, by_hand.nodes, by_hand.host, by_hand.port) == (0, 2, "h", 29500)
    assert parsed("--standalone train.py").nodes == 1
    assert parsed("--nnodes 1 train.py").node == 0
    set_variables(PET_NODE_RANK="3", PET_NNODES="5")
    assert parsed("--master-addr h train.py").node == 3


@pytest.mark.parametrize("variables", [{}, SLURM])
def test_no_name_server_is_asked_for_what_only_a_pod_needs(
    set_variables: SetVariables, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    set_variables(**variables)
    monkeypatch.setattr(socket, "getfqdn", lambda: pytest.fail("the name server is asked"))
    assert parsed("train.py").node == int(variables.get("SLURM_NODEID", "0"))


def test_a_batch_script_and_a_single_node_start_one_launcher(set_variables: SetVariables) -> None:
    set_variables(**{name: SLURM[name] for name in SLURM if name != "SLURM_STEP_ID"})  # of sbatch
    assert parsed("train.py").nodes == 1
    set_variables(**SLURM)
    set_variables(SLURM_NODEID="0", SLURM_STEP_NUM_NODES="1", SLURM_STEP_NUM_TASKS="1")
    assert (parsed("train.py").nodes, parsed("train.py").port) == (1, 0)


def test_several_launchers_of_one_node_are_refused(
    set_variables: SetVariables, capsys: pytest.CaptureFixture[str]
) -> None:
    set_variables(**SLURM)
    set_variables(SLURM_STEP_NUM_TASKS="32")
    with pytest.raises(SystemExit, match="2"):
        parsed("train.py")
    assert "32 launchers on 4 nodes" in capsys.readouterr().err


def test_a_pod_of_an_indexed_job(set_variables: SetVariables) -> None:
    set_variables(JOB_COMPLETION_INDEX="1")
    options = parsed("--nnodes 2:3 train.py")
    assert (options.node, options.nodes, options.run) == (1, 3, "train")
    assert (options.host, options.port) == ("train-0.workers.ns.svc", 29500)
    assert parsed("train.py").nodes == 1  # no variable tells the number of pods


def test_a_host_that_is_not_named_by_its_index_has_an_index_alone() -> None:
    placement = node_placement({"JOB_COMPLETION_INDEX": "1"}, "host7.example")
    assert placement == NodePlacement(node=1)
    assert node_placement({}, "train-1") is None
