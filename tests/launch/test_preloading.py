"""Modules are imported before the ranks are forked only if that changes nothing for a rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 300.0
LEFT_TO_RANKS = {
    "copies_variables": "import os\nENV = dict(os.environ)\n",
    "goes_through_variables": "import os\nENV = [key for key, _ in os.environ.items()]\n",
    "unpacks_variables": "import os\nENV = {**os.environ}\n",
    "copies_by_method": "import os\nENV = os.environ.copy()\n",
    "sees_devices": "import os\nDEVICES = os.environ.get('CUDA_VISIBLE_DEVICES')\n",
    "sees_a_plan": "import os\nPLAN = os.getenv('RESIHP_PLAN')\n",
    "sees_bytes": "import os\nRANK = os.environb.get(b'RANK')\n",
    "sets_a_variable": "import os\nos.environ['MASTER_PORT'] = '1'\n",
    "seeds": "import random\nrandom.seed(1234)\n",
    "seeds_numpy": "import numpy\nnumpy.random.seed(1234)\n",
    "seeds_torch": "import torch\ntorch.manual_seed(1234)\n",
    "draws": "import random\nX = random.random()\n",
    "draws_by_name": "from random import choice\nX = choice([1, 2])\n",
    "draws_of_numpy": "import numpy\nX = numpy.random.rand()\n",
    "has_a_generator": "import random\nR = random.Random()\n",
    "has_a_generator_of_numpy": "import numpy\nR = numpy.random.default_rng()\n",
    "has_a_name": "import uuid\nRUN = uuid.uuid4().hex\n",
    "has_a_secret": "import secrets\nRUN = secrets.token_hex(4)\n",
    "knows_its_process": "import os\nPID = os.getpid()\n",
    "knows_its_time": "import time\nBEGUN = time.monotonic()\n",
    "asks_in_a_class": "import os\nclass Settings:\n    pid = os.getpid()\n",
    "asks_within": "import knows_its_process\n",
    "moves": "import os\nos.chdir('/')\n",
    "moves_the_path": "import sys\nsys.path.insert(0, '/')\n",
    "masks": "import os\nos.umask(0o31)\n",
    "handles_a_signal": "import signal\nsignal.signal(signal.SIGTERM, lambda *_: None)\n",
    "keeps_a_file": "FILE = open(__file__)\n",
    "has_a_thread": "import threading\nthreading.Thread(target=threading.Event().wait).start()\n",
}
PRELOADED = {
    "asks_later": "import os, uuid\ndef name():\n    return uuid.uuid4(), dict(os.environ)\n",
    "reads_another_variable": "import os\nHOME = os.environ.get('HOME')\n",
    "has_a_seeded_generator": (
        "import random, numpy\nR, N = random.Random(7), numpy.random.default_rng(7)\n"
    ),
    "reads_a_file": "with open(__file__) as file:\n    TEXT = file.read()\n",
    "has_records": "import dataclasses\n@dataclasses.dataclass\nclass Point:\n    x: int\n",
    "site-packages/a_library": (
        "import os, random, time\nENV, PID, R = dict(os.environ), os.getpid(), random.Random()\n"
        "NUMBER, BEGUN = random.getrandbits(8), time.time()\n"
    ),
    "uses_a_library": "import a_library\n",
    "site-packages/has_a_thread_of_jemalloc": (
        "import threading\nthread = threading.Thread(target=threading.Event().wait)\n"
        "thread.start()\nwith open(f'/proc/self/task/{thread.native_id}/comm', 'w') as name:\n"
        "    name.write('jemalloc_bg_thd')\n"
    ),
}
MAKES_NAMES = """
import random

def __getattr__(name):
    if name == "Seeded":
        random.seed(1)
    if name in ("Seeded", "Model"):
        return __import__("dbm.dumb")
    raise AttributeError(name)
"""
"""A library that imports what it has when it is asked for it."""
TRIALS = """
import json, os, sys
import torch
from resihp.launch.preloading import can_be_preloaded

found = {}
for name in sys.argv[1:]:
    if not (pid := os.fork()):
        os._exit(not can_be_preloaded(name))
    found[name] = os.waitpid(pid, 0)[1] == 0
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bool]:
    """Answer for each module, tried in a process with torch as the one that forks ranks."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "site-packages").mkdir()
    (folder / "site-packages/makes_names.py").write_text(MAKES_NAMES)
    for name, text in (LEFT_TO_RANKS | PRELOADED).items():
        (folder / f"{name}.py").write_text(text)
    paths = [str(Path(__file__).parents[2]), str(folder), str(folder / "site-packages")]
    names = [Path(name).name for name in LEFT_TO_RANKS | PRELOADED]
    names += [f"makes_names.{name}" for name in ("Model", "Seeded", "Other")]
    done = subprocess.run(
        [sys.executable, "-c", TRIALS, *names],
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "RESIHP_URL": "http://127.0.0.1:1",
            "CUDA_VISIBLE_DEVICES": "0",
        },
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, bool] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", LEFT_TO_RANKS)
def test_a_module_that_differs_between_ranks_is_left_to_them(
    name: str, trials: dict[str, bool]
) -> None:
    assert not trials[name]


@pytest.mark.parametrize("name", PRELOADED)
def test_a_module_that_is_alike_for_all_ranks_is_preloaded(
    name: str, trials: dict[str, bool]
) -> None:
    assert trials[Path(name).name]


def test_a_name_that_a_library_makes_when_asked_is_preloaded(trials: dict[str, bool]) -> None:
    assert trials["makes_names.Model"]
    assert not trials["makes_names.Seeded"]
    assert not trials["makes_names.Other"]


@pytest.mark.parametrize(
    ("name", "is_asked_for"), [("makes_names.Model", True), ("makes_names_too.Model", False)]
)
def test_only_libraries_are_asked_for_names(name: str, is_asked_for: bool, tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages/makes_names.py").write_text(MAKES_NAMES)
    (tmp_path / "makes_names_too.py").write_text(MAKES_NAMES)
    paths = [str(Path(__file__).parents[2]), str(tmp_path), str(tmp_path / "site-packages")]
    asked = "import sys; from resihp.launch.preloading import preload; preload(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", f"{asked}; print('dbm.dumb' in sys.modules)", name],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, timeout=LIMIT_S, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == str(is_asked_for)
