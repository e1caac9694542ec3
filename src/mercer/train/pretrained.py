"""Which `init` is a model of transformers, and what its settings may be.

Such a run has the preset "pretrained": its shape is that of the model, and its attention is what
`kernel`, `token_kernels` and the options of `patch` say.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from .. import parse
from ..storage import stored

if TYPE_CHECKING:
    from .settings import Settings

PRETRAINED = "pretrained"
# Arguments of `hf.patch` that are given as options.
OPTIONS = ("layers", "start")
AS_SOFTMAX = "as-softmax"


def is_of_transformers(init: str) -> bool:
    """Whether `init` names a model of transformers, and no run or saved model of Mercer.

    A folder says it in its config. A name without a folder is one on the hub.
    """
    path = Path(init).expanduser()
    if path.suffix == ".gguf":
        return True
    if not path.exists():
        # `runs/nam` beside the folder `runs` is a mistake in a path.
        known = len(path.parts) > 1 and Path(path.parts[0]).is_dir()
        return not known and re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", init) is not None
    run = _read(path)
    if "model_type" not in run and run.get("preset") == PRETRAINED:
        return True
    return not str(run.get("model_type", "mercer-")).startswith("mercer-")


def weights_of(init: str) -> str:
    """Where the model is: `init` itself, or the model in the folder of a run."""
    path = Path(init).expanduser()
    if path.is_dir() and "model_type" not in _read(path):
        if (path / "model" / "config.json").is_file():
            return str(path / "model")
        raise ValueError(f"the run in {init} has not ended: it has no model to start from")
    return init


def check(settings: Settings) -> None:
    """Raise ValueError for settings that such a run does not have."""
    if settings.init is None or settings.task != "lm":
        raise ValueError(
            "the preset pretrained is for task lm and init, a language model of transformers"
        )
    for name in ("system", "position", "value", "filter", "overrides"):
        if getattr(settings, name):
            raise ValueError(
                f"{name} is for models of Mercer, but init={settings.init!r} is one of "
                "transformers, which keeps its own: give kernel or token_kernels"
            )
    if settings.evaluate_by == "memory":
        raise ValueError(
            f"evaluate_by memory is for models of Mercer, and init={settings.init!r} is one of "
            "transformers"
        )
    if settings.context_parallel > 1:
        raise ValueError(
            f"context_parallel is for models of Mercer, and init={settings.init!r} is one of "
            "transformers"
        )
    options = settings.system_options
    for name in options:
        if name not in OPTIONS:
            raise ValueError(
                f"with init={settings.init!r} an option is one of {', '.join(OPTIONS)}, got {name}"
            )
        if settings.kernel is None:
            raise ValueError(f"the option {name} needs a kernel")
    if options.get("start") is not None and settings.steps is None:
        raise ValueError(f"the option start={options['start']} needs a number of steps, no time")
    if settings.token_kernels is not None:
        parse.token_kernels(settings.token_kernels)


def _read(folder: Path) -> dict[str, object]:
    try:
        found = stored.parse((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
