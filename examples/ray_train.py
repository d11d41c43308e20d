"""A loop of Ray Train on several workers of this machine, with two more lines.

resihp serve &
python examples/ray_train.py --workers 4 --slow-rank 2
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import nullcontext
from pathlib import Path

import ray
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from slow_device import option_parser, pace
from torch import nn

from resihp.integrations.ray import ResiHPCallback, observe

WIDTH, LAYERS, MICROBATCHES = 32, 2, 2


class Model(nn.Module):
    """Residual layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` after all layers."""
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x


def train(options: argparse.Namespace) -> None:
    """Train a small model on each worker."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model()
    pace(model.layers, options, MICROBATCHES)
    model = prepare_model(model)  # DistributedDataParallel
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with observe(model, optimizer) as training:  # the first line
        for step in range(options.steps):
            for index in range(MICROBATCHES):
                is_last = index == MICROBATCHES - 1 or not hasattr(model, "no_sync")
                with nullcontext() if is_last else model.no_sync():
                    x = torch.randn(2, 8, WIDTH)
                    loss = (model(x) - x).square().mean()
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 9:
                ray.train.report({"step": step, "loss": loss.item(), **training.metrics()})


def main() -> None:
    """Start Ray on this machine, train, and stop Ray."""
    parser = option_parser("A loop of Ray Train with ResiHP.")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--name", default="ray-train", help="name of the run, and of the job")
    parser.add_argument("--retries", type=int, default=0, help="new attempts after a failure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ray-") as sockets:  # their paths must be short
        ray.init(num_cpus=options.workers, include_dashboard=False, _temp_dir=sockets)
        try:
            trainer = TorchTrainer(
                train,
                train_loop_config=options,
                scaling_config=ScalingConfig(num_workers=options.workers),
                run_config=RunConfig(
                    name=options.name,
                    storage_path=str(Path(options.folder).absolute()),
                    failure_config=FailureConfig(max_failures=options.retries),
                    callbacks=[ResiHPCallback()],  # the second line
                ),
            )
            trainer.fit()
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
