"""torchtitan's Trainer on several processes, with one more line in its configuration.

resihp serve &
torchrun --nproc-per-node 4 examples/torchtitan_trainer.py --slow-rank 2

On accelerators torchtitan's own command does the same, with the configuration function below:
torchrun --nproc-per-node 4 -m torchtitan.train --module torchtitan_trainer --config small_llama
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from slow_device import option_parser, pace
from torchtitan_on_cpu import accept_microbatches, import_torchtitan, reduce_by_sums

import_torchtitan()

from torchtitan import train  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from resihp.integrations.torchtitan import observed  # noqa: E402

OPTIONS = "EXAMPLE_OPTIONS"
TOKENS, VOCABULARY, LAYERS, MICROBATCHES = 64, 2048, 2, 2


class RandomDocuments(BaseDataLoader):
    """Batches of random tokens, two documents in a row, as positions that restart tell."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Nothing to set."""

    def __init__(self, config: Config, *, local_batch_size: int, dp_rank: int, **_: Any) -> None:
        self.rows = local_batch_size
        self.generator = torch.Generator().manual_seed(dp_rank)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        positions = torch.arange(TOKENS // 2).repeat(self.rows, 2)
        while True:
            tokens = torch.randint(VOCABULARY, (self.rows, TOKENS), generator=self.generator)
            yield {"input": tokens, "positions": positions}, tokens

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: tokens are drawn anew."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing."""


class NoTokenizer(BaseTokenizer):
    """In place of a tokenizer, which random tokens do not need."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to set."""

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        """Return no tokens."""
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        """Return no text."""
        return ""

    def get_vocab_size(self) -> int:
        """Return the number of tokens."""
        return VOCABULARY


def small_llama() -> Trainer.Config:
    """Return the configuration of a small Llama on emulated devices."""
    options = command_line().parse_args(shlex.split(os.environ.get(OPTIONS, "")))
    stages = options.pipeline_stages
    replicas = int(os.environ["WORLD_SIZE"]) // (stages * options.tensor_ranks)
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:LAYERS]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    parallelize, pipeline = spec.parallelize_fn, spec.pipelining_fn

    def parallelize_and_pace(model: torch.nn.Module, **arguments: Any) -> torch.nn.Module:
        model = parallelize(model, **arguments)
        reduce_by_sums(model)
        pace(model.layers.values(), options, MICROBATCHES)
        return model

    def build_pipeline(*arguments: Any, **options: Any) -> Any:
        schedule, *rest = pipeline(*arguments, **options)
        accept_microbatches(schedule)
        return schedule, *rest

    config = Trainer.Config(
        model_spec=replace(spec, parallelize_fn=parallelize_and_pace, pipelining_fn=build_pipeline),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        tokenizer=NoTokenizer.Config(),
        dataloader=RandomDocuments.Config(),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=2 * MICROBATCHES if stages > 1 else 2,
            global_batch_size=2 * MICROBATCHES * replicas,
            seq_len=TOKENS,
            steps=options.steps,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            spmd_backend="partial_dtensor",  # the others need a torch newer than 2.13
            pipeline_parallel_degree=stages,
            tensor_parallel_degree=options.tensor_ranks,
            pipeline_parallel_schedule="1F1B",
            pipeline_parallel_microbatch_size=2,
        ),
        metrics=MetricsProcessor.Config(log_freq=5, enable_tensorboard=True),
        activation_checkpoint=None,
        dump_folder=options.folder,
    )
    return observed(config)  # the one line


def command_line() -> Any:
    """Return the parser of this example's options."""
    parser = option_parser("Trainer of torchtitan with ResiHP.")
    parser.add_argument("--pipeline-stages", type=int, default=1)
    parser.add_argument("--tensor-ranks", type=int, default=1)
    return parser


def main() -> None:
    """Train as torchtitan's own command does."""
    command_line().parse_args()
    torch.set_num_threads(1)
    os.environ[OPTIONS] = shlex.join(sys.argv[1:])
    sys.argv[1:] = ["--module", Path(__file__).stem, "--config", small_llama.__name__]
    train.main()


if __name__ == "__main__":
    main()
