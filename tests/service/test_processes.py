"""The processes of a sidecar: each is replaced when it dies, and none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from test_recovery import assert_all_applied_once, send

from service import Settings, StartError
from service.server import _bind, serve
from service.supervisor import restart_delay_s
from tests.service.conftest import FAKES, Http, children, eventually, job_of, redis_pids
from tests.service.forked_sidecar import ForkedSidecar


def test_a_worker_and_an_api_that_die_are_replaced(tmp_path: Path):
    with ForkedSidecar(tmp_path, command=FAKES) as sidecar:
        http = Http(sidecar.url)
        http.register(job_of())
        for step in range(20):
            send(http, step)
            if step in {7, 13}:
                before = children(sidecar.pid)
                assert set(before) == {"resihp-worker", "resihp-api-0"}
                for pid in before.values():
                    os.kill(pid, signal.SIGKILL)
                eventually(lambda before=before: replaced(before, children(sidecar.pid)))
        assert_all_applied_once(http, tmp_path, 20)
        assert "process died" in sidecar.tail(1000)
        http.close()


def test_the_next_worker_does_not_wait_for_the_leases_of_the_last(tmp_path: Path):
    options = ("--lease-s", "600")
    with ForkedSidecar(tmp_path, command=FAKES, options=options) as sidecar:
        http = Http(sidecar.url)
        http.register(job_of())
        send(http, 0)
        eventually(lambda: http.records("j") == 32)
        os.kill(children(sidecar.pid)["resihp-worker"], signal.SIGKILL)
        send(http, 1)
        eventually(lambda: http.records("j") == 64, timeout_s=200)
        http.close()


def test_a_worker_and_an_api_that_hang_are_replaced(tmp_path: Path):
    with ForkedSidecar(tmp_path, command=FAKES) as sidecar:
        http = Http(sidecar.url)
        http.register(job_of())
        before = children(sidecar.pid)
        for pid in before.values():
            os.kill(pid, signal.SIGSTOP)
        os.kill(sidecar.pid, signal.SIGUSR1)
        eventually(lambda: not any(map(lives, before.values())))
        os.kill(sidecar.pid, signal.SIGUSR2)  # the next ones may take longer to start
        eventually(lambda: replaced(before, children(sidecar.pid)))
        send(http, 0)
        send(http, 1)
        assert_all_applied_once(http, tmp_path, 2)
        assert "process hangs, killing it" in sidecar.tail(1000)
        http.close()


def replaced(before: dict[str, int], now: dict[str, int]) -> bool:
    return set(before) == set(now) and set(before.values()).isdisjoint(now.values())


def test_several_api_processes_share_the_port(tmp_path: Path):
    with ForkedSidecar(tmp_path, command=FAKES, options=("--processes", "2")) as sidecar:
        assert set(children(sidecar.pid)) == {"resihp-api-0", "resihp-api-1", "resihp-worker"}
        http = Http(sidecar.url)
        http.register(job_of())
        for name in ("resihp-api-0", "resihp-api-1"):
            stopped = children(sidecar.pid)[name]
            http.close()  # the next connection is that of the process that is not stopped
            os.kill(stopped, signal.SIGSTOP)
            try:
                send(http, 0)
            finally:
                os.kill(stopped, signal.SIGCONT)
        http.close()


def test_the_processes_end_with_a_killed_supervisor(tmp_path: Path):
    with ForkedSidecar(tmp_path, command=FAKES) as sidecar:
        processes = [*children(sidecar.pid).values(), *redis_pids(tmp_path)]
        assert len(processes) == 3
        sidecar.kill()
        eventually(lambda: not any(map(lives, processes)))


def test_the_processes_end_with_a_killed_program_that_started_them(tmp_path: Path):
    program = (
        "import sys, time; from pathlib import Path; from service import Sidecar\n"
        "with Sidecar(Path(sys.argv[1])) as sidecar:\n"
        "    print(sidecar.pid, flush=True); time.sleep(600)"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert started.stdout is not None
        with started.stdout as out:
            supervisor = int(out.readline())
        processes = [supervisor, *children(supervisor).values(), *redis_pids(tmp_path)]
        assert len(processes) == 4
    finally:
        started.kill()
        started.wait(300)
    eventually(lambda: not any(map(lives, processes)))


def lives(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_worker_that_cannot_start_ends_the_sidecar_with_its_reason(tmp_path: Path):
    command = (
        "from service import Settings, StartError; from service.server import serve; import sys\n"
        "def refuse(settings): raise StartError('no detector')\n"
        "try: serve(Settings(port=0, data=sys.argv[1]), refuse)\n"
        "except StartError as error: sys.exit(str(error))"
    )
    done = subprocess.run(
        [sys.executable, "-c", command, str(tmp_path)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stderr.splitlines()[-1] == "no detector"
    assert redis_pids(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ready_file": "/nonexistent/ready"}, "--ready-file"),
        ({"parent": 2**22 + 1}, "is not the parent"),
    ],
)
def test_what_would_end_the_sidecar_at_once_is_said_before_it_starts(
    tmp_path: Path, options: dict[str, Any], words: str
):
    with pytest.raises(StartError, match=words):
        serve(Settings(port=0, data=tmp_path, redis_url="redis://none.invalid", **options))


def test_a_host_without_an_address_is_named(tmp_path: Path):
    with pytest.raises(StartError, match="choose another --host"):
        _bind(Settings(port=0, data=tmp_path, host="no.such.host.invalid", token=SecretStr("x")))


def test_a_process_that_dies_again_and_again_is_started_less_often():
    delays = [restart_delay_s(deaths) for deaths in range(1, 20)]
    assert delays == sorted(delays)
    assert delays[0] < 1 < delays[-1] == delays[-2]
