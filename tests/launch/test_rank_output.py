"""Output of ranks, passed on while it is written."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from resihp.launch.options import Output
from resihp.launch.rank_output import RankOutput, pass_on_all
from tests.launch.launcher_process import LauncherProcess

LIMIT_S = 60.0


class Rank:
    """A rank's stderr, and what the launcher has passed on of it."""

    def __init__(self, output: Output, shown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._shown, self._terminal = shown, shown.open("w")
        monkeypatch.setattr("sys.stderr", self._terminal)
        self._output = RankOutput(output, rank=3, local_rank=0, attempt=0)
        self._stderr = os.dup(self._output.descriptors[1])
        self._output.started()

    def write(self, text: bytes) -> None:
        os.write(self._stderr, text)

    def until_shown(self, text: bytes) -> None:
        self._until(lambda: self._shown.read_bytes() == text)

    def last_lines(self) -> str:
        os.close(self._stderr)
        self._until(lambda: self._output.is_complete)
        self._terminal.close()
        return self._output.last_lines()

    def _until(self, check: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not check():
            assert time.monotonic() < deadline, self._shown.read_bytes()
            time.sleep(0.01)


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(Output(), tmp_path / "shown", monkeypatch)


def test_a_progress_bar_is_shown_while_it_moves_and_kept_once(rank: Rank) -> None:
    rank.write(b"epoch 0\n\r 1%|\r 2%|")
    rank.until_shown(b"epoch 0\n\r 1%|\r")
    rank.write(b"\r 3%|\nend\r\n")
    rank.until_shown(b"epoch 0\n\r 1%|\r 2%|\r 3%|\nend\r\n")
    assert rank.last_lines().splitlines() == ["epoch 0", " 3%|", "end"]


def test_what_has_no_end_of_line_is_shown_and_not_all_kept(rank: Rank) -> None:
    for _ in range(100):
        rank.write(b"x" * 50_000)
    rank.write(b"y\n")
    rank.until_shown(b"x" * 5_000_000 + b"y\n")
    assert len(rank.last_lines()) < 200_000


def test_lines_of_ranks_that_are_written_to_files_have_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = Output(folder=tmp_path / "logs", tee={None: 2})
    rank = Rank(output, tmp_path / "shown", monkeypatch)
    rank.write(b"one\ntwo")
    rank.until_shown(b"[rank3]: one\n")
    assert rank.last_lines() == "one\ntwo"
    assert (tmp_path / "logs" / "attempt_0" / "0" / "stderr.log").read_bytes() == b"one\ntwo"


def test_what_cannot_be_written_is_passed_on_and_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "logs").touch()  # no folder can be made there, as on a full disk
    output = Output(folder=tmp_path / "logs", redirects={None: 3})
    rank = Rank(output, tmp_path / "shown", monkeypatch)
    rank.write(b"one\n")
    rank.until_shown(b"[rank3]: one\n")
    assert rank.last_lines() == "one"
    assert len([line for line in caplog.messages if "logs/attempt_0" in line]) == 1


LINES = b"".join(b"%d\n" % number for number in range(20_000)) + b"the last line\n"
"""More than a pipe holds, and less than two pipes do."""


def test_what_is_read_slowly_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        output = RankOutput(Output(), rank=0, local_rank=0, attempt=0)
        with os.fdopen(os.dup(output.descriptors[1]), "wb") as stderr:
            output.started()
            stderr.write(LINES)
        waiting = threading.Thread(target=pass_on_all, args=([output],))
        waiting.start()
        found = b""
        while len(found) < len(LINES):
            assert waiting.is_alive() or len(LINES) - len(found) <= 1 << 16  # in our pipe
            found += os.read(read, 1 << 12)
        waiting.join(LIMIT_S)
        assert not waiting.is_alive()
        assert found == LINES
    os.close(read)


def test_a_child_that_keeps_a_rank_s_output_is_not_waited_for(rank: Rank) -> None:
    rank.write(b"told\n")
    waiting = threading.Thread(target=pass_on_all, args=([rank._output],))
    waiting.start()
    waiting.join(LIMIT_S)
    assert not waiting.is_alive()
    rank.until_shown(b"told\n")
    assert rank.last_lines() == "told"


def test_the_end_of_the_output_of_a_completed_job_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os\nfrom pathlib import Path\n"
        "os.write(2, b''.join(b'%d\\n' % number for number in range(20_000)))\n"
        "os.write(2, b'the last line\\n')\nPath('written').touch()\n"
    )
    read, write = os.pipe()
    with (tmp_path / "out").open("wb") as out, os.fdopen(write, "wb") as err:
        process = LauncherProcess(tmp_path, "script.py", out=out, err=err)
    try:
        deadline = time.monotonic() + 300.0
        while not (tmp_path / "written").exists() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with pytest.raises(subprocess.TimeoutExpired):  # nobody has read what the rank wrote
            process.wait(5.0)
        with os.fdopen(read, "rb") as told:
            assert b"the last line\n" in told.read()
        assert process.wait(300.0) == 0
    finally:
        process.kill()
