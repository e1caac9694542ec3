"""Find train, valid and test files of a folder by their names.

`tatoeba-train.tsv.xz` is the split `train` of the corpus `tatoeba`. A folder may hold the folders
`lm`, `translation` and `vision`; then the one that fits is meant. Without a valid file, the end
of the train split is used. `archive.zip::*.txt` is members of an archive (`members.py`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TypeVar

from .errors import DataError
from .files import PACKED, Chosen, Source, explain, is_archive, strip_packing
from .members import choose_members, is_chosen
from .tables import ENDINGS

# `datasets` reads it, from disk
TABLE = ".parquet"

WORDS = {
    "train": ("train", "training"),
    "valid": ("valid", "validation", "val", "dev"),
    "test": ("test",),
}


# The name of all files together, undivided.
WHOLE = "all"
T = TypeVar("T")


@dataclass(frozen=True)
class Found:
    """The files of each split; all are under `all` if the names have no split."""

    where: Path | str
    files: dict[str, Sequence[Source]] = field(default_factory=dict)


def check_split(split: str | None) -> None:
    """Raise ValueError for what is not the name of a split; None is right, too."""
    if split is not None and split not in (*WORDS, WHOLE):
        raise ValueError(f"split must be one of {', '.join((*WORDS, WHOLE))}, got {split!r}")


def check_divided(whole: bool, where: str) -> None:
    """Raise ValueError where data that comes in splits is asked for undivided."""
    if whole:
        raise ValueError(f"{where} comes in splits: the split {WHOLE} is for files")


def pick(splits: Mapping[str, T], name: str, where: str) -> T:
    """One of the splits, or DataError with those that there are."""
    if name not in splits:
        raise DataError(f"{where} has no {name} split; it has {', '.join(splits)}")
    return splits[name]


def read_split(name: str) -> tuple[str, str | None]:
    """The corpus and the split in a file's name: `a-train.txt.xz` is of `a`, `train`."""
    stem = strip_packing(name)
    for found in re.finditer(r"[A-Za-z]+", stem):
        for split, words in WORDS.items():
            if found[0].lower() in words:
                return stem[: found.start()].strip("-_. "), split
    return stem.partition(".")[0], None


def find_files(
    source: str | os.PathLike[str], kind: str, suffixes: tuple[str, ...]
) -> Found | None:
    """The files at `source`; None if there is none.

    It is a file, a folder, a folder and a corpus in it, or an archive, `::` and members of it.

    `kind` is the name of the folder for this sort of data, `suffixes` those of its files.
    """
    if not os.fspath(source):
        raise DataError("source must not be empty")
    path = Path(source).expanduser()
    with explain(path):
        if path.is_file():
            return Found(path, {"all": [path]})
        if path.is_dir():
            return Found(path, _sort(path, None, kind, suffixes))
        if is_chosen(source):
            return Found(os.fspath(source), _divide(choose_members(source, suffixes), suffixes))
        if path.name and path.parent.is_dir() and path.parent != path:
            files = _sort(path.parent, path.name, kind, suffixes)
            return Found(path, files) if files else None
    return None


def _divide(chosen: Chosen, suffixes: tuple[str, ...]) -> dict[str, Sequence[Source]]:
    """The members of each split: text is read in one pass, tables one by one."""
    splits: dict[str, list[str]] = {}
    for name in chosen.names:
        split = read_split(PurePosixPath(name).name)[1]
        splits.setdefault(split or "all", []).append(name)
    if "train" in splits:
        splits.pop("all", None)
    else:
        splits = {"all": list(chosen.names)}
    kinds = {PurePosixPath(name).suffix.lower() for name in chosen.names}
    if TABLE in kinds:
        raise DataError(f"{chosen}: a {TABLE} file inside an archive; unpack it first")
    tables = kinds & set(ENDINGS)
    if tables and kinds != tables:
        raise DataError(f"{chosen}: text and tables ({', '.join(sorted(kinds))}); choose one kind")
    if not tables:
        return {split: [Chosen(chosen.archive, tuple(names))] for split, names in splits.items()}
    return {
        split: [Chosen(chosen.archive, (name,)) for name in names]
        for split, names in splits.items()
    }


def _sort(
    folder: Path, corpus: str | None, kind: str, suffixes: tuple[str, ...]
) -> dict[str, Sequence[Source]]:
    if (folder / kind).is_dir():
        folder = folder / kind
    paths = sorted(path for path in folder.iterdir() if path.is_file() and _fits(path, suffixes))
    splits: dict[str, dict[str, list[Path]]] = {}
    for path in paths:
        name, split = read_split(path.name)
        splits.setdefault(split or "all", {}).setdefault(name, []).append(path)
    if corpus is not None:
        return {split: named[corpus] for split, named in splits.items() if corpus in named}
    if not paths:
        endings = ", ".join(suffixes)
        raise DataError(f"{folder} must hold files that end in {endings} (or packed), but has none")
    named = splits.get("train", {})
    if len(named) > 1:
        raise DataError(
            f"{folder} holds several corpora ({', '.join(sorted(named))}): name one, "
            f"as in {folder / min(named)}"
        )
    if not named:
        if set(splits) != {"all"}:
            raise DataError(
                f"{folder} has {', '.join(sorted(splits))} files but none with train in its name"
            )
        return {"all": paths}
    (corpus,) = named
    found: dict[str, Sequence[Source]] = {"train": named[corpus]}
    for split in ("valid", "test"):
        choices = splits.get(split, {})
        if corpus in choices:
            found[split] = choices[corpus]
        elif len(choices) == 1:
            (found[split],) = choices.values()
        elif choices:
            raise DataError(
                f"{folder} holds several files for {split} ({', '.join(sorted(choices))}) "
                f"and none of them is of {corpus}"
            )
    return found


def _fits(path: Path, suffixes: tuple[str, ...]) -> bool:
    if path.name.lower().startswith((".", "readme", "license")):
        return False
    return is_archive(path) or path.name.lower().endswith(
        tuple(suffix + packed for suffix in suffixes for packed in ("", *PACKED))
    )
