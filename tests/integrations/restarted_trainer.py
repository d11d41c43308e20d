"""A training with transformers as users write it, which resumes from its newest checkpoint.

`restarted_trainer.py FOLDER EVENT...`; an event `ATTEMPT:RANK:STEP` kills a rank in the middle of
the step after that many, `any:RANK:STEP` raises an error there in each attempt.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from tests.integrations.quota_trainings import SAMPLES, data

STEPS, SAVED_EVERY = 12, 2
ATTEMPT, RANK = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]


class Ends(TrainerCallback):  # type: ignore[misc]
    """Ends this rank where an event says so."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        place = f"{RANK}:{state.global_step}"
        if f"{ATTEMPT}:{place}" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)
        if f"any:{place}" in sys.argv:
            raise ValueError(f"no sample after step {state.global_step}")


def main() -> None:
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=SAMPLES, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    arguments = TrainingArguments(
        output_dir=str(folder / "checkpoints"), max_steps=STEPS, logging_steps=1,
        save_strategy="steps", save_steps=SAVED_EVERY, gradient_accumulation_steps=2,
        per_device_train_batch_size=2, report_to="none", use_cpu=True, disable_tqdm=True,
        learning_rate=0.03,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=data(), callbacks=[Ends()])
    taken = (folder / f"taken-{ATTEMPT}-{RANK}").open("w")

    def note(module: Any, args: Any, inputs: dict[str, torch.Tensor]) -> None:
        samples = inputs["input_ids"][:, 0].tolist()
        print(json.dumps([trainer.state.global_step, samples]), file=taken, flush=True)

    model.register_forward_pre_hook(note, with_kwargs=True)
    (folder / "checkpoints").mkdir(exist_ok=True)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder / "checkpoints")))
    losses = {one["step"]: one["loss"] for one in trainer.state.log_history if "loss" in one}
    if trainer.is_world_process_zero():
        (folder / "losses").write_text(json.dumps(losses))
    taken.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
