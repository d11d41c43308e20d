"""A loop with Accelerate in which a slow rank gets fewer microbatches, live.

resihp serve &
torchrun --nproc-per-node 4 examples/accelerate_quotas.py --slow-rank 2
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from slow_device import option_parser, pace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resihp.integrations.accelerate import QuotaSteps

WIDTH, LAYERS, MICROBATCHES = 32, 2, 4


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
    """Train a small model."""
    options = option_parser("A loop of Accelerate with quotas.").parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())  # accumulation: below
    model = Model()
    pace(model.layers, options, MICROBATCHES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = DataLoader(TensorDataset(torch.randn(1200, 8, WIDTH)), batch_size=2, shuffle=True)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

    with QuotaSteps(model, optimizer, data, accumulation=MICROBATCHES) as steps:
        while steps.done < options.steps:
            for step in steps:  # of one pass over the data
                for (x,) in step:  # this rank's batches
                    with step.sync(model):
                        loss = (model(x) - x).square().mean()
                        accelerator.backward(loss * step.scale)
                optimizer.step()
                optimizer.zero_grad()
                if step.number % 10 == 9:
                    accelerator.print(f"loss {loss.item():.4f} quotas", *step.quotas, flush=True)
                if steps.done == options.steps:
                    break
    accelerator.end_training()


if __name__ == "__main__":
    main()
