"""Models that the runtime can shard, and their interface."""

from .base import Model, Packed, Part
from .gpt2 import Gpt2
from .llama import Llama
from .mixture import Mixture
from .pretrained import from_pretrained, preset, save_pretrained

__all__ = [
    "Gpt2",
    "Llama",
    "Mixture",
    "Model",
    "Packed",
    "Part",
    "from_pretrained",
    "preset",
    "save_pretrained",
]
