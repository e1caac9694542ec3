"""Training: `run(Settings(...))` from a kernel to a trained, measured model."""

try:
    import accelerate  # type: ignore[import-untyped]  # noqa: F401
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"training needs {error.name}: pip install 'mercer[train]'", name=error.name
    ) from None

from .checkpoints import DiskFull
from .plan import Plan, plan
from .progress import Progress
from .run import Result, run
from .settings import Settings, read_time

__all__ = ["DiskFull", "Plan", "Progress", "Result", "Settings", "plan", "read_time", "run"]
