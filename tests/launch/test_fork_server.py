"""Ranks forked from a process with torch: like started ones, and their modules safely imported."""

from __future__ import annotations

import json
import os
import random
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from resihp.launch import fork_server
from resihp.launch.fork_server import Ended, ForkServer, Started
from resihp.launch.options import Command
from resihp.launch.preloading import imports_of, top_level_imports
from tests.elastic.engine_job import is_running
from tests.forked import ForkedProcess

LIMIT_S = 300.0
TELL = """
import json, os, sys
def tell(**what):
    with open(os.environ["TOLD"], "w") as file:
        json.dump(what, file)
"""


class Ranks:
    """A fork server, with the scripts that it runs in a folder."""

    def __init__(self, folder: Path, *libraries: str) -> None:
        self.folder = folder
        path = os.pathsep.join([*libraries, str(Path(__file__).parents[2])])
        self.server = ForkServer({**os.environ, "PYTHONPATH": path})
        self._count = 0

    def script(self, text: str, name: str = "script.py") -> Command:
        (self.folder / name).write_text(TELL + text)
        return Command(str(self.folder / name), "script", ("a", "--b"))

    def start(self, command: Command, **variables: str) -> tuple[str, Path]:
        self._count += 1
        key, told = f"rank {self._count}", self.folder / f"told-{self._count}"
        with (self.folder / f"log-{self._count}").open("wb") as log:
            streams = [log.fileno(), log.fileno()]
            self.server.start(key, command, {"TOLD": str(told), **variables}, streams)
        return key, told

    def wait_for(self, kind: type[Started] | type[Ended], key: str) -> Any:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            self.server.wait(1.0)
            for event in self.server.events():
                if isinstance(event, kind) and event.key == key:
                    return event
        raise TimeoutError(self.logs())

    def run(self, command: Command, **variables: str) -> tuple[int, dict[str, Any]]:
        """Exit status, and what the script told."""
        key, told = self.start(command, **variables)
        status = self.wait_for(Ended, key).status
        return status, json.loads(told.read_text()) if told.exists() else {}

    def logs(self) -> str:
        return "\n".join(log.read_text() for log in sorted(self.folder.glob("log-*")))


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are forked, with torch at once, where the start of theirs is not what is tested."""
    monkeypatch.setattr(fork_server, "start_python", _start_forked)


def _start_forked(control: int, environment: Mapping[str, str]) -> ForkedProcess:
    with socket.socket(fileno=os.dup(control)) as theirs:
        return ForkedProcess(_serve, theirs, os.getcwd(), out=1, err=2, **environment)


def _serve(control: socket.socket, folder: str) -> None:
    os.setsid()
    os.chdir(folder)
    fork_server.serve(control.detach())


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    folder = tmp_path_factory.mktemp("ranks")
    started = Ranks(folder, str(folder))
    yield started
    started.server.close()


def test_a_script_finds_what_python_gives_it(ranks: Ranks) -> None:
    command = ranks.script(
        "import __main__, pickle\n"
        "class Local: pass\n"
        "same = isinstance(pickle.loads(pickle.dumps(Local())), Local)\n"
        "tell(argv=sys.argv, path=sys.path[0], file=__file__, name=__name__,"
        " rank=os.environ['RANK'], pickled=same, here=__main__.Local is Local,"
        " leads=os.getsid(0) == os.getpid(), torch='torch' in sys.modules,"
        " cache=os.environ.get('TORCHINDUCTOR_CACHE_DIR'))\n"
        "def typed(x: int): pass\n"
        "assert typed.__annotations__ == {'x': int}"
    )
    status, told = ranks.run(command, RANK="3")
    assert status == 0, ranks.logs()
    assert told == {
        "argv": [command.target, "a", "--b"],
        "path": str(ranks.folder),
        "file": command.target,
        "name": "__main__",
        "rank": "3",
        "pickled": True,
        "here": True,
        "leads": True,
        "torch": True,
        "cache": os.environ.get("TORCHINDUCTOR_CACHE_DIR"),
    }


def test_the_file_of_a_script_is_found_from_any_folder(ranks: Ranks) -> None:
    target = os.path.relpath(ranks.script("tell(file=__file__)").target)
    status, told = ranks.run(Command(target, "script", ()))
    assert (status, told["file"]) == (0, os.path.abspath(target)), ranks.logs()


def test_a_module_and_a_program(ranks: Ranks) -> None:
    assert ranks.run(Command("json.tool", "module", ("--help",)))[0] == 0, ranks.logs()
    assert ranks.run(Command("sh", "program", ("-c", "exit 7")))[0] == 7, ranks.logs()


def test_a_script_s_modules_hide_those_of_the_standard_library(ranks: Ranks) -> None:
    """Also those that torch has imported, but not those that Python itself imports, nor those that
    are hidden by a folder without code alone."""
    (ranks.folder / "beside/statistics").mkdir(parents=True)
    for name in ("profile", "encodings"):
        (ranks.folder / f"beside/{name}.py").write_text("OWN = True\n")
    command = ranks.script(
        "import encodings, profile, statistics, torch.profiler\n"
        "tell(own=profile.OWN, mean=statistics.mean([1, 3]), path=encodings.__path__)",
        "beside/script.py",
    )
    status, told = ranks.run(command)
    assert status == 0, ranks.logs()
    assert (told["own"], told["mean"]) == (True, 2)


def test_a_module_is_main_until_its_process_ends(ranks: Ranks) -> None:
    """Threads and exit handlers pickle instances of its classes behind its last line."""
    script = ranks.script(
        "import atexit, pickle\n"
        "class Local: pass\n"
        "def tell_last():\n"
        "    tell(same=isinstance(pickle.loads(pickle.dumps(Local())), Local), argv=sys.argv)\n"
        "atexit.register(tell_last)\n",
        "as_module.py",
    )
    status, told = ranks.run(Command("as_module", "module", ("a", "--b")))
    assert status == 0, ranks.logs()
    assert told == {"same": True, "argv": [script.target, "a", "--b"]}


@pytest.mark.parametrize("name", ["app", "app.zip"])
def test_a_folder_and_an_archive_are_run_as_python_runs_them(ranks: Ranks, name: str) -> None:
    (ranks.folder / "app").mkdir(exist_ok=True)
    (ranks.folder / "app" / "beside.py").write_text("OWN = True\n")
    ranks.script(
        "import __main__, beside\n"
        "class Local: pass\n"
        "tell(own=beside.OWN, argv=sys.argv, path=sys.path[0], file=__file__, name=__name__,"
        " package=__package__, here=__main__.Local is Local)",
        "app/__main__.py",
    )
    shutil.make_archive(str(ranks.folder / "app"), "zip", ranks.folder / "app")
    path = str(ranks.folder / name)
    target = os.path.relpath(path)
    status, told = ranks.run(Command(target, "script", ("a", "--b")))
    assert status == 0, ranks.logs()
    assert told == {
        "own": True,
        "argv": [target, "a", "--b"],
        "path": path,
        "file": f"{path}/__main__.py",
        "name": "__main__",
        "package": "",
        "here": True,
    }


def test_a_shell_ends_its_pipelines(ranks: Ranks) -> None:
    """A program that writes to a pipe without reader is ended, unless SIGPIPE is ignored."""
    line = "(while :; do echo y; done) 2>/dev/null | head -1"
    assert ranks.run(Command("sh", "program", ("-c", line)))[0] == 0, ranks.logs()


@pytest.mark.parametrize("safe", ["", "1"])
def test_the_path_is_pythons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, safe: str) -> None:
    """The current folder is not on the path of a script elsewhere, and PYTHONPATH is, all of it."""
    here, library = tmp_path / "here", tmp_path / "library"
    for folder in (here, library):
        folder.mkdir()
    for name in ("queue", "resihp"):
        (here / f"{name}.py").write_text("raise SystemExit('mine')")
    (library / "beside.py").write_text("")
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONSAFEPATH", safe)
    ranks = Ranks(tmp_path, str(library))
    try:
        status, told = ranks.run(ranks.script("import beside, queue\ntell(path=sys.path[:2])"))
    finally:
        ranks.server.close()
    assert status == 0, ranks.logs()
    root = str(Path(__file__).parents[2])
    assert told["path"] == ([str(library), root] if safe else [str(tmp_path), str(library)])


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("raise ValueError('of the script')", 1),
        ("sys.exit(5)", 5),
        ("os.kill(os.getpid(), 9)", -9),
        ("import atexit; atexit.register(tell, last=1)", 0),
        ("import threading; threading.Timer(0.1, lambda: tell(last=1)).start()", 0),
    ],
)  # fmt: skip
def test_an_end_is_that_of_the_script(ranks: Ranks, text: str, status: int) -> None:
    ended, told = ranks.run(ranks.script(text))
    assert ended == status, ranks.logs()
    assert told or status != 0


def test_random_numbers_differ_between_ranks(ranks: Ranks) -> None:
    command = ranks.script(
        "import random, numpy, torch\n"
        "tell(a=random.random(), b=float(numpy.random.rand()), c=float(torch.rand(1)))"
    )
    drawn = [ranks.run(command)[1] for _ in range(2)]
    assert all(drawn[0][generator] != drawn[1][generator] for generator in "abc")


def test_what_a_script_has_started_is_killed_with_it(ranks: Ranks) -> None:
    command = ranks.script(
        "import subprocess, time\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        "tell(child=child.pid)\ntime.sleep(1000)"
    )
    key, told = ranks.start(command)
    deadline = time.monotonic() + LIMIT_S
    while not (told.exists() and told.read_text()):
        assert time.monotonic() < deadline, ranks.logs()
        time.sleep(0.02)
    ranks.server.signal(key, signal.SIGKILL)
    assert ranks.wait_for(Ended, key).status == -signal.SIGKILL
    child = json.loads(told.read_text())["child"]
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


STARTS_ANOTHER = (
    "import subprocess, time\n"
    "child = subprocess.Popen(['sleep', '1000'])\n"
    "tell(child=child.pid, server=os.getppid())\n"
)


@pytest.mark.parametrize(
    ("end", "status"),
    [("raise RuntimeError", 1), ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM)],
)
def test_what_a_failed_script_has_started_has_been_killed_when_its_end_is_told(
    ranks: Ranks, end: str, status: int
) -> None:
    ended, told = ranks.run(ranks.script(f"import signal\n{STARTS_ANOTHER}{end}\n"))
    assert ended == status, ranks.logs()
    until(lambda: not is_running(told["child"]))


KEEPS_SHARED_MEMORY = """
import subprocess, time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory

