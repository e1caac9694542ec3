"""The classes of images, most likely first."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..data import DataError
from ..data.files import explain
from ..data.pictures import Fit
from .load import Trained

BATCH = 32


@dataclass(frozen=True)
class Guess:
    """An image, and its most likely classes with their probabilities."""

    image: str
    classes: tuple[tuple[str, float], ...]


def classify(
    trained: Trained, images: Iterable[str | Path], *, top: int = 3, batch: int = BATCH
) -> Iterator[Guess]:
    """The `top` classes of each image file; images are fitted as they were for training."""
    if trained.task != "vision":
        raise ValueError("classify needs an image classifier")
    for name, value in (("top", top), ("batch", batch)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number from 1 on, got {value!r}")
    return _guesses(trained, iter(images), top, batch)


def _guesses(
    trained: Trained, images: Iterator[str | Path], top: int, batch: int
) -> Iterator[Guess]:
    assert trained.look is not None
    names = trained.look.class_names
    while some := list(itertools.islice(images, batch)):
        pixels = torch.stack([read_image(trained, Path(image)) for image in some])  # [B, C, H, W]
        with torch.no_grad():
            logits = trained.model(pixel_values=pixels.to(trained.device)).logits
        chance, order = logits.float().softmax(-1).topk(min(top, len(names)))  # [B, top]
        for image, row, places in zip(some, chance.tolist(), order.tolist(), strict=True):
            found = tuple((names[n], p) for n, p in zip(places, row, strict=True))
            yield Guess(str(image), found)


def read_image(trained: Trained, path: Path) -> Tensor:
    """An image file as the model sees it, [C, H, W]."""
    look = trained.look
    assert look is not None
    if path.is_dir():
        raise DataError(f"{path} is a folder: give its images, as in {path / '*.png'}")
    fit = Fit(size=look.image_size, channels=look.channels)
    with explain(path), path.open("rb") as stream:
        pixels = fit.decode(stream, str(path))  # [H, W, C]
    values = torch.from_numpy(pixels.copy()).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(x)[:, None, None] for x in (look.mean, look.std))
    return ((values - mean) / std).contiguous()
