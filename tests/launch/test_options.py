"""Command lines that people have for torchrun."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from resihp.cli import _run
from resihp.launch.options import Command, Options
from resihp.launch.supervisor import main


@pytest.fixture(autouse=True)
def _no_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NNODES", "NPROC_PER_NODE", "NODE_RANK", "RDZV_ENDPOINT"):
        monkeypatch.delenv(f"PET_{name}", raising=False)


def parsed(line: str) -> Options:
    return Options.parse(line.split())


def test_one_node_needs_a_script_alone() -> None:
    options = parsed("train.py --lr 1e-3 -m x")
    assert options.command == Command("train.py", "script", ("--lr", "1e-3", "-m", "x"))
    assert (options.nodes, options.node, options.processes, options.port) == (1, 0, 1, 0)
    assert options.max_restarts is None


def test_the_command_line_of_torchtitan() -> None:
    options = parsed(
        "--nproc_per_node=8 --rdzv_backend c10d --rdzv_endpoint=localhost:0 "
        "--local-ranks-filter 0 --role rank --tee 3 -m torchtitan.train --module llama3"
    )
    assert options.command == Command("torchtitan.train", "module", ("--module", "llama3"))
    assert (options.processes, options.host, options.port) == (8, "localhost", 0)
    output = options.output
    assert output.is_written(5, 1)
    assert output.is_written(5, 2)
    assert [output.is_shown(rank, 1) for rank in (0, 5)] == [True, False]


def test_several_nodes() -> None:
    options = parsed("--nnodes 1:4 --node-rank 3 --master-addr n0 --master-port 1234 t.py")
    assert (options.nodes, options.node, options.host, options.port) == (4, 3, "n0", 1234)
    assert options.least_nodes == 1
    spare = parsed("--nnodes 2 --node-rank 2 --master-addr h --heartbeat 2.5 t.py")
    assert (spare.least_nodes, spare.nodes, spare.node) == (2, 2, 2)
    assert spare.heartbeat.total_seconds() == 2.5
    assert parsed("--nnodes 2 --rdzv-endpoint [::1] t.py").port == 29500
    assert parsed("--nnodes 2 --rdzv-endpoint [::1]:5 t.py").host == "::1"


@pytest.mark.parametrize(
    ("line", "node"),
    [
        ("--nnodes 2 --rdzv-endpoint 127.0.0.1:29500", 0),
        (f"--nnodes 2 --rdzv-endpoint {socket.gethostname()}:29500", 0),
        ("--nnodes 2 --rdzv-endpoint 192.0.2.1:29500", 1),
        ("--nnodes 1:4 --master-addr no-such-host.invalid", 1),
        ("--nnodes 2 --rdzv-endpoint 192.0.2.1:29500 --node-rank 0", 0),
        ("--nnodes 2 --rdzv-endpoint redis://192.0.2.1", 0),  # where all may decide
        ("--nnodes 2 --rdzv-endpoint etcd://192.0.2.1:2379,192.0.2.2", 0),
        ("--nnodes 1 --master-addr 192.0.2.1", 0),
    ],
)
def test_node_0_is_where_the_store_is_to_be(line: str, node: int) -> None:
    """As with torchrun, one command line does for all nodes."""
    assert parsed(f"{line} --rdzv-backend c10d --rdzv-id x t.py").node == node


def test_defaults_stand_in_variables_of_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    assert parsed("t.py").processes == 3
    assert parsed("--nproc-per-node 2 t.py").processes == 2
    monkeypatch.setenv("PET_NO_PYTHON", "1")
    monkeypatch.setenv("PET_STANDALONE", "0")
    assert parsed("--rdzv-endpoint host:2000 t.py").command.kind == "program"
    assert parsed("--rdzv-endpoint host:2000 t.py").port == 2000


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("redis:///0", "127.0.0.1", 6379),
        ("unix:///run/redis.sock", "127.0.0.1", 6379),
        ("rediss+sentinel://:secret@a,b:2/main", "a", 26379),
        ("redis+sentinel://[::1]:5,b/main/2?sentinel_password=x", "::1", 5),
        ("redis+cluster://me:secret@a,b", "a", 6379),
        ("etcds://a:1,b?ca_certs=/etc/ca.pem", "a", 1),
    ],
)
def test_stores_that_no_node_hosts(url: str, host: str, port: int) -> None:
    options = parsed(f"--nnodes 2 --rdzv-id x --rdzv-endpoint {url} t.py")
    assert (options.store_url, options.host, options.port) == (url, host, port)
    assert options.outlives_nodes


def test_notices_and_plans() -> None:
    options = parsed(
        "--preemption-file n --preemption-url http://h/x --preemption-seconds 120 "
        "--shutdown-timeout 5 --reads-plan t.py"
    )
    assert options.preemption_file == Path("n")
    assert options.preemption_url == "http://h/x"
    assert options.preemption_s == 120.0
    assert (options.shutdown_s, options.reads_plans) == (5.0, True)
    assert parsed("t.py").preemption_file is None
    assert parsed("t.py").preemption_s is None


def test_streams_of_single_ranks() -> None:
    output = parsed("--log-dir logs -r 0:3,1:1 -t 2 t.py").output
    assert output.folder is not None
    assert output.folder.parent == Path("logs")
    assert [output.is_shown(0, stream) for stream in (1, 2)] == [False, True]
    assert [output.is_shown(1, stream) for stream in (1, 2)] == [False, True]
    assert [output.is_written(2, stream) for stream in (1, 2)] == [False, True]


def test_a_stream_that_goes_to_a_file_alone_and_to_both_goes_to_both() -> None:
    output = parsed("--redirects 3 --tee 0:1,1:3 t.py").output
    shown = [[output.is_shown(rank, stream) for stream in (1, 2)] for rank in range(3)]
    assert shown == [[True, False], [True, True], [False, False]]
    assert all(output.is_written(rank, stream) for rank in range(3) for stream in (1, 2))


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("/x/y", "x/y_"),
        ("../../x", "x_"),
        ("a/../b", "a/b_"),
        ("/", "none_"),
        ("team/7", "team/7_"),
    ],
)
def test_output_stays_in_its_folder_whatever_the_identity(run: str, name: str) -> None:
    folder = parsed(f"--log-dir logs --rdzv-id {run} t.py").output.folder
    assert folder is not None
    assert str(folder.relative_to("logs")).startswith(name)
    assert ".." not in folder.parts


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--nproc-per-node 0 t.py", "--nproc-per-node must be a number of at least 1"),
        ("--node-rank 1 --master-addr h t.py", "--node-rank 1 must be below"),
        ("--nnodes 3:2 t.py", "--nnodes 3:2 must rise"),
        ("--nproc-per-node 3:2 t.py", "--nproc-per-node 3:2 must rise"),
        ("--heartbeat 0 t.py", "--heartbeat must be a number of seconds above 0"),
        ("--shutdown-timeout x t.py", "--shutdown-timeout must be a number of seconds"),
        ("--nnodes 2 --node-rank 1 --rdzv-endpoint h:0 t.py", "several nodes need the port"),
        ("--rdzv-endpoint [::1 t.py", "--rdzv-endpoint must be HOST, HOST:PORT"),
        ("--rdzv-endpoint ::1 t.py", "not '::1'"),
        ("--rdzv-endpoint [node-0]:1 t.py", "not '[node-0]:1'"),
        ("--rdzv-endpoint http://x:1 t.py", "not 'http://x:1'"),
        ("--master-addr http://x t.py", "not 'http://x:'"),
        ("--rdzv-endpoint h:99999 t.py", "the store's port must be at most 65535, not 99999"),
        ("--nnodes 2 --node-rank 1 --master-addr h --master-port x t.py", "the store's port must"),
        ("--rdzv-endpoint redsi://:secret@h t.py", "not 'h'"),
        ("--rdzv-endpoint redis://h/0 t.py", "needs the job's identity: --rdzv-id ID"),
        ("--rdzv-id x --rdzv-endpoint redis://a,b/0 t.py", "must be redis://HOST:PORT/DB"),
        ("--rdzv-id x --rdzv-endpoint redis://:a/b@h t.py", "port must be at most 65535, not a"),
        ("--rdzv-id x --rdzv-endpoint redis+sentinel://h t.py", ",.../MASTER/DB"),
        ("--rdzv-id x --rdzv-endpoint redis+sentinel://h/m/x t.py", ",.../MASTER/DB"),
        ("--rdzv-id x --rdzv-endpoint redis+cluster://h/3 t.py", "without a database"),
        ("--rdzv-id x --rdzv-endpoint etcd://h,:1 t.py", "not ':1'"),
        ("--rdzv-id x --rdzv-endpoint etcd://h:1,[::1 t.py", "not '[::1'"),
        ("--rdzv-id x --rdzv-endpoint etcd://h:1/prefix t.py", "without a path"),
        ("--rdzv-id x --rdzv-endpoint etcds://h?cafile=x t.py", "key_file, not cafile"),
        ("--heartbeat 1e15 t.py", "--heartbeat must be a number of seconds"),
        ("--join 1,x t.py", "--join must be a number"),
        ("--join , --rdzv-endpoint h t.py", "--join , must name ranks, each once"),
        ("--join 2,2 --rdzv-endpoint h t.py", "--join 2,2 must name ranks, each once"),
        ("-r 4 t.py", "streams are 0, 1, 2 or 3"),
        ("--nproc-per-node 2", "are required: script\n"),
        ("--no-such-option t.py", "no-such-option"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    line: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(line)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    ["train.py --help", "--nproc-per-node 2 train.py -m 3 --help", "--tee=3 -m pack.train --x 1"],
)
def test_the_command_passes_everything_on(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr("resihp.launch.supervisor.main", lambda words: given.extend(words) or 5)
    done = CliRunner().invoke(_run.app, ["run", *line.split()])
    assert done.exit_code == 5, done.output
    assert given == line.split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nothing.py", "nothing.py: no such file"),
        (f"{Path(__file__).parent}", "launch: no __main__.py in it"),
        ("-m nothing.train", "nothing: no such module"),
        ("-m __main__", "__main__: no such module"),
        ("-m .train", ": no such module"),
        ("--no-python nothing-to-run", "nothing-to-run: no such program"),
    ],
)
def test_a_command_that_is_not_there_is_refused_before_anything_starts(
    line: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert main(line.split()) == 2
    assert words in caplog.text


def test_commands_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    for folder in ("mine", "folder"):
        (tmp_path / folder).mkdir()
    (tmp_path / "folder" / "__main__.py").touch()
    shutil.make_archive(str(tmp_path / "archive"), "zip", tmp_path / "folder")
    monkeypatch.chdir(tmp_path)
    for target, kind in (
        ("train.py", "script"), ("folder", "script"), ("archive.zip", "script"),
        ("mine.train", "module"), ("json.tool", "module"), ("resihp.launch", "module"),
        ("sh", "program"),
    ):  # fmt: skip
        assert Command(target, kind).refusal is None, target
