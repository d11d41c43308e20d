"""Models that the elastic runtime can lay out, and the contract that makes one so."""

from .contract import Model, Packed, Part
from .llama import Llama

__all__ = ["Llama", "Model", "Packed", "Part"]
