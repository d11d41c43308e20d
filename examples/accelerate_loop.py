"""A loop with Accelerate on several processes, with one more line.

resihp serve &
torchrun --nproc-per-node 4 examples/accelerate_loop.py --slow-rank 2
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from slow_device import option_parser, pace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import resihp

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


def main() -> None:
    """Train a small model, and evaluate it now and then."""
    options = option_parser("A loop of Accelerate with ResiHP.").parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(), gradient_accumulation_steps=MICROBATCHES
    )
    model = Model()
    pace(model.layers, options, MICROBATCHES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = DataLoader(TensorDataset(torch.randn(1200, 8, WIDTH)), batch_size=2)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

    monitor = resihp.instrument(model, optimizer)  # the one line

    done = 0
    while done < options.steps:
        for (x,) in data:
            with accelerator.accumulate(model):
                loss = (model(x) - x).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            done += accelerator.sync_gradients
            if accelerator.sync_gradients and done % 20 == 0:
                with torch.no_grad():
                    model(x)
                accelerator.print(f"step {done}: loss {loss.item():.4f}")
            if done == options.steps:
                break
    monitor.close()
    accelerator.print(f"{monitor.stats.sent} records sent, {monitor.stats.dropped} lost")
    accelerator.end_training()


if __name__ == "__main__":
    main()
