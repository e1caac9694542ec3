"""Attention over a sequence that is split among processes (context parallelism)."""

from .smoother import smooth
from .split import Split

__all__ = ["Split", "smooth"]
