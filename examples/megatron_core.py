"""Schedules, DDP and optimizer of Megatron-Core on several processes, with one more line.

resihp serve &
torchrun --nproc-per-node 4 examples/megatron_core.py --slow-rank 2 --pipeline 2
torchrun --nproc-per-node 4 examples/megatron_core.py --slow-rank 2 --pipeline 2 --chunks 2
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import Timers, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import MegatronModule, TransformerConfig
from slow_device import option_parser, pace

from resihp.integrations.megatron import observe

WIDTH, TOKENS, LAYERS, MICROBATCHES = 32, 16, 2, 2


class Layer(torch.nn.Module):
    """Residual layer, cut over the tensor-parallel group."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        options = {"config": config, "init_method": config.init_method, "bias": False}
        self.up = ColumnParallelLinear(WIDTH, 2 * WIDTH, **options)
        self.down = RowParallelLinear(
            2 * WIDTH, WIDTH, input_is_parallel=True, skip_bias_add=False, **options
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` after this layer."""
        hidden, _ = self.up(x)
        out, _ = self.down(torch.relu(hidden))
        return x + out


class Stage(MegatronModule):
    """Layers of one chunk of the model."""

    def __init__(self, config: TransformerConfig, layers: int) -> None:
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder
        self.layers = torch.nn.ModuleList(Layer(config) for _ in range(layers))
        self.received: torch.Tensor | None = None

    def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
        """Take what the stage before has sent; None on the first stage."""
        (self.received,) = tensors

    def forward(
        self, x: torch.Tensor, packed_seq_params: PackedSeqParams | None = None
    ) -> torch.Tensor:
        """Return `x`, or what was received in its place, after the layers of this stage."""
        if self.received is not None:
            x = self.received
        for layer in self.layers:
            x = layer(x)
        return x


def microbatches() -> Iterator[tuple[torch.Tensor, PackedSeqParams]]:
    """Yield random sequences of one packed length, and where the documents in them end."""
    while True:
        ends = [0, *sorted(torch.randperm(TOKENS - 1)[:3].add(1).tolist()), TOKENS]
        lengths = torch.tensor(ends, dtype=torch.int32)
        yield torch.randn(TOKENS, 1, WIDTH), PackedSeqParams("thd", cu_seqlens_q=lengths)


def forward_step(
    data: Iterator[Any], model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    """Return the output of a stage, and the function that computes the loss from the last one's."""
    x, packed = next(data)

    def loss_of(y: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = y.square().mean()
        return loss, {"loss": loss.detach()}

    return model(x, packed_seq_params=packed), loss_of


def reduce_gradients(model: list[DistributedDataParallel], *_: Any, **__: Any) -> None:
    """Wait for the sums of the gradients; there are no embeddings to be kept equal."""
    for chunk in model:
        chunk.finish_grad_sync()


def stand_in_for_cuda() -> None:
    """Let Megatron-Core, which names the CUDA device in many places, run on a CPU."""
    zeros, tensor = torch.zeros, torch.tensor

    def on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
            return make(*args, device="cpu" if device == "cuda" else device, **kwargs)

        return made

    torch.zeros, torch.tensor = on_cpu(zeros), on_cpu(tensor)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None


def main() -> None:
    """Train a small model."""
    parser = option_parser("Schedules of Megatron-Core with ResiHP.")
    parser.add_argument("--pipeline", type=int, default=1, help="stages of the pipeline")
    parser.add_argument("--chunks", type=int, default=1, help="model chunks of each rank")
    parser.add_argument("--tensor", type=int, default=1, help="size of a tensor-parallel group")
    options = parser.parse_args()
    torch.set_num_threads(1)
    has_cuda = torch.cuda.is_available()
    if has_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        stand_in_for_cuda()
    torch.distributed.init_process_group("nccl" if has_cuda else "gloo")
    depth, chunks = options.pipeline, options.chunks
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tensor,
        pipeline_model_parallel_size=depth,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
    )
    torch.manual_seed(parallel_state.get_data_parallel_rank())
    config = TransformerConfig(
        num_layers=LAYERS * depth,
        hidden_size=WIDTH,
        num_attention_heads=2,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=options.tensor,
        pipeline_model_parallel_size=depth,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        use_cpu_initialization=not has_cuda,
        batch_p2p_sync=has_cuda,
        timers=Timers(log_level=0, log_option="max"),
    )
    stages = [Stage(config, LAYERS // chunks) for _ in range(chunks)]
    for stage in stages:
        pace(stage.layers, options, MICROBATCHES)
    model = [
        DistributedDataParallel(config, DistributedDataParallelConfig(), stage) for stage in stages
    ]
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, clip_grad=0.0), model)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = reduce_gradients
    run = get_forward_backward_func()
    data = [microbatches() for _ in model]

    with observe(model, optimizer) as training:  # the one line
        for step in range(options.steps):
            for chunk in model:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            losses = run(
                forward_step_func=forward_step,
                data_iterator=data,
                model=model,
                num_microbatches=MICROBATCHES,
                seq_length=TOKENS,
                micro_batch_size=1,
            )
            optimizer.step()
            if losses and step % 10 == 9:
                loss = losses[-1]["loss"].item()
                print({"step": step, "loss": loss, **training.metrics()})  # noqa: T201
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
