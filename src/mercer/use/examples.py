"""Read a translator or a vision transformer with some examples of its run's validation data.

Heads are measured on whole examples. Sentence pairs are read one by one, so nothing is padded.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import inspect
from ..data import DataError
from ..train.evaluate import to_device
from ..train.run import quiet
from ..train.tasks import make
from .load import KINDS, Trained

# How many images or sentence pairs are read.
EXAMPLES = 16
# The units of curves whose model counts patches and images.
IN_IMAGES = {"nats per token": "nats per image", "tokens per second": "patches per second"}


def read_examples(trained: Trained, say: Callable[[str], None]) -> dict[str, Any]:
    """The parts of a report that come from the validation data, and facts about it."""
    say("the data")
    task = _task(trained)
    number = min(EXAMPLES, len(task.valid))
    # Spread evenly: data may be sorted.
    items = [task.valid[n * len(task.valid) // number] for n in range(number)]
    read = _read_images if trained.task == "vision" else _read_pairs
    return read(trained, task, items, say)


def rename_curves(trained: Trained, curves: inspect.Curves) -> inspect.Curves:
    """The curves of a run with the names of layers and the units of its task."""
    if trained.task == "vision":
        found = [replace(one, unit=IN_IMAGES.get(one.unit, one.unit)) for one in curves]
    else:
        found = [replace(one, name=_name_curve(one.name)) for one in curves]
    return inspect.Curves(tuple(found))


def _task(trained: Trained) -> Any:
    """The task of the run, with its validation data alone."""
    if trained.settings is None:
        raise ValueError(
            f"the model in {trained.path} is {KINDS[trained.task][1]}, which is read with the "
            "validation data of its run: give the folder of the run"
        )
    try:
        with quiet():
            return make(trained.settings, split="valid", like=trained.look or trained.tokenizer)
    except DataError as error:
        raise ValueError(
            f"the data of the run, with which {KINDS[trained.task][1]} is read, cannot be read: "
            f"{error}"
        ) from None


def _read_images(
    trained: Trained, task: Any, items: list[dict[str, Any]], say: Callable[[str], None]
) -> dict[str, Any]:
    config = trained.model.config
    batch = {"pixel_values": task.collate(items)["pixel_values"].to(trained.device)}
    say("heads")
    grid = f"{config.side} x {config.side}"
    return {
        "heads": inspect.heads(trained.model, batch, places=_places(config.side, config.prefix)),
        "unit": "patches",
        "first": "class token" if config.prefix else "first patch",
        "facts": (
            ("images", f"{len(items)} of the validation data"),
            ("patches", grid + (" and a class token" if config.prefix else "")),
        ),
    }


def _places(side: int, prefix: int) -> Tensor:
    """Row and column of each patch, [T, 2]; a class token is nowhere in the image."""
    n = torch.arange(side)
    patches = torch.cartesian_prod(n, n).float()
    return torch.cat([torch.full((prefix, 2), torch.nan), patches])


def _read_pairs(
    trained: Trained, task: Any, items: list[dict[str, Any]], say: Callable[[str], None]
) -> dict[str, Any]:
    model = trained.model
    batches = [to_device(dict(task.pairs.collate([item])), trained.device) for item in items]
    longest = max(batches, key=lambda one: one["labels"].shape[1])
    say("heads")
    found: dict[str, Any] = {
        "heads": inspect.heads(model, *batches),
        "positions": inspect.by_distance(model, longest),
    }
    tokens = [sum(one[side].numel() for one in batches) for side in ("input_ids", "labels")]
    return {
        name: type(table)(tuple(replace(one, layer=_name_layer(one.layer)) for one in table))
        for name, table in found.items()
    } | {
        "facts": (
            ("sentence pairs", f"{len(items)} of the validation data"),
            ("length", f"{tokens[0]:,} tokens in the sources, {tokens[1]:,} in the targets"),
        )
    }


def _name_layer(name: str) -> str:
    """encoder.0, decoder.0 or cross.0: in the model, only the encoder has a name of its own."""
    found = re.fullmatch(r"(encoder\.)?blocks\.(\d+)\.(attention|cross)", name)
    if found is None:
        return name
    encoder, number, kind = found.groups()
    return f"{'encoder' if encoder else 'cross' if kind == 'cross' else 'decoder'}.{number}"


def _name_curve(name: str) -> str:
    """The name of a curve; of a bandwidth it has the layer and the head."""
    return " ".join(map(_name_layer, name.split(" ")))
