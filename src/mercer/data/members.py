"""Choose members of an archive by name or pattern: `novels.zip::Dickens_Bleak_1853.txt`."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from .errors import DataError, shorten, spell
from .files import ARCHIVES, Chosen, is_archive, list_members, strip_packing

MARK = "::"
# names that a message lists
MOST = 5


def is_chosen(source: str | os.PathLike[str]) -> bool:
    return MARK in os.fspath(source)


def choose_members(source: str | os.PathLike[str], suffixes: tuple[str, ...]) -> Chosen:
    """The members that the text after `::` names: a name, the last part of one, or a pattern.

    `*`, `?` and `[…]` mean what they mean in a shell; `*` fits a slash, too. Of the members that
    fit a pattern, those that end in one of `suffixes` are read.
    """
    archive, wanted = _divide(os.fspath(source))
    names = list_members(archive)
    if wanted in names:
        chosen = [wanted]
    elif set(wanted) & set("*?["):
        chosen = _fit(archive, names, wanted, suffixes)
    else:
        chosen = [name for name in names if _last(name) == wanted]
        if not chosen:
            raise DataError(f"{archive} has no member {shorten(wanted)}; {_suggest(wanted, names)}")
        if len(set(chosen)) > 1:
            raise DataError(
                f"{archive} has several members {shorten(wanted)} ({_some(chosen)}): give the "
                "whole name"
            )
    for name in chosen:
        if strip_packing(name) != name:
            raise DataError(
                f"{archive}, member {spell(name)}: packed inside an archive; unpack it first"
            )
    return Chosen(archive, tuple(dict.fromkeys(chosen)))


def _divide(source: str) -> tuple[Path, str]:
    """The archive before `::`, and the text behind it."""
    parts = source.split(MARK)
    # a folder may have :: in its name
    for n in range(1, len(parts)):
        path = Path(MARK.join(parts[:n])).expanduser()
        if not path.is_file():
            continue
        if not is_archive(path):
            kinds = ", ".join(ARCHIVES)
            raise DataError(f"{path} is no archive ({kinds}), so {MARK} cannot choose in it")
        if not (wanted := MARK.join(parts[n:])):
            raise DataError(f"{source} must name a member, or a pattern, after {MARK}")
        return path, wanted
    path = Path(parts[0])
    if path.expanduser().is_dir():
        raise DataError(f"{path} is a folder; {MARK} chooses members of an archive")
    raise DataError(f"{path} does not exist, so {MARK} cannot choose in it")


def _fit(archive: Path, names: Sequence[str], pattern: str, suffixes: tuple[str, ...]) -> list[str]:
    short = "/" not in pattern
    found = [
        name
        for name in names
        if fnmatchcase(name, pattern) or (short and fnmatchcase(_last(name), pattern))
    ]
    if not found:
        raise DataError(
            f"{archive} has no member that fits {shorten(pattern)}; {_suggest(pattern, names)}"
        )
    chosen = [name for name in found if strip_packing(name).lower().endswith(suffixes)]
    if not chosen:
        raise DataError(
            f"{archive}: {shorten(pattern)} fits {_some(found)}, but none ends in "
            f"{', '.join(suffixes)}"
        )
    return chosen


def _suggest(wanted: str, names: Sequence[str]) -> str:
    """The nearest names as a question, or some of all."""
    whole = {word.lower(): n for n in reversed(names) for word in re.findall(r"[^\W_]{3,}", n)}
    whole |= {form.lower(): name for name in reversed(names) for form in (_last(name), name)}
    near = difflib.get_close_matches(wanted.strip("*?").lower(), whole, n=3)
    if near:
        return f"did you mean {' or '.join(dict.fromkeys(shorten(whole[n]) for n in near))}?"
    return f"it has {_some(names)}" if names else "it is empty"


def _some(names: Sequence[str]) -> str:
    listed = ", ".join(spell(name) for name in names[:MOST])
    return listed if len(names) <= MOST else f"{listed} and {len(names) - MOST} more"


def _last(name: str) -> str:
    return PurePosixPath(name).name
