"""Load a model of transformers that `mercer.integrations.hf` has patched and saved, to be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from .. import own
from ..data import DataError
from ..data.tokens import load as load_tokenizer
from ..storage import stored
from ..train.run import quiet
from .load import Trained, choose_device


def is_patched(path: str | Path) -> bool:
    """Whether a folder holds such a model."""
    try:
        config = stored.parse((Path(path).expanduser() / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    # A run's config and those of Mercer's own models have other entries.
    return isinstance(config, dict) and isinstance(config.get("mercer"), dict)


def load_patched(
    path: str | Path, *, device: str | None = None, trust_kernels: own.Trust = None
) -> Trained:
    """The model in a folder that `hf.save` has written, with the tokenizer beside it."""
    from ..integrations import hf

    path, place = Path(path).expanduser(), choose_device(device)
    with quiet():
        model: Any
        try:
            model = hf.from_pretrained(path, trust_kernels=trust_kernels)
        except (OSError, RuntimeError, KeyError, TypeError, SafetensorError) as error:
            lines = str(error).strip().splitlines()
            reason = lines[0] if lines else type(error).__name__
            raise ValueError(f"the model in {path} cannot be loaded: {reason}") from None
        try:
            tokenizer = load_tokenizer(path)
        except DataError as error:
            raise ValueError(
                f"the model in {path} has no tokenizer, by tokenizer.save_pretrained ({error})"
            ) from None
    return Trained(
        task="lm", model=model.to(place).eval(), tokenizer=tokenizer, device=place, path=path
    )
