"""A trainer that imports the hooks pays for the hooks only."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = [
    "torch", "lightgbm", "sklearn", "scipy", "fastapi", "uvicorn", "pandas", "redis", "pydantic",
    "typer", "rich", "detector", "scheduler", "service",
]  # fmt: skip
LOADED = "; import sys; print(*sorted({name.split('.')[0] for name in sys.modules}))"


def loaded_by(statement: str) -> set[str]:
    command = [sys.executable, "-I", "-c", statement + LOADED]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return set(done.stdout.split())


def test_the_root_loads_next_to_nothing():
    assert not loaded_by("import resihp") & {*HEAVY, "numpy", "urllib3", "msgpack", "logging"}


@pytest.mark.parametrize(
    "statement",
    [
        "import resihp.hooks",
        "import resihp.client",
        "import resihp; m = resihp.Monitor(job='j'); m.step().__enter__(); m.microbatch()",
    ],
)
def test_hooks_and_client_load_no_heavy_library(statement):
    assert not loaded_by(statement) & set(HEAVY)


def test_the_command_names_what_is_not_installed():
    blocked = "import sys; sys.modules['typer'] = None; from resihp.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-I", "-c", blocked],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("resihp: typer is not installed")
    assert "resihp[cli]" in done.stderr


FITS = """
import sys
from detector import Predictor
import numpy as np
rng = np.random.default_rng(0)
rows = np.stack([*rng.integers(100, 4000, (4, 4000)), *np.ones((4, 4000))], axis=1)
fitted = Predictor().fit_correction(rows, np.log(rows[:, 0]) + rng.normal(0, 0.01, 4000))
assert fitted.booster_ is not None
print(*sorted({"lightgbm", "sklearn", "pandas", "pyarrow"} & sys.modules.keys()))
import lightgbm
print(lightgbm.LGBMRegressor(n_estimators=2, verbosity=-1).fit(rows, rows[:, 0]).n_features_)
"""


def test_a_predictor_loads_lightgbm_alone_and_leaves_a_whole_one_to_the_program():
    command = [sys.executable, "-W", "ignore", "-c", FITS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["", "8"]
