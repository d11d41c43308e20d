"""A loop with DeepSpeed's engine on several processes, with one more line.

resihp serve &
torchrun --nproc-per-node 4 examples/deepspeed_engine.py --slow-rank 2 --zero 2
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from slow_device import option_parser, pace
from torch import nn

from resihp.integrations.deepspeed import observe

WIDTH, LAYERS, MICROBATCHES = 32, 2, 2


class Model(nn.Module):
    """Residual layers, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss on `x`."""
        y = x
        for layer in self.layers:
            y = y + torch.relu(layer(y))
        return (y - x).square().mean()


if os.environ.get("DS_ACCELERATOR") == "cpu":  # a kernel that a compiler of C++ would build first
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def main() -> None:
    """Train a small model, and evaluate it now and then."""
    parser = option_parser("A loop of DeepSpeed with ResiHP.")
    parser.add_argument("--zero", type=int, choices=range(4), default=2, help="stage of ZeRO")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model()
    pace(model.layers, options, MICROBATCHES)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": MICROBATCHES,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": options.zero},
            "zero_allow_untested_optimizer": True,
            "csv_monitor": {"enabled": True, "output_path": options.folder, "job_name": "csv"},
        },
    )

    observer = observe(engine)  # the one line

    while engine.global_steps < options.steps:
        loss = engine(torch.randn(2, 8, WIDTH, device=engine.device))
        engine.backward(loss)
        engine.step()
        if engine.is_gradient_accumulation_boundary() and engine.global_steps % 20 == 0:
            with torch.no_grad():
                engine(torch.randn(2, 8, WIDTH, device=engine.device))
    observer.close()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
