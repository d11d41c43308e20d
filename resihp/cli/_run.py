"""`resihp run`: the launcher of training jobs."""

from __future__ import annotations

import sys

import typer

from ._app import app

_HELP = """
Start a **training job** on this node, with torchrun's options.

A rank that is lost does not end the job: scripts of the elastic runtime (`train`, `Replicas`) go on
with the others; any other script is started again, from processes that have imported torch and the
script's modules already, with its newest checkpoint in this node's memory.

**Examples**

- `resihp run --nproc-per-node 4 train.py --lr 1e-3`
- `resihp run --nproc-per-node 4 -m package.train`
- `resihp run --nnodes 2:4 --node-rank 1 --rdzv-endpoint HOST:PORT train.py` — 2 to 4 nodes
- `resihp run --join 2 --rdzv-endpoint HOST:PORT train.py` — rank 2 joins a running job

`resihp run -- --help` lists the options.
"""


@app.command(
    "run",
    help=_HELP,
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,  # options after the script are the script's
    },
)
def run_command(context: typer.Context) -> None:
    """Pass all arguments on to the launcher."""
    from resihp.launch.init_process import run_below_init

    run_below_init()
    from resihp.launch.supervisor import main

    sys.exit(main(context.args))
