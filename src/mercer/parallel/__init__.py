"""Attention over a sequence that is split among processes (context parallelism)."""

from .attention import attend
from .smoother import smooth
from .split import Split
from .vicinity import vicinity

__all__ = ["Split", "attend", "smooth", "vicinity"]
