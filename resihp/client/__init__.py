"""HTTP to the sidecar."""

from ._client import Client

__all__ = ["Client"]
