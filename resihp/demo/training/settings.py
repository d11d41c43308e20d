"""Settings of the demo and the job description that follows from them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from resihp.contracts import Job, LayerCost, Layout, ModelShape, Plan
from resihp.elastic.models import Llama
from resihp.elastic.optim import Optimizer, warmup

from .dataset import VOCABULARY, PackedText

_SLOW_STEPS = 8
_SETTLED_STEPS = 4
_STEPS_AFTER = 6


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """Settings of one demo run.

    slow_rank     runs at 1/slow_factor of its speed from step slow_at on
    dead_rank     kills itself (SIGKILL) in the middle of step dead_at, or of a later one if the
                  plan for the slow rank has not been in effect for `_SETTLED_STEPS` by then
    flops_per_ms  speed to which a healthy device is paced, less on a machine that computes too
                  slowly for it; None runs unpaced
    scatter       standard deviation of the time that a paced pass takes, over its mean
    plan_wait_s   pause after each of the steps that the job makes without a plan although the slow
                  rank has been slow for `_SLOW_STEPS`; makes a short run independent of the time
                  that the sidecar takes
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
    scatter: float = 0.02
    plan_wait_s: float = 0.0

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

    def plan(self) -> Plan:
        """The plan the job starts with."""
        return Plan(version=0, layout=self.layout, quotas=self.job().quotas)

    def at(self, flops_per_ms: float | None) -> DemoSettings:
        """The same run at another pace."""
        return replace(self, flops_per_ms=flops_per_ms)

    def undisturbed(self) -> DemoSettings:
        """The same training on one rank, without faults and without pacing."""
        return replace(self, dp=1, pp=1, tp=1, slow_rank=None, dead_rank=None, flops_per_ms=None)

    def dies(self, rank: int, step: int, plan_version: int, since_step: int) -> bool:
        """Test if the script kills a rank in a step under a plan in effect since `since_step`."""
        if rank != self.dead_rank or step < self.dead_at:
            return False
        settled = plan_version > 0 and step >= since_step + _SETTLED_STEPS
        return settled or self.slow_rank is None or step >= self.steps - _STEPS_AFTER

    def wait_s(self, step: int, plan_version: int) -> float:
        """Pause after a step; see `plan_wait_s`."""
        late = self.slow_rank is not None and step >= self.slow_at + _SLOW_STEPS
        return self.plan_wait_s if late and plan_version == 0 else 0.0

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