kept = SharedMemory(create=True, size=1 << 16)
child = subprocess.Popen(["sleep", "1000"])
tell(name=kept.name, tracker=resource_tracker._resource_tracker._pid, child=child.pid)
"""


@pytest.mark.parametrize(
    "end", ["raise RuntimeError", "os.kill(os.getpid(), 9)", "time.sleep(1e3)"]
)
def test_shared_memory_of_a_lost_rank_is_deleted(ranks: Ranks, end: str) -> None:
    """Python's tracker of resources does so, if it outlives what it is the tracker of."""
    key, path = ranks.start(ranks.script(f"{KEEPS_SHARED_MEMORY}{end}\n"))
    until(lambda: path.exists() and path.read_text() != "")
    ranks.server.signal(key, signal.SIGKILL)
    assert ranks.wait_for(Ended, key).status != 0
    told = json.loads(path.read_text())
    until(lambda: not (is_running(told["tracker"]) or is_running(told["child"])))
    assert not Path("/dev/shm", told["name"]).exists()


def test_what_a_completed_script_has_started_goes_on(ranks: Ranks) -> None:
    ended, told = ranks.run(ranks.script(STARTS_ANOTHER))
    assert ended == 0, ranks.logs()
    assert is_running(told["child"])
    os.kill(told["child"], signal.SIGKILL)


