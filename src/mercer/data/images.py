"""Images with classes: digits, class folders, archives of them, and the hub.

An archive is read once, into a memory-mapped array. Class folders and datasets of the hub are
decoded on access, so they may be of any size.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from ..names import suggest
from . import cache, folders, hub
from .embedded import read_digits
from .errors import LARGEST_SEED, DataError, check_columns, check_unnamed, check_whole, shorten
from .files import explain
from .layout import WHOLE, check_divided, check_split, pick
from .members import choose_members, is_chosen
from .pictures import ENDINGS, Fit

Array = np.ndarray[Any, Any]
# the largest side that images are resized to
LARGEST = 1 << 14
AUGMENTS = ("crop", "flip")
# ImageNet's mean and deviation, for images that are decoded on access
USUAL = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class Pixels(Protocol):
    """Images as uint8 [H, W, C]."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Array: ...


@dataclass(frozen=True, kw_only=True)
class Look:
    """How a model sees images: squares of a size and channels, normalised, in named classes."""

    image_size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    class_names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ImageData:
    """Images of one size in two splits, and how their pixels were normalised."""

    train: Images
    valid: Images
    num_classes: int
    class_names: tuple[str, ...]
    image_size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    source: str

    @property
    def look(self) -> Look:
        return Look(
            image_size=self.image_size,
            channels=self.channels,
            mean=self.mean,
            std=self.std,
            class_names=self.class_names,
        )


