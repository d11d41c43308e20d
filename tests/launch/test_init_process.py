"""The launcher as the first process of a container."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from resihp.launch.init_process import run_below_init

run_below_init()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
read, write = os.pipe()
worker = os.fork()
if not worker:
    if (orphan := os.fork()):
        os.write(write, str(orphan).encode())
        os._exit(0)
    os.close(write)
    time.sleep(1e6)
orphan = int(os.read(read, 16))
os.waitpid(worker, 0)
os.kill(orphan, signal.SIGKILL)
while Path(f"/proc/{orphan}").exists():
    time.sleep(0.01)
print("reaped", os.getppid(), flush=True)
os.kill(1, signal.SIGTERM)
while True:
    time.sleep(0.1)
"""
UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


def test_process_1_waits_for_orphans_and_passes_signals_and_the_status_on() -> None:
    try:
        subprocess.run([*UNSHARE, "true"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no namespace of processes can be made here")
    command = [*UNSHARE, sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (7, "reaped 1\n"), done.stderr


def test_any_other_process_goes_on() -> None:
    command = "from resihp.launch.init_process import run_below_init as run; import os; "
    command += "before = os.getpid(); run(); print(before == os.getpid())"
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "True\n"