@pytest.mark.usefixtures("forked")
def test_what_ranks_have_started_is_killed_when_their_server_is_lost(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    try:
        key, path = ranks.start(ranks.script(f"{STARTS_ANOTHER}time.sleep(1000)\n"))
        until(lambda: path.exists() and path.read_text() != "")
        told = json.loads(path.read_text())
        os.kill(told["server"], signal.SIGKILL)
        assert ranks.wait_for(Ended, key).status == -signal.SIGKILL
        until(lambda: not is_running(told["child"]))
    finally:
        ranks.server.close()


MODULES = {
    "quiet": "print('imported')\n",
    "reads_its_rank": "import os\nRANK = int(os.environ.get('RANK', -1))\n",
    "copies_variables": "import os\nRANK = int(dict(os.environ).get('RANK', -1))\n",
    "seeds": "import random\nimport numpy\nrandom.seed(1234)\nnumpy.random.seed(1234)\n",
    "reads_its_command": "import sys\nOPTIONS = sys.argv[1:]\n",
    "starts_a_thread": (
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
    ),
    "fails": "raise RuntimeError\n",
    "last": "",
    "never_ends": "import time\ntime.sleep(1000)\n",
}


def test_a_script_is_told_to_end_and_not_what_it_has_started(ranks: Ranks) -> None:
    """Workers of a data loader have to outlive the step that the rank finishes."""
    command = ranks.script(
        "import signal, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '300'])\n"
        "def end(*_):\n"
        "    child.kill()\n"
        "    tell(child=child.wait())\n"
        "    sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "open(os.environ['TOLD'] + '.ready', 'w').close()\n"
        "while True: time.sleep(0.05)\n"  # `pause` misses a signal that comes just before it
    )
    key, told = ranks.start(command)
    until(Path(f"{told}.ready").exists)
    ranks.server.signal(key, signal.SIGTERM)
    assert ranks.wait_for(Ended, key).status == 3, ranks.logs()
    assert json.loads(told.read_text()) == {"child": -signal.SIGKILL}


def test_a_program_shares_its_signals_as_a_shell_passes_none_on(ranks: Ranks) -> None:
    shell = "sleep 300 & echo $! > $TOLD.part; mv $TOLD.part $TOLD; wait"
    key, told = ranks.start(Command("sh", "program", ("-c", shell)))
    until(told.exists)
    ranks.server.signal(key, signal.SIGTERM)
    assert ranks.wait_for(Ended, key).status == -signal.SIGTERM, ranks.logs()
    until(lambda: not is_running(int(told.read_text())))


CRASHES_AT_ITS_END = """
import os
class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), getpid=os.getpid):
        if getpid() == pid:
            kill(pid, {number})
last = Last()  # deleted as the interpreter ends, after all exit handlers
"""


def status_and_crash(ranks: Ranks, number: signal.Signals, ending: str) -> tuple[int, int | None]:
    """Of a rank that ends so, and that a signal kills as its Python ends."""
    key, _ = ranks.start(ranks.script(CRASHES_AT_ITS_END.format(number=int(number)) + ending))
    ended = ranks.wait_for(Ended, key)
    return ended.status, ended.crash


@pytest.mark.parametrize(
    ("number", "ending"),
    [
        (signal.SIGABRT, ""),
        (signal.SIGSEGV, "sys.exit(0)"),
        (signal.SIGABRT, "import threading; threading.Timer(0.2, sys.stdout.flush).start()"),
    ],
)
def test_a_rank_that_has_completed_may_crash_as_python_ends(
    ranks: Ranks, number: signal.Signals, ending: str
) -> None:
    assert status_and_crash(ranks, number, ending) == (0, number), ranks.logs()


@pytest.mark.parametrize(
    ("number", "ending"),
    [
        (signal.SIGKILL, ""),
        (signal.SIGABRT, "raise ValueError('no sample')"),
        (signal.SIGABRT, "sys.exit(3)"),
        (signal.SIGABRT, "sys.exit('no sample')"),
        (signal.SIGABRT, "os.abort()"),
        (signal.SIGABRT, "import atexit; atexit.register(os.abort)"),
        (signal.SIGABRT, "import threading; threading.Timer(0.2, os.abort).start()"),
        (signal.SIGABRT, "if child := os.fork(): os.waitpid(child, 0); os.abort()"),
    ],
)
def test_any_other_rank_that_is_killed_has_failed(
    ranks: Ranks, number: signal.Signals, ending: str
) -> None:
    assert status_and_crash(ranks, number, ending) == (-number, None), ranks.logs()


TO_ALL = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


def test_a_signal_to_all_processes_ends_the_ranks_alone(tmp_path: Path) -> None:
    """They end as they do without the process that forks, which would take them along."""
    ranks = Ranks(tmp_path)
    try:
        command = ranks.script(
            "import signal\n"
            f"handlers = [signal.getsignal(getattr(signal, name)) for name in {TO_ALL}]\n"
            "blocked = len(signal.pthread_sigmask(signal.SIG_BLOCK, []))\n"
            "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
            "tell(handlers=[str(each) for each in handlers], blocked=blocked)\n"
            "import time\n"
            "while True:\n    time.sleep(0.02)\n"
        )
        key, told = ranks.start(command)
        until(lambda: told.exists() and told.read_text() != "")
        of_python = [str(signal.getsignal(getattr(signal, name))) for name in TO_ALL]
        assert json.loads(told.read_text()) == {"handlers": of_python, "blocked": 0}
        for name in TO_ALL:
            os.kill(ranks.server._process.pid, getattr(signal, name))
        ranks.server.signal(key, signal.SIGTERM)
        assert ranks.wait_for(Ended, key).status == 7, ranks.logs()
        assert ranks.server.is_alive
    finally:
        ranks.server.close()


def until(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.usefixtures("forked")
def test_modules_are_imported_before_the_fork_where_that_changes_nothing(tmp_path: Path) -> None:
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    ranks = Ranks(tmp_path)
    try:
        command = ranks.script("\n".join(f"import {name}" for name in MODULES))
        seen = ranks.script(
            f"tell(known=[n for n in {list(MODULES)} if n in sys.modules])", "seen.py"
        )
        ranks.server.preload(command)
        known: list[str] = []
        deadline = time.monotonic() + LIMIT_S
        while "last" not in known:
            assert time.monotonic() < deadline, ranks.logs()
            known = ranks.run(seen)[1]["known"]
        assert known == ["quiet", "reads_its_command", "last"]
        for name in ("reads_its_rank", "copies_variables"):
            _, told = ranks.run(ranks.script(f"import {name} as r; tell(rank=r.RANK)"), RANK="2")
            assert told == {"rank": 2}
        _, told = ranks.run(
            ranks.script(
                "import random, numpy, seeds, reads_its_command as r\n"
                "tell(drawn=[random.random(), float(numpy.random.rand())], options=r.OPTIONS)"
            )
        )
        drawn = [random.Random(1234).random(), float(np.random.RandomState(1234).rand())]
        assert told == {"drawn": drawn, "options": ["a", "--b"]}
    finally:
        ranks.server.close()


@pytest.mark.usefixtures("forked")
def test_a_rank_begins_in_the_launchers_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module may change the working directory in the second import only, as this one does."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "moves.py").write_text(
        "import os\nfrom pathlib import Path\n"
        "if Path('tried').exists():\n    os.chdir('/')\nelse:\n    Path('tried').touch()\n"
    )
    ranks = Ranks(tmp_path)
    try:
        command = ranks.script("import sys\ntell(known='moves' in sys.modules, here=os.getcwd())")
        ranks.script("import moves\n", "moving.py")
        ranks.server.preload(Command("moving.py", "script"))
        known = False
        deadline = time.monotonic() + LIMIT_S
        while not known:
            assert time.monotonic() < deadline, ranks.logs()
            status, told = ranks.run(replace(command, target="script.py"))
            assert status == 0, ranks.logs()
            assert told["here"] == str(tmp_path)
            known = told["known"]
    finally:
        ranks.server.close()


@pytest.mark.usefixtures("forked")
def test_a_rank_goes_on_without_the_launchers_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the job was deleted, or its user may not enter it by its path."""
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (tmp_path / "removes.py").write_text(
        "import os\nfrom pathlib import Path\n"
        f"seen = Path({str(tmp_path / 'seen')!r})\n"
        "if seen.exists():\n"
        f"    os.rmdir({str(folder)!r})\n"
        "seen.touch()\n"
    )
    ranks = Ranks(tmp_path)
    try:
        command = ranks.script(
            "import time\n"
            f"while os.path.exists({str(folder)!r}):\n    time.sleep(0.02)\n"
            "time.sleep(0.5)\nsys.exit(7)"
        )
        key, _ = ranks.start(command)
        ranks.server.preload(ranks.script("import removes\n", "remover.py"))
        assert ranks.wait_for(Ended, key).status == 7, ranks.logs()
    finally:
        ranks.server.close()


SLOW = """
import subprocess, time
from pathlib import Path

if Path("tried").exists():
    Path("importing").touch()
    while not Path("go").exists():
        time.sleep(0.02)
    STATUS = subprocess.run(["false"]).returncode
else:
    Path("tried").touch()
"""
"""A module whose second import, that of the process that forks, waits for a file."""


@pytest.fixture
def importing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: None
) -> Iterator[tuple[Ranks, str, Path]]:
    """A server that imports a module for as long as nobody touches `go`, and a rank that waits."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slow.py").write_text(SLOW)
    ranks = Ranks(tmp_path)
    try:
        waits = "while not os.path.exists('end'):\n    time.sleep(0.02)\nsys.exit(7)\n"
        key, told = ranks.start(ranks.script(STARTS_ANOTHER + waits))
        until(lambda: told.exists() and told.read_text() != "")
        ranks.server.preload(ranks.script("import slow\n", "importer.py"))
        until((tmp_path / "importing").exists)
        yield ranks, key, told
    finally:
        (tmp_path / "go").touch()
        ranks.server.close()


