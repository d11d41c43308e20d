"""What the demo runs, and the job description that follows from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from resihp.contracts import Job, LayerCost, Layout, ModelShape
from resihp.elastic.models import Llama
from resihp.elastic.optim import Optimizer, warmup

from .dataset import VOCABULARY, PackedText


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """One demo run.

    slow_rank runs at 1/slow_factor of its speed from step slow_at on; dead_rank kills itself
    (SIGKILL) in the middle of step dead_at. `flops_per_ms` is the speed to which a healthy device
    is paced; None runs unpaced.
    """

    steps: int = 72
    dp: int = 2
    pp: int = 2
    tp: int = 2
    tokens: int = 256
    microbatches: int = 8
    slow_rank: int | None = 5
    slow_factor: float = 1.5
    slow_at: int = 22
    dead_rank: int | None = 2
    dead_at: int = 52
    seed: int = 0
    flops_per_ms: float | None = 1.3e6

    @property
    def shape(self) -> ModelShape:
        """A Llama of about 0.4 million parameters."""
        return ModelShape(layers=8, hidden=64, heads=8, kv_heads=4, ffn=176, vocab=VOCABULARY)

    @property
    def layout(self) -> Layout:
        """The regular layout the job starts with."""
        units = self.shape.kv_heads
        return Layout.grid(
            dp=self.dp, pp=self.pp, tp=self.tp, layers=self.shape.layers, units=units
        )

    @property
    def optimizer(self) -> Optimizer:
        """AdamW, tame enough that the order of fp32 sums does not grow into another training."""
        return Optimizer(
            torch.optim.AdamW,
            lr=1.5e-3,
            betas=(0.9, 0.95),
            eps=1e-6,
            weight_decay=0.1,
            foreach=True,
            rate=warmup(10),
        )

    def model(self) -> Llama:
        """The model."""
        return Llama(self.shape, seed=self.seed)

    def data(self) -> PackedText:
        """The microbatches."""
        return PackedText(tokens=self.tokens, seed=self.seed)

    def job(self) -> Job:
        """The job as the sidecar gets to know it."""
        return Job(
            name="demo",
            layout=self.layout,
            microbatches=self.microbatches,
            model=self.shape,
            tokens_per_microbatch=self.tokens,
            device="paced-cpu" if self.flops_per_ms else "cpu",
            cost=self._cost(),
        )

    def _cost(self) -> LayerCost:
        """Time of one mean microbatch on one healthy device, from the operations it takes."""
        model, data = self.model(), self.data()
        whole = {p.key.split(".")[-1]: (0, p.size) for p in model.parameters.layers[0]}
        head = {"norm": (0, 1), "table": (0, self.shape.vocab)}
        samples = [data(step, 0) for step in range(64)]
        layer = sum(model.flops("layers.0", whole, packed) for packed in samples) / len(samples)
        rate = self.flops_per_ms or 1e7
        return LayerCost(
            forward_ms=layer / rate,
            backward_ms=2 * layer / rate,
            head_ms=model.flops("last", head, samples[0]) / rate,
        )
