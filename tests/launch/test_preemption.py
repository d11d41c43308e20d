"""Notices that a node is taken away, wherever they come from."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from math import inf
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given as given_any
from hypothesis import strategies as st

from resihp._preemption import PreemptionNotice, end_of_window
from resihp.checkpoint import Checkpointer, LocalDisk
from resihp.contracts import ContractError
from tests.launch.launcher_process import LauncherProcess


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
    with (tmp_path / "log").open("wb") as log:
        process = LauncherProcess(tmp_path, "script.py", str(tmp_path), out=log, err=log)
    try:
        deadline = time.monotonic() + 300
        while not (tmp_path / "saving").exists() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGUSR2)
        status = process.wait(300)
    finally:
        process.kill()
    told = (tmp_path / "log").read_text()
    assert status == 128 + signal.SIGUSR2, told
    assert "got SIGUSR2: the ranks end after their step" in told
    assert "node 0 leaves the job (got SIGUSR2): the job ends" in told
    level = LocalDisk(tmp_path)
    assert level.steps() == [0, 1]
    state = {"weight": torch.empty(1 << 20)}
    assert Checkpointer([level]).restore(state).step == 1
    assert state["weight"].eq(1).all()


TELLING = """
import os, signal, sys, time
from pathlib import Path

def told(number, frame):
    Path(sys.argv[1], "told").write_text(Path(os.environ["RESIHP_PREEMPTION_FILE"]).read_text())
    sys.exit(143)

signal.signal(signal.SIGTERM, told)
Path(sys.argv[1], "running").touch()
while True:
    time.sleep(0.1)