def test_a_rank_s_end_is_told_during_an_import(importing: tuple[Ranks, str, Path]) -> None:
    ranks, key, told = importing
    (ranks.folder / "end").touch()
    assert ranks.wait_for(Ended, key).status == 7, ranks.logs()
    until(lambda: not is_running(json.loads(told.read_text())["child"]))
    command = ranks.script("import slow\ntell(status=slow.STATUS)")
    next_key, next_told = ranks.start(command)
    (ranks.folder / "go").touch()
    assert ranks.wait_for(Ended, next_key).status == 0, ranks.logs()
    assert json.loads(next_told.read_text()) == {"status": 1}


def test_a_rank_is_signalled_during_an_import(importing: tuple[Ranks, str, Path]) -> None:
    """The signal for one that is started meanwhile comes after its start."""
    ranks, key, _ = importing
    ranks.server.signal(key, signal.SIGTERM)
    assert ranks.wait_for(Ended, key).status == -signal.SIGTERM, ranks.logs()
    next_key, _ = ranks.start(ranks.script("import time\ntime.sleep(1000)"))
    ranks.server.signal(next_key, signal.SIGKILL)
    (ranks.folder / "go").touch()
    assert ranks.wait_for(Ended, next_key).status == -signal.SIGKILL, ranks.logs()


