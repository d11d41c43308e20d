"""TRL's SFTTrainer on several processes, with one more line.

resihp serve &
torchrun --nproc-per-node 4 examples/trl_sft.py --slow-rank 2
"""

from __future__ import annotations

import random

import torch
from datasets import Dataset
from slow_device import option_parser, pace
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from resihp.integrations.transformers import ResiHPCallback

TOKENS, MICROBATCHES = 64, 2
WORDS = ["<unk>", "<pad>", "<eos>", *(f"w{number}" for number in range(253))]


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of made-up words."""
    plain = Tokenizer(WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>"))
    plain.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"
    )


def documents(count: int) -> Dataset:
    """Return texts of several lengths."""
    draw = random.Random(0)
    lengths = (draw.randint(TOKENS // 4, TOKENS - 1) for _ in range(count))
    return Dataset.from_dict(
        {"text": [" ".join(draw.choices(WORDS[3:], k=length)) for length in lengths]}
    )


def main() -> None:
    """Fine-tune a small Llama."""
    options = option_parser("SFTTrainer of TRL with ResiHP.").parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    pace(model.model.layers, options, MICROBATCHES)
    training = SFTConfig(
        output_dir=options.folder,
        max_length=TOKENS,
        max_steps=options.steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=MICROBATCHES,
        gradient_checkpointing=False,
        bf16=False,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = SFTTrainer(
        model=model,
        args=training,
        processing_class=tokenizer(),
        train_dataset=documents(1200),
        callbacks=[ResiHPCallback()],  # the one line
    )
    trainer.train()


if __name__ == "__main__":
    main()
