"""Where the published traces are, and small recordings made up on the spot."""

import os
from pathlib import Path

import pytest

from resihp.testing.synthetic_traces import Recipe, Trouble, record, write_whatif


@pytest.fixture(scope="session")
def published():
    """Folder with the published traces; skips where there is none."""
    named = os.environ.get("RESIHP_TRACES")
    folder = Path(named) if named else Path(__file__).parents[3] / "shared" / "traces"
    if not (folder / "trace-ST.parquet").is_file():
        pytest.skip("RESIHP_TRACES names no folder with the published traces")
    return folder


@pytest.fixture(scope="session")
def slow_trace(tmp_path_factory):
    """Parquet of a job with a device that becomes 1.5 times slower at step 8 of 24."""
    path = tmp_path_factory.mktemp("trace") / "trace-slow.parquet"
    trouble = Trouble(replica=2, stage=1, factor=1.5, since=8)
    recipe = Recipe(dp=6, pp=3, microbatches=4, steps=24, work_spread=0.02, troubles=(trouble,))
    write_whatif(path, record(recipe, seed=2))
    return path
