"""Initial weights from a run or a saved model: `--init`.

Tensors of one name must have one shape, and both models must have the same tensors. The kernel, the
position and token kernels may differ: what the saved model lacks of them starts as usual, what the
new one lacks is left out, and both are said.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..models.config import SPELLED, KernelConfig
from ..models.count import part_of
from .checkpoints import Checkpoints
from .pretrained import is_of_transformers

# Parts of a model in which the two may differ.
FREE_PARTS = ("kernel", "token-kernels")
INDEX = "model.safetensors.index.json"


def find_weights(init: str) -> list[Path]:
    """The files with the weights of a run, or of a saved model."""
    folder = Path(init)
    if not folder.is_dir():
        raise ValueError(
            f"init must be the folder of a run or of a saved model, but there is no folder {init}"
        )
    places = [folder, folder / "model"]
    # A run that has not ended has checkpoints only.
    if not any(map(_files, places)) and (folder / "checkpoints").is_dir():
        last = Checkpoints(folder / "checkpoints", 1).latest(lambda text: None)
        places += [] if last is None else [last]
    for place in places:
        if found := _files(place):
            return found
    raise ValueError(
        f"init must be the folder of a run or of a saved model, but {init} has no model.safetensors"
    )


def _files(folder: Path) -> list[Path]:
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if not (folder / INDEX).is_file():
        return []
    try:
        names = set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
        # Files of this folder alone.
        return sorted(folder / Path(name).name for name in names)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{folder / INDEX} cannot be read as an index of weights") from None


def start_from(model: nn.Module, tokenizer: Any, init: str, say: Callable[[str], None]) -> None:
    """Copy the weights of a run or a saved model into a new model."""
    files = find_weights(init)
    _check_tokenizer(tokenizer, files[0].parent)
    found = _read(files)
    own = dict(model.state_dict())
    names = _shared_names(own)
    for name in [n for n in found if n not in own and part_of(n) not in FREE_PARTS]:
        raise ValueError(
            f"the model in {init} has the tensor {name!r} {list(found[name].shape)}, which this "
            "one does not have: init takes a model of the same shape"
        )
    for name, value in own.items():
        twin = next((n for n in names[name] if n in found), None)
        if twin is None:
            if part_of(name) not in FREE_PARTS:
                raise ValueError(
                    f"the model in {init} lacks the tensor {name!r} {list(value.shape)}: init "
                    "takes a model of the same shape"
                )
        elif found[twin].shape != value.shape:
            raise ValueError(
                f"the tensor {name!r} has the shape {list(value.shape)} here and "
                f"{list(found[twin].shape)} in {init}: init takes a model of the same shape"
            )
        else:
            value.copy_(found[twin])
    fresh = [name for name in own if not any(n in found for n in names[name])]
    left = [name for name in found if name not in own]
    if fresh:
        say(f"not in {init}, so they start as usual: {_list(fresh)}")
    if left:
        say(f"in {init} but not in this model, so they are left out: {_list(left)}")


def check_config(config: KernelConfig, checkpoint: Path) -> None:
    """Raise ValueError if the model of a checkpoint is not the one that the settings give now."""
    stored = type(config).from_pretrained(checkpoint, trust_kernels=config.trust_kernels)
    # Kernels may have been replaced after the model was built.
    names = [n for n in signature(type(config)).parameters if n != "kwargs" and n not in SPELLED]
    old, new = (_plain({n: getattr(one, n) for n in names}) for one in (stored, config))
    changed = [f"{n} was {old[n]!r}, now {new[n]!r}" for n in names if old[n] != new[n]]
    if changed:
        raise ValueError(
            f"the run cannot go on: its preset has changed since ({'; '.join(changed)}). Start "
            "anew with another --output"
        )


def _plain(fields: dict[str, Any]) -> Any:
    """As JSON has them: lists in place of tuples."""
    return json.loads(json.dumps(fields))


def _read(files: Iterable[Path]) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for file in files:
        try:
            found |= load_file(file)
        # safetensors raises an error of its own for a damaged file.
        except Exception as error:
            raise ValueError(f"{file} cannot be read as weights: {error}") from None
    return found


def _shared_names(tensors: dict[str, Tensor]) -> dict[str, list[str]]:
    """The names of each tensor: a tied one has several, of which a file has one."""
    same: dict[tuple[int, torch.Size], list[str]] = {}
    for name, value in tensors.items():
        same.setdefault((value.data_ptr(), value.shape), []).append(name)
    return {name: same[value.data_ptr(), value.shape] for name, value in tensors.items()}


def _check_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Raise ValueError if the saved model reads other tokens: embeddings belong to tokens."""
    if tokenizer is None or not (folder / "tokenizer.json").is_file():
        return
    from ..data import tokens

    if tokens.load(folder).get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"the tokenizer of this run differs from that of the model: give --tokenizer {folder}"
        )


def digest(init: str) -> str:
    """A hash of the weights, for the key of a result; of a model on the hub, its name."""
    path = Path(init).expanduser()
    if not path.exists() and is_of_transformers(init):
        return f"hub:{init}"
    files = [path] if path.is_file() else find_weights(init)
    stats = [path.stat() for path in files]
    return _digest(tuple(files), tuple((s.st_size, s.st_mtime_ns) for s in stats))


@functools.lru_cache(maxsize=8)
def _digest(files: tuple[Path, ...], stats: tuple[tuple[int, int], ...]) -> str:
    whole = hashlib.sha256()
    for path in files:
        with open(path, "rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return f"sha256:{whole.hexdigest()[:16]}"


def _list(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