class Images(Dataset[dict[str, Any]]):
    """Item n is {"pixel_values": [C, H, W], "labels": int}: (pixel / 255 - mean) / std.

    Random crops and flips depend on the seed, the epoch and the item alone. Call `set_epoch`
    before each epoch, as transformers' Trainer does.
    """

    def __init__(
        self,
        pixels: Pixels,
        labels: Array,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        augment: Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        assert len(pixels) == len(labels)
        self.pixels = pixels
        self.labels = labels
        self.mean = torch.tensor(mean)[:, None, None]
        self.std = torch.tensor(std)[:, None, None]
        self.augment = tuple(augment)
        self.seed = seed
        self.epoch = 0
        self._drawn: Array | None = None  # [items, 3], of this epoch

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self._drawn = epoch, None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        pixels = np.array(self.pixels[index])  # [H, W, C]
        if self.augment:
            pixels = self._disturb(pixels, index)
        values = torch.from_numpy(pixels).permute(2, 0, 1).contiguous() / 255  # [C, H, W]
        return {
            "pixel_values": (values - self.mean) / self.std,
            "labels": int(self.labels[index]),
        }

    def _disturb(self, pixels: Array, index: int) -> Array:
        if self._drawn is None:
            # Once for all items: a generator for each would take longer than the crop.
            random = np.random.default_rng((self.seed, self.epoch))
            self._drawn = random.random((len(self), 3))
        flip, *move = self._drawn[index].tolist()
        if "flip" in self.augment and flip < 0.5:
            pixels = pixels[:, ::-1]
        if "crop" in self.augment:
            size = len(pixels)
            margin = max(1, size // 8)
            down, right = (int(x * (2 * margin + 1)) - margin for x in move)
            moved = np.zeros_like(pixels)
            moved[_inside(-down, size), _inside(-right, size)] = pixels[
                _inside(down, size), _inside(right, size)
            ]
            pixels = moved
        return np.ascontiguousarray(pixels)


def _inside(offset: int, size: int) -> slice:
    """The places of a line of `size` that are still on it after a move by `-offset`."""
    return slice(max(offset, 0), size + min(offset, 0))


def images(
    source: str | os.PathLike[str] = "embedded",
    *,
    size: int | None = None,
    channels: int | None = None,
    augment: Sequence[str] = (),
    columns: tuple[str, str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    seed: int = 0,
    split: str | None = None,
    look: Look | None = None,
    on_progress: folders.Progress | None = None,
) -> ImageData:
    """Images with classes.

    Args:
        source: "embedded" (scikit-learn's digits), a folder of class folders, an archive of them,
            members of one (`pictures.zip::train/*`), a folder that has one, or a name on the hub.
        size: resize the shorter side to it and cut the middle out; by default images must be
            squares of one size already.
        channels: 1 or 3; by default as the first image has.
        augment: any of "crop" and "flip", for the train split.
        columns: of a dataset on the hub, the image's and the label's.
        cache_dir: where decoded archives are kept; the platform's folder for caches by default.
        seed: of the random crops and flips.
        split: read this split alone, which then stands for both; "all" is the files undivided.
        look: that of a trained model: its normalisation and its classes.
        on_progress: called with the name of a task and its progress from 0 to 1.
    """
    if not isinstance(augment, list | tuple) or not all(one in AUGMENTS for one in augment):
        raise ValueError(f"augment must be of {AUGMENTS}, as a list, got {shorten(augment)}")
    if channels not in (None, 1, 3):
        raise ValueError(f"channels must be 1 or 3, got {shorten(channels)}")
    if size is not None:
        check_whole("size", size, 1, LARGEST)
    check_whole("seed", seed, 0, LARGEST_SEED)
    check_columns(columns)
    check_split(split)
    fit = Fit(size=size, channels=channels)
    found = _find_images(source, fit, columns, cache.choose_folder(cache_dir), on_progress, split)
    first = found.train[0]
    image_size, num_channels = first.shape[0], first.shape[2]
    if look is not None:
        found = _rename(found, look)
        mean, std = look.mean, look.std
    elif found.measured:
        mean, std = measure(found.train)
    elif num_channels == 3:
        mean, std = USUAL
    else:
        mean, std = (0.5,), (0.5,)
    return ImageData(
        train=Images(found.train, found.train_labels, mean, std, augment=augment, seed=seed),
        valid=Images(found.valid, found.valid_labels, mean, std),
        num_classes=len(found.class_names),
        class_names=tuple(found.class_names),
        image_size=image_size,
        channels=num_channels,
        mean=tuple(mean),
        std=tuple(std),
        source=found.source,
    )


def measure(pixels: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, over pixels from 0 to 1; exact in integers."""
    channels = pixels[0].shape[-1]
    counts = np.zeros((channels, 256), dtype=np.int64)
    for start in range(0, len(pixels), 1024):
        some = pixels[start : start + 1024]  # [N, H, W, C]
        for n in range(channels):
            counts[n] += np.bincount(some[..., n].ravel(), minlength=256)
    values = np.arange(256)
    total = counts.sum(1)
    mean = counts @ values / total
    std = np.sqrt(np.maximum(counts @ values**2 / total - mean**2, 1e-6))
    return tuple((mean / 255).tolist()), tuple((std / 255).tolist())


def _rename(found: folders.Labelled, look: Look) -> folders.Labelled:
    """The labels as numbers of the model's classes."""
    place = {name: n for n, name in enumerate(look.class_names)}
    used = {int(n) for labels in (found.train_labels, found.valid_labels) for n in labels}
    for n in sorted(used):
        if (name := found.class_names[n]) not in place:
            raise DataError(
                f"{found.source}: the class {shorten(name)} is none of the model's; "
                f"{suggest(name, look.class_names)}"
            )
    table = np.array([place.get(name, -1) for name in found.class_names])
    return replace(
        found,
        train_labels=table[found.train_labels],
        valid_labels=table[found.valid_labels],
        class_names=look.class_names,
    )


def _find_images(
    source: str | os.PathLike[str],
    fit: Fit,
    columns: tuple[str, str] | None,
    folder: Path,
    on_progress: folders.Progress | None,
    split: str | None,
) -> folders.Labelled:
    if source == "embedded":
        check_unnamed(columns, "embedded")
        check_divided(split == WHOLE, "embedded")
        pixels, labels, cut = read_digits()
        parts = {"train": slice(0, cut), "valid": slice(cut, len(labels))}
        if split is not None:
            one = pick(parts, split, "embedded")
            parts = {"train": one, "valid": one}
        found = folders.Labelled(
            train=pixels[parts["train"]],
            train_labels=labels[parts["train"]],
            valid=pixels[parts["valid"]],
            valid_labels=labels[parts["valid"]],
            class_names=[str(n) for n in range(10)],
            source="embedded: scikit-learn's digits, 8x8",
            measured=True,
        )
        if fit.size in (None, 8) and fit.channels in (None, 1):
            return found
        return replace(
            found, train=folders.Fitted(found.train, fit), valid=folders.Fitted(found.valid, fit)
        )
    if not os.fspath(source):
        raise DataError("source must not be empty")
    path = Path(source).expanduser()
    with explain(path):
        exists = path.exists()
    if exists or is_chosen(source):
        check_unnamed(columns, str(source))
        files = path if exists else choose_members(source, ENDINGS)
        return folders.read(files, fit, folder, on_progress, split)
    name = hub.find_name(hub.check_source(source), hub.IMAGES, columns)
    chosen = columns or name.columns or ("image", "label")
    check_divided(split == WHOLE, str(source))
    tables = hub.load(name)
    tables = tables if "test" in tables else hub.hold_out(tables)
    return folders.read_hub(tables, chosen, fit, str(source), split)