def test_a_rank_does_not_hold_the_output_of_one_that_was_started_with_it(
    importing: tuple[Ranks, str, Path],
) -> None:
    ranks, _, _ = importing
    first, _ = ranks.start(ranks.script("import time\ntime.sleep(1000)", "first.py"))
    read, write = os.pipe()
    second = ranks.script("print('done')", "second.py")
    ranks.server.start("second", second, {"TOLD": ""}, [write, write])
    os.close(write)
    (ranks.folder / "go").touch()
    ranks.wait_for(Ended, "second")
    with os.fdopen(read, "rb", buffering=0) as output:
        assert output.read(100) == b"done\n"
        assert select.select([output], [], [], 60.0)[0], "the other rank holds the pipe"
        assert output.read(100) == b""
    ranks.server.signal(first, signal.SIGKILL)
    assert ranks.wait_for(Ended, first).status == -signal.SIGKILL, ranks.logs()


def test_a_server_ends_with_its_launcher_during_an_import(
    importing: tuple[Ranks, str, Path],
) -> None:
    ranks, _, told = importing
    ranks.server._socket.close()
    assert ranks.server._process.wait(LIMIT_S) == 0
    until(lambda: not is_running(json.loads(told.read_text())["child"]))


def test_imports_of_a_script(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        "import a.b as c, d\nfrom e import f\nfrom . import g\nif True:\n    import h\n"
        "try:\n    import i\nexcept ImportError:\n    import j\nelse:\n    import k\n"
    )
    assert top_level_imports(Command(str(path), "script")) == ["a.b", "d", "e", "e.f", "i"]
    shutil.copy(path, tmp_path / "__main__.py")
    assert top_level_imports(Command(str(tmp_path), "script")) == ["a.b", "d", "e", "e.f", "i"]
    path.write_text("not python")
    assert top_level_imports(Command(str(path), "script")) == []
    assert top_level_imports(Command(str(tmp_path / "missing.py"), "script")) == []
    assert top_level_imports(Command("package.train", "module")) == ["package"]
    assert imports_of(Command("package.train", "module")) == ["package", "resihp.checkpoint"]
    assert imports_of(Command("program", "program")) == []


