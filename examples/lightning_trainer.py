"""Lightning's Trainer on several processes, with one more line.

resihp serve &
torchrun --nproc-per-node 4 examples/lightning_trainer.py --slow-rank 2 --strategy fsdp
"""

from __future__ import annotations

import os
from typing import Any

import lightning
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from slow_device import option_parser, pace
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader, TensorDataset

from resihp.integrations.lightning import ResiHPCallback

WIDTH, LAYERS, MICROBATCHES = 32, 2, 2


class Model(lightning.LightningModule):
    """Residual layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.is_sharded = False

    def configure_model(self) -> None:
        """Shard the layers by FSDP2 if the strategy leaves that to the model."""
        if self.device_mesh is not None and not self.is_sharded:
            self.is_sharded = True
            for layer in self.layers:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """Return the loss."""
        (x,) = batch
        y = x
        for layer in self.layers:
            y = y + torch.relu(layer(y))
        return (y - x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class AnyDeviceFSDPStrategy(FSDPStrategy):
    """FSDP on CPUs too, which Lightning refuses."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        if self.root_device.type != "cpu":
            return super()._setup_model(model)
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


STRATEGIES = {
    "ddp": DDPStrategy,
    "fsdp": AnyDeviceFSDPStrategy,
    "fsdp2": lambda: ModelParallelStrategy(
        data_parallel_size=int(os.environ["WORLD_SIZE"]), tensor_parallel_size=1
    ),
}


def main() -> None:
    """Train a small model."""
    parser = option_parser("Trainer of Lightning with ResiHP.")
    parser.add_argument("--strategy", choices=STRATEGIES, default="ddp")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model()
    pace(model.layers, options, MICROBATCHES)
    trainer = lightning.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=STRATEGIES[options.strategy](),
        max_steps=options.steps,
        accumulate_grad_batches=MICROBATCHES,
        logger=CSVLogger(options.folder),
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[ResiHPCallback()],  # the one line
    )
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(1200, 8, WIDTH)), batch_size=2))


if __name__ == "__main__":
    main()