"""


def test_a_launcher_tells_its_ranks_how_much_time_is_left(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TELLING)
    options = ("--preemption-seconds", "600", "script.py", str(tmp_path))
    url = {"RESIHP_PREEMPTION_URL": "http://ranks"}
    with (tmp_path / "log").open("wb") as log:
        process = LauncherProcess(tmp_path, *options, out=log, err=log, **url)
    try:
        deadline = time.monotonic() + 300
        while not (tmp_path / "running").exists() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        sent_s = time.time()
        process.send_signal(signal.SIGUSR1)
        status = process.wait(300)
    finally:
        process.kill()
    assert status == 128 + signal.SIGUSR1, (tmp_path / "log").read_text()
    end_s = end_of_window((tmp_path / "told").read_text(), 0.0)
    assert end_s is not None
    assert sent_s - 1 < end_s - 600 < time.time() + 1


def test_a_window_beyond_all_calendars_is_passed_on(tmp_path: Path) -> None:
    assert end_of_window("9" * 400, 0.0) is None
    assert end_of_window("NaN", 0.0) is None
    notice = PreemptionNotice(window_s=1e300)
    notice.handle_signal(signal.SIGTERM, None)
    notice.forward(tmp_path / "notice")
    until_s = end_of_window((tmp_path / "notice").read_text(), 0.0)
    assert until_s is not None
    assert until_s > time.time() + 1e9


def test_a_signal_while_it_is_closed_finds_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    notice = PreemptionNotice()
    event = notice._noticed
    taken: list[int] = []

    class Interrupted:
        def set(self) -> None:
            assert not taken, "the lock is held by this thread"
            taken.append(1)
            notice.handle_signal(signal.SIGTERM, None)
            event.set()

    monkeypatch.setattr(notice, "_noticed", Interrupted())
    notice.close()
    assert event.is_set()


def test_signals_are_handled_as_before_once_it_is_closed() -> None:
    def mine(*_: object) -> None:
        pass

    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
    try:
        signal.signal(signal.SIGTERM, mine)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        notice = PreemptionNotice()
        notice.start()
        signal.signal(signal.SIGUSR2, mine)  # later than ours: it stays
        notice.close()
        assert [signal.getsignal(n) for n in before] == [mine, signal.SIG_DFL, mine]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    with Metadata(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_an_address_has_a_notice_with_a_body_alone(metadata: Metadata) -> None:
    notice = PreemptionNotice(url=metadata.url, interval_s=60.0)
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


def test_a_file_that_cannot_be_seen_is_no_notice(tmp_path: Path) -> None:
    """As on a network file system that fails for a moment."""
    (tmp_path / "no folder").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path / "no folder" / "notice", tmp_path / "loop" / "notice"):
        notice = PreemptionNotice(path)
        notice.look()
        assert notice.why is None
    notice = PreemptionNotice(tmp_path)  # exists, and cannot be read
    notice.look()
    assert notice.why == f"found {tmp_path}"


def test_the_first_of_several_notices_counts(tmp_path: Path) -> None:
    (tmp_path / "notice").write_text("maintenance\n")
    notice = PreemptionNotice(tmp_path / "notice")
    notice.handle_signal(signal.SIGUSR1, None)
    notice.handle_signal(signal.SIGTERM, None)
    notice.look()
    assert (notice.why, notice.status) == ("got SIGUSR1", 128 + signal.SIGUSR1)


@given_any(st.floats(1.0, 1e5), st.floats(1e9, 2e9))
def test_every_form_of_a_notice_gives_the_same_end(seconds: float, written_s: float) -> None:
    end = datetime.fromtimestamp(written_s + seconds, UTC)
    forms = [
        str(seconds),
        f"{seconds}\n",
        json.dumps({"seconds": seconds}),
        json.dumps({"action": "stop", "time": end.isoformat()}),
        end.isoformat().replace("+00:00", "Z"),
    ]
    for text in forms:
        assert end_of_window(text, written_s) == pytest.approx(written_s + seconds, abs=1e-3)


@pytest.mark.parametrize("text", ["", "TRUE", "maintenance", "[1]", "{}", '{"time": 5e', "null"])
def test_a_notice_without_a_time_leaves_what_is_known_of_it(text: str, tmp_path: Path) -> None:
    assert end_of_window(text, 0.0) is None
    (tmp_path / "notice").write_text(text)
    for window_s in (None, 600.0):
        notice = PreemptionNotice(tmp_path / "notice", window_s=window_s)
        notice.look()
        left_s = notice.until_s - time.monotonic()
        assert left_s == inf if window_s is None else 0 < left_s <= 600.1


def test_a_notice_reaches_the_processes_of_a_launcher_with_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher got it as a signal; the rank's own signal finds the file."""
    clock = SimpleNamespace(time=lambda: 1e9, monotonic=lambda: 5000.0)
    monkeypatch.setattr("resihp._preemption.time", clock)
    given = PreemptionNotice(window_s=600.0)
    given.handle_signal(signal.SIGUSR1, None)
    given.forward(tmp_path / "notice")
    told = SimpleQueue[float]()
    rank = PreemptionNotice.of_environment({"RESIHP_PREEMPTION_FILE": str(tmp_path / "notice")})
    rank.handle_signal(signal.SIGTERM, None)
    rank.start(told.put, signals=())
    assert told.get(timeout=60) == pytest.approx(given.until_s, abs=1e-3)
    rank.close()
    PreemptionNotice().forward(tmp_path / "unknown")
    assert (tmp_path / "unknown").read_text() == ""


def test_a_rank_learns_of_a_signal_at_once_and_once() -> None:
    told = SimpleQueue[float]()
    notice = PreemptionNotice(window_s=600.0, interval_s=60.0)
    notice.start(told.put, signals=())
    notice.handle_signal(signal.SIGTERM, None)
    assert told.get(timeout=30) == notice.until_s
    notice.handle_signal(signal.SIGTERM, None)
    notice.close()
    assert told.empty()


def test_seconds_that_are_no_number_are_refused() -> None:
    with pytest.raises(ContractError, match="RESIHP_PREEMPTION_SECONDS"):
        PreemptionNotice.of_environment({"RESIHP_PREEMPTION_SECONDS": "soon"})
