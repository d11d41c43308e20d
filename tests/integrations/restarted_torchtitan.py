"""torchtitan's Trainer with its own checkpoints, which it resumes from by itself.

`restarted_torchtitan.py FOLDER EVENT...`; an event `ATTEMPT:RANK:STEP` kills a rank in the middle
of the step after that many.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
FOLDER, EVENTS = Path(sys.argv[1]), sys.argv[2:]
STEPS, SAVED_EVERY = 8, 2
ATTEMPT, RANK = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]

sys.path.insert(0, str(ROOT / "examples"))
os.environ["EXAMPLE_OPTIONS"] = shlex.join(["--steps", str(STEPS), "--folder", str(FOLDER)])
import torchtitan_trainer as example  # noqa: E402


class NumberedDocuments(example.RandomDocuments):  # type: ignore[misc]
    """Documents that are known by their number, which a checkpoint tells."""

    @dataclass(kw_only=True, slots=True)
    class Config(example.RandomDocuments.Config):  # type: ignore[misc]
        """Nothing to set."""

    def __init__(self, config: Config, *, dp_rank: int, **others: Any) -> None:
        super().__init__(config, dp_rank=dp_rank, **others)
        self.drawn, self.dp_rank = 0, dp_rank

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            self.generator.manual_seed(1000 * self.drawn + self.dp_rank)
            step, index = divmod(self.drawn, example.MICROBATCHES)
            if index and f"{ATTEMPT}:{RANK}:{step}" in EVENTS:
                os.kill(os.getpid(), signal.SIGKILL)
            self.drawn += 1
            yield next(super().__iter__())

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.drawn = state_dict["drawn"]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = example.small_llama()
    config = replace(
        config,
        dataloader=NumberedDocuments.Config(),
        checkpoint=replace(config.checkpoint, enable=True, interval=SAVED_EVERY),
    )
    trainer = config.build()
    compute = trainer.forward_backward_step
    with (FOLDER / f"losses-{ATTEMPT}-{RANK}").open("w") as losses:

        def note(**arguments: Any) -> Any:
            loss = compute(**arguments)
            print(json.dumps([trainer.step, float(loss)]), file=losses, flush=True)
            return loss

        trainer.forward_backward_step = note
        trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
