"""DeepSpeed's pipeline on several processes, with one more line.

resihp serve &
torchrun --nproc-per-node 4 examples/deepspeed_pipeline.py --slow-rank 2
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from deepspeed.pipe import PipelineModule
from slow_device import option_parser, pace
from torch import nn

from resihp.integrations.deepspeed import observe

WIDTH, STAGES, LAYERS, MICROBATCHES = 32, 2, 2, 4


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield inputs and labels."""
    while True:
        x = torch.randn(2, 8, WIDTH)
        yield x, x


if os.environ.get("DS_ACCELERATOR") == "cpu":  # a kernel that a compiler of C++ would build first
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def main() -> None:
    """Train a small model in two stages."""
    options = option_parser("DeepSpeed's pipeline with ResiHP.").parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    deepspeed.init_distributed()
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(STAGES * LAYERS)]
    pace(layers, options, MICROBATCHES)
    model = PipelineModule(
        layers, num_stages=STAGES, loss_fn=nn.MSELoss(), partition_method="uniform"
    )
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": MICROBATCHES,
            "csv_monitor": {"enabled": True, "output_path": options.folder, "job_name": "csv"},
        },
    )

    observer = observe(engine)  # the one line

    data = batches()
    for _ in range(options.steps):
        engine.train_batch(data)
    observer.close()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
