"""Trainings of transformers on several ranks, with and without quotas, and what each step had.

Run by torchrun; every training writes FOLDER/NAME-RANK.json and FOLDER/NAME-RANK.pt.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from resihp.integrations.transformers import ResiHPCallback
from tests.integrations.quota_plans import OnePlan

ACCUMULATION, SAMPLES, TOKENS = 3, 57, 8
EVEN_STEPS = 2
"""Behind this many steps the first rank has read the plan."""


class Waits(TrainerCallback):  # type: ignore[misc]
    """Lets the first rank wait behind an early step until the plan was read."""

    def __init__(self, plans: OnePlan) -> None:
        self._plans, self._steps = plans, 0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._steps += 1
        if self._steps == EVEN_STEPS:
            self._plans.until_read()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._plans.until_told()


class LeavesAStep(TrainerCallback):  # type: ignore[misc]
    """Ends the first epoch in the middle of a step."""

    def __init__(self) -> None:
        self._has_left = False

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._has_left and state.global_step == 1:
            self._has_left = control.should_epoch_stop = True


class MeanModel(nn.Module):
    """A model whose loss is a mean of its own, and that has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(SAMPLES, 8), nn.Linear(8, SAMPLES)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.head(self.embedding(input_ids))
        loss = nn.functional.cross_entropy(out.flatten(0, 1), input_ids.flatten())
        return {"loss": loss, "logits": out}


class GatheringTrainer(Trainer):  # type: ignore[misc]
    """Gathers a metric in each microbatch, as TRL's trainers do."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.accelerator.gather(torch.zeros(1))
        return loss


def data() -> list[dict[str, torch.Tensor]]:
    """Samples that begin with their number, with labels of unequal length."""
    tokens = torch.randint(SAMPLES, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(1))
    tokens[:, 0] = torch.arange(SAMPLES)
    labels = tokens.clone()
    for number, row in enumerate(labels):
        row[2 + number % (TOKENS - 2) :] = -100
    return [{"input_ids": x, "labels": y} for x, y in zip(tokens, labels, strict=True)]


def train(
    name: str, folder: Path, *, quotas: tuple[int, ...] = (), mean: bool = False,
    kind: type[Any] = Trainer, resume: Any = None, waits: bool = True,
    others: tuple[Any, ...] = (), **arguments: Any,
) -> None:  # fmt: skip
    """Train, and write down the samples of each step of this rank, the log and the model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=SAMPLES, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1,
    )  # fmt: skip
    model = MeanModel() if mean else LlamaForCausalLM(config)
    given = {
        "output_dir": str(folder / "checkpoints"), "num_train_epochs": 3, "logging_steps": 1,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": ACCUMULATION,
        "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True,
        "optim": "sgd", "learning_rate": 0.3, **arguments,
    }  # fmt: skip
    plans = OnePlan(*quotas) if quotas else None
    callbacks = list(others)
    if plans is not None:
        callbacks += [ResiHPCallback(quotas=plans, url="http://127.0.0.1:9")]
        callbacks += [Waits(plans)] if waits else []
    trainer = kind(
        model=model, args=TrainingArguments(**given), train_dataset=data(), callbacks=callbacks
    )
    taken: dict[int, list[list[int]]] = defaultdict(list)

    def note(module: nn.Module, args: Any, inputs: dict[str, torch.Tensor]) -> None:
        taken[trainer.state.global_step].append(inputs["input_ids"][:, 0].tolist())

    model.register_forward_pre_hook(note, with_kwargs=True)
    trainer.train(resume_from_checkpoint=resume)
    rank = dist.get_rank()
    told = plans.told if plans else []
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    kept = {"taken": taken, "log": log, "told": told, "steps": trainer.state.global_step}
    (folder / f"{name}-{rank}.json").write_text(json.dumps(kept))
    torch.save(model.state_dict(), folder / f"{name}-{rank}.pt")


def main() -> None:
    """Run all trainings."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    # Python 3.11 hangs in a worker that is forked while a thread of torch asks for the interpreter.
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_forkserver_preload(["tests.integrations.quota_trainings"])
    train("plain", folder)
    train(
        "quotas", folder, quotas=(5, 3, 1), save_strategy="steps", save_steps=6,
        dataloader_num_workers=1,
    )  # fmt: skip
    checkpoint = str(folder / "checkpoints" / "checkpoint-6")
    train("resumed", folder, quotas=(1, 2, 6), resume=checkpoint)
    train("plain mean", folder, mean=True, max_steps=6)
    train("quotas mean", folder, mean=True, max_steps=6, quotas=(2, 1, 6))
    train("gathers", folder, kind=GatheringTrainer, max_steps=4, quotas=(5, 3, 1))
    train(
        "own tokens", folder, max_steps=2, quotas=(5, 3, 1), waits=False,
        average_tokens_across_devices=False,
    )  # fmt: skip
    train("left", folder, others=(LeavesAStep(),), max_steps=6, quotas=(5, 3, 1), waits=False)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
