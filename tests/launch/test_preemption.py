"""Notices that a node is taken away, wherever they come from."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch

from resihp.checkpoint import Checkpointer, LocalDisk
from resihp.launch.preemption import PreemptionNotice

ROOT = Path(__file__).parents[2]


class Metadata(HTTPServer):
    """Answers each request with `status` and `body`."""

    status, body = 404, b""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/notice"


class Answer(BaseHTTPRequestHandler):
    server: Metadata

    def do_GET(self) -> None:
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *arguments: object) -> None:
        pass


SAVING = """
import signal, sys, threading
from pathlib import Path
import torch
from resihp.checkpoint import Checkpointer, LocalDisk
from resihp.checkpoint.levels import direct_file

write, folder = direct_file.DirectFile.write, Path(sys.argv[1])
state = {"weight": torch.zeros(1 << 20)}
saver = Checkpointer([LocalDisk(folder)])

def interrupted(self, parts, start):
    write(self, parts, start)
    if step == 2:
        (folder / "saving").touch()
        threading.Event().wait()

direct_file.DirectFile.write = interrupted
for step in range(3):
    state["weight"].fill_(step)
    saver.save(step, state)
    saver.wait()
"""


def test_a_notice_in_the_middle_of_a_save_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SAVING)
    process = subprocess.Popen(
        [sys.executable, "-m", "resihp.launch", str(tmp_path / "script.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 300
        while not (tmp_path / "saving").exists() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGUSR2)
        _, told = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGUSR2, told
    assert "got SIGUSR2: the ranks end after their step" in told
    assert "node 0 leaves the job (got SIGUSR2): the job ends" in told
    level = LocalDisk(tmp_path)
    assert level.steps() == [0, 1]
    state = {"weight": torch.empty(1 << 20)}
    assert Checkpointer([level]).restore(state).step == 1
    assert state["weight"].eq(1).all()


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    with Metadata(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_an_address_has_a_notice_with_a_body_alone(metadata: Metadata) -> None:
    notice = PreemptionNotice(url=metadata.url)
    for metadata.status, metadata.body in ((404, b"not found"), (500, b"x"), (200, b" ")):
        notice.look()
        assert notice.why is None
    metadata.status, metadata.body = 200, b'{"action": "terminate"}\nmore'
    notice.look()
    assert notice.why == f'notice of {metadata.url}: {{"action": "terminate"}}'
    assert notice.status == 143


def test_an_address_that_does_not_answer_is_no_notice(
    closed_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    notice = PreemptionNotice(url=f"http://127.0.0.1:{closed_port}/")
    notice.look()
    notice.look()
    assert notice.why is None
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 1


def test_a_file_is_a_notice_even_if_it_is_empty(tmp_path: Path) -> None:
    notice = PreemptionNotice(tmp_path / "notice")
    notice.look()
    assert notice.why is None
    (tmp_path / "notice").touch()
    notice.look()
    assert notice.why == f"found {tmp_path / 'notice'}"


def test_the_first_of_several_notices_counts(tmp_path: Path) -> None:
    (tmp_path / "notice").write_text("maintenance\n")
    notice = PreemptionNotice(tmp_path / "notice")
    notice.handle_signal(signal.SIGUSR1, None)
    notice.handle_signal(signal.SIGTERM, None)
    notice.look()
    assert (notice.why, notice.status) == ("got SIGUSR1", 128 + signal.SIGUSR1)
