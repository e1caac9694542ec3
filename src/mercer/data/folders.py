"""Images in class folders, on disk or inside an archive, and those of the hub.

`train/cat/1.png` is a training image of the class `cat`. Validation images are in `valid`, `val`
or, if there is neither, `test`. Without any of them, the last tenth of every class is for
validation. Archives are not unpacked to disk.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from . import cache
from .errors import DataError, need
from .files import Chosen, Source, explain, hash_files, is_archive, read_members
from .hub import Table
from .layout import WHOLE, WORDS, pick
from .pictures import ENDINGS, Fit

Array = np.ndarray[Any, Any]
Progress = Callable[[str, float], None]
SPLITS = ("train", "valid", "test", "all")
HELD_OUT = 10
# two bytes of a row of the cache are its class
MOST_CLASSES = 1 << 16
BATCH = 512


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """Two splits of pixels and labels; `measured`: all pixels are in an array, quick to read."""

    train: Any
    train_labels: Array
    valid: Any
    valid_labels: Array
    class_names: Sequence[str]
    source: str
    measured: bool


@dataclass(frozen=True)
class Packed:
    """Rows of a cache: pixels, then the split and the class."""

    stored: cache.Stored
    places: Array

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int | slice) -> Array:
        rows: Array = self.stored.array[self.places[index]][..., :-3]
        return rows.reshape(*rows.shape[:-1], *self.stored.notes["shape"])


@dataclass(frozen=True)
class Files:
    """Image files, decoded on access; all must have the shape of the first."""

    paths: Sequence[Path]
    fit: Fit
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Array:
        path = self.paths[index]
        with explain(path), path.open("rb") as stream:
            pixels = self.fit.decode(stream, str(path))
        return check_shape(pixels, self.shape, str(path))


@dataclass(frozen=True)
class Rows:
    """Images of a dataset, decoded on access."""

    table: Table
    column: str
    fit: Fit
    shape: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Array:
        where = f"{self.table.where}, row {index + 1}"
        image = self.table.read_value(self.column, int(index))
        if not isinstance(image, dict) or not {"bytes", "path"} <= image.keys():
            kind = type(image).__name__
            raise DataError(f"{where}: column {self.column!r} must be an image, but is {kind}")
        if image["bytes"] is not None:
            pixels = self.fit.decode(io.BytesIO(image["bytes"]), where)
        else:
            path = Path(image["path"] or "")
            with explain(path), path.open("rb") as stream:
                pixels = self.fit.decode(stream, where)
        return pixels if self.shape is None else check_shape(pixels, self.shape, where)


@dataclass(frozen=True)
class Fitted:
    """Arrays made to fit."""

    arrays: Array
    fit: Fit

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, index: int | slice) -> Array:
        if isinstance(index, slice):
            return np.stack([self[n] for n in range(*index.indices(len(self)))])
        pixels = self.arrays[index]
        image = need("PIL.Image").fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
        return self.fit.apply(image, f"image {index}")


def check_shape(pixels: Array, shape: tuple[int, ...], where: str) -> Array:
    if pixels.shape != shape:
        came, first = "x".join(map(str, pixels.shape)), "x".join(map(str, shape))
        raise DataError(f"{where} is {came} and the first image {first}: give a size and channels")
    return pixels


def read(
    path: Source,
    fit: Fit,
    folder: Path,
    on_progress: Progress | None,
    split: str | None = None,
) -> Labelled:
    """Class folders at `path`, in a folder or an archive; `split` as for `images`."""
    if isinstance(path, Chosen):
        return _read_archive(path, fit, folder, on_progress, split)
    if path.is_dir() and (path / "vision").is_dir():
        path = path / "vision"
    if path.is_dir():
        archives = sorted(file for file in path.iterdir() if file.is_file() and is_archive(file))
        if len(archives) > 1:
            names = ", ".join(file.name for file in archives)
            raise DataError(f"{path} holds several archives ({names}): give one of them")
        if not archives:
            return _read_folder(path, fit, split)
        path = archives[0]
    if not is_archive(path):
        raise DataError(f"{path} must be a folder or an archive of class folders, but is a file")
    return _read_archive(path, fit, folder, on_progress, split)


def find_class(name: str) -> tuple[str, str] | None:
    """The split and the class in the path of an image, or None for other paths."""
    *parents, last = PurePosixPath(name).parts
    if not parents or last.startswith(".") or not last.lower().endswith(ENDINGS):
        return None
    named = {word: split for split, words in WORDS.items() for word in words}
    found = [named[parent.lower()] for parent in parents if parent.lower() in named]
    # `train/1.png` has no class: `train` is a split
    if len(found) == 1 and parents[-1].lower() in named:
        return None
    return found[0] if found else "all", parents[-1]


def _read_archive(
    path: Source, fit: Fit, folder: Path, on_progress: Progress | None, split: str | None
) -> Labelled:
    key = cache.digest("images", hash_files([path]), fit)

    def write(writer: cache.Writer) -> None:
        classes: dict[str, int] = {}
        rows: list[Array] = []
        shape: tuple[int, ...] = ()
        for member in read_members(path):
            if is_archive(Path(member.name)):
                raise DataError(f"{member.where}: packed inside an archive; unpack it first")
            if (found := find_class(member.name)) is None:
                continue
            part, name = found
            if name in (".", ".."):
                raise DataError(f"{member.where} has no class: its folder is {name!r}")
            pixels = fit.decode(member.stream, member.where)
            shape = shape or pixels.shape
            check_shape(pixels, shape, member.where)
            number = classes.setdefault(name, len(classes))
            if number >= MOST_CLASSES:
                raise DataError(f"{path} holds more than {MOST_CLASSES} classes")
            tail = [SPLITS.index(part), number % 256, number // 256]
            rows.append(np.concatenate([pixels.reshape(-1), np.array(tail, np.uint8)]))
            if len(rows) == BATCH:
                writer.append(np.stack(rows))
                rows.clear()
                if on_progress is not None:
                    on_progress(f"reading {path.name}", member.done())
        if not classes:
            raise DataError(f"{path} holds no images in class folders")
        if rows:
            writer.append(np.stack(rows))
        writer.notes.update(classes=list(classes), shape=shape)

    stored = cache.load(folder / f"images-{key}.arr", write, dtype="uint8")
    classes = stored.notes["classes"]
    tails = np.array(stored.array[:, -3:], dtype=np.int64)  # [N, 3]
    # classes were numbered in order of appearance; sort them by name
    order = np.argsort(np.argsort(classes, kind="stable"), kind="stable")
    labels = order[tails[:, 1] + 256 * tails[:, 2]]
    splits = [SPLITS[n] for n in tails[:, 0]]
    train, valid = _divide(splits, labels, sorted(classes), str(path), split)
    return Labelled(
        train=Packed(stored, train),
        train_labels=labels[train],
        valid=Packed(stored, valid),
        valid_labels=labels[valid],
        class_names=sorted(classes),
        source=str(path),
        measured=True,
    )


def _read_folder(folder: Path, fit: Fit, split: str | None) -> Labelled:
    paths, splits, names = [], [], []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        found = find_class(path.relative_to(folder).as_posix())
        if found is not None:
            paths.append(path)
            splits.append(found[0])
            names.append(found[1])
    if not paths:
        raise DataError(f"{folder} holds no images in class folders")
    classes = sorted(set(names))
    labels = np.array([classes.index(name) for name in names], dtype=np.int64)
    train, valid = _divide(splits, labels, classes, str(folder), split)
    with paths[train[0]].open("rb") as stream:
        shape = fit.decode(stream, str(paths[train[0]])).shape
    return Labelled(
        train=Files([paths[n] for n in train], fit, shape),
        train_labels=labels[train],
        valid=Files([paths[n] for n in valid], fit, shape),
        valid_labels=labels[valid],
        class_names=classes,
        source=str(folder),
        measured=False,
    )


def read_hub(
    tables: dict[str, Table],
    columns: tuple[str, ...],
    fit: Fit,
    source: str,
    split: str | None = None,
) -> Labelled:
    """A dataset with a column of images and one of labels; `test` stands in for `valid`."""
    image, label = columns
    held_out = "valid" if "valid" in tables else "test"
    other = held_out if split in (None, "valid") else str(split)
    parts = [tables["train"], pick(tables, other, source)]
    for part in parts:
        part.check(columns)
    values = [part.read_column(label) for part in parts]
    for part, found in zip(parts, values, strict=True):
        for n, value in enumerate(found):
            if not isinstance(value, int | str):
                raise DataError(
                    f"{part.where}, row {n + 1}: column {label!r} must be a whole number or text, "
                    f"but is {type(value).__name__}"
                )
    names = getattr(parts[0].rows.features[label], "names", None)
    if names is None:
        names = sorted(set(values[0]))
        place = {name: n for n, name in enumerate(names)}
    else:
        place = {n: n for n in range(len(names))}
    for part, found in zip(parts, values, strict=True):
        for n, value in enumerate(found):
            if value not in place:
                raise DataError(
                    f"{part.where}, row {n + 1}: {value!r} is not a class of the train split"
                )
    shape = Rows(parts[0], image, fit)[0].shape
    train, valid = (Rows(part, image, fit, shape) for part in parts)
    train_labels, valid_labels = (np.array([place[v] for v in found]) for found in values)
    if split is not None:
        train, train_labels = valid, valid_labels
    return Labelled(
        train=train,
        train_labels=train_labels,
        valid=valid,
        valid_labels=valid_labels,
        class_names=[str(name) for name in names],
        source=source,
        measured=False,
    )


def _divide(
    splits: Sequence[str],
    labels: Array,
    classes: Sequence[str],
    where: str,
    wanted: str | None,
) -> tuple[Array, Array]:
    """Indices of the images for training and for validation; of one split alone, twice."""
    named = np.array(splits)
    has = [split for split in SPLITS if np.any(named == split)]
    if wanted == WHOLE:
        return np.arange(len(labels)), np.arange(len(labels))
    if wanted in has:
        places = np.flatnonzero(named == wanted)
        return places, places
    if wanted == "test":
        raise DataError(f"{where} has no test images")
    if has == ["all"]:
        rank = np.zeros(len(labels), dtype=np.int64)
        for number in range(len(classes)):
            places = np.flatnonzero(labels == number)
            held = max(1, len(places) // HELD_OUT) if len(places) > 1 else 0
            rank[places[len(places) - held :]] = 1
        train, valid = np.flatnonzero(rank == 0), np.flatnonzero(rank == 1)
    else:
        held_out = "valid" if "valid" in has else "test"
        train, valid = np.flatnonzero(named == "train"), np.flatnonzero(named == held_out)
    if len(train) == 0 or len(valid) == 0:
        raise DataError(f"{where} must have images for training and validation, but has {has}")
    if new := sorted(set(labels[valid].tolist()) - set(labels[train].tolist())):
        raise DataError(f"{where}: the class {classes[new[0]]!r} has no image for training")
    if wanted is not None:
        return (valid, valid) if wanted == "valid" else (train, train)
    return train, valid
