"""Models in Hugging Face's format: configuration, tensor names, files."""

from .folder import from_pretrained, save_pretrained
from .presets import preset

__all__ = ["from_pretrained", "preset", "save_pretrained"]
