"""Models that the runtime can lay out, and the contract that makes them so."""

from .contract import Model, Packed, Part
from .gpt2 import Gpt2
from .llama import Llama
from .mixture import Mixture

__all__ = ["Gpt2", "Llama", "Mixture", "Model", "Packed", "Part"]