@pytest.mark.parametrize(
    ("between", "is_reached"),
    [
        ("os.environ['LIB_HOME'] = '/lib'", False),
        ("os.environ |= {'LIB_HOME': '/lib'}", False),
        ("sys.path.insert(0, '/lib')", False),
        ("a.flag = True", False),
        ("del os.environ['LIB_HOME']", False),
        ("x = a.configure()", False),
        ("if True:\n    os.environ['LIB_HOME'] = '/lib'", False),
        ("with a.settings:\n    pass", False),
        ("'A text.'\nSIZE: int = 2 * 3\nx, y = SIZE, a.z", True),
        ("try:\n    import a\nexcept ImportError:\n    c = None", True),
        ("BEGUN = time.time()", True),
        ("def f():\n    a.configure()\nclass C:\n    def g(self):\n        self.x = 1", True),
    ],
)
def test_imports_after_a_change_of_the_process_are_left_to_the_ranks(
    tmp_path: Path, between: str, is_reached: bool
) -> None:
    path = tmp_path / "script.py"
    path.write_text(f"import a\n{between}\nimport lib\n")
    assert top_level_imports(Command(str(path), "script")) == ["a"] + ["lib"] * is_reached


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """So do processes that a program has started."""
    launcher = (
        "import os, select, sys, time\n"
        "from resihp.launch.fork_server import ForkServer\n"
        "from resihp.launch.options import Command\n"
        "server = ForkServer(os.environ)\n"
        "server.start('0', Command('sh', 'program', ('-c', sys.argv[1])), {}, [1, 2])\n"
        "time.sleep(1000)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", launcher, "sleep 1000 & echo $$ $!; wait"],
        stdout=subprocess.PIPE, text=True, env=environment,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert all(map(is_running, pids))
        process.kill()
    deadline = time.monotonic() + LIMIT_S
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.usefixtures("forked")
def test_a_launcher_with_more_than_a_thousand_open_files(tmp_path: Path) -> None:
    """As one that a service started with all of its own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        ranks = Ranks(tmp_path)
        try:
            assert ranks.run(ranks.script("tell(done=True)")) == (0, {"done": True}), ranks.logs()
        finally:
            ranks.server.close()
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("length", [150_000, 1_000_000])
def test_a_long_command_line(ranks: Ranks, length: int) -> None:
    command = ranks.script("tell(length=sum(map(len, sys.argv[1:])))")
    words = tuple("x" * 100 for _ in range(length // 100))
    assert ranks.run(replace(command, arguments=words)) == (0, {"length": length}), ranks.logs()
