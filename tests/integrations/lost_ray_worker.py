"""A run of Ray Train, of which one worker is lost in its first attempt."""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from pathlib import Path

import ray
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

from resihp.integrations.ray import ResiHPCallback, observe

LOST, LOST_AT, STEPS = 1, 20, 40


def train(folder: str) -> None:
    """Train; in the first attempt the lost worker's process is killed."""
    rank = ray.train.get_context().get_world_rank()
    once = Path(folder, "lost")
    model = prepare_model(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with observe(model, optimizer):
        for step in range(STEPS):
            time.sleep(0.1)
            if rank == LOST and step == LOST_AT and not once.exists():
                once.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.randn(2, 4)).square().mean().backward()
            optimizer.step()


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder")
    folder = str(Path(parser.parse_args().folder).absolute())
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ray-") as sockets:
        ray.init(num_cpus=2, include_dashboard=False, _temp_dir=sockets)
        try:
            run = RunConfig(
                name="example", storage_path=folder, callbacks=[ResiHPCallback()],
                failure_config=FailureConfig(max_failures=1),
            )  # fmt: skip
            scaling = ScalingConfig(num_workers=2)
            TorchTrainer(
                train, train_loop_config=folder, scaling_config=scaling, run_config=run
            ).fit()
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
