"""Hugging Face's Trainer on several processes, with one more line.

resihp serve &
torchrun --nproc-per-node 4 examples/transformers_trainer.py --slow-rank 2 --quotas
"""

from __future__ import annotations

import torch
from slow_device import option_parser, pace
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from resihp.integrations.transformers import ResiHPCallback

TOKENS, VOCABULARY, MICROBATCHES = 64, 256, 4


class RandomTokens(Dataset[dict[str, torch.Tensor]]):
    """Sequences of random tokens."""

    def __init__(self, count: int) -> None:
        self.tokens = torch.randint(VOCABULARY, (count, TOKENS))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[at], "labels": self.tokens[at]}


def main() -> None:
    """Train a small Llama."""
    parser = option_parser("Trainer of transformers with ResiHP.")
    parser.add_argument("--quotas", action="store_true", help="relieve a slow rank, live")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    pace(model.model.layers, options, MICROBATCHES)
    training = TrainingArguments(
        output_dir=options.folder,
        max_steps=options.steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=MICROBATCHES,
        eval_strategy="steps",
        eval_steps=20,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=RandomTokens(2400),
        eval_dataset=RandomTokens(8),
        callbacks=[ResiHPCallback(quotas=options.quotas)],  # the one line
    )
    trainer.train()


if __name__ == "__main__":
    main()
