"""Tables of text, row by row: .tsv, .csv and .jsonl, packed or not.

A .tsv has no header unless columns are named; a .csv has one; a line of a .jsonl is an object.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .errors import DataError
from .files import Source, read_lines, strip_packing, unify_ends

ENDINGS = (".tsv", ".csv", ".jsonl")
# JSON may spell half of a pair, which no encoding can write
SURROGATE = re.compile("[\ud800-\udfff]")


def is_table(path: Source) -> bool:
    return strip_packing(path.name).lower().endswith(ENDINGS)


def read_rows(path: Source, columns: Sequence[str], count: int) -> Iterator[tuple[str, ...]]:
    """The text of the columns, or of the first `count` columns where none are named.

    `a.b` is the key b of the column a.
    """
    empty = True
    suffix = Path(strip_packing(path.name)).suffix.lower()
    if suffix == ".jsonl":
        rows = _read_objects(path, columns, count)
    else:
        rows = _read_cells(path, columns, count, "\t" if suffix == ".tsv" else ",")
    for number, row in rows:
        for name, value in row:
            if not isinstance(value, str):
                kind = type(value).__name__
                raise DataError(f"{path}, line {number}: {name} must be text, but is {kind}")
            if lone := SURROGATE.search(value):
                raise DataError(
                    f"{path}, line {number}: {name} has the lone surrogate {lone[0]!r}, which is "
                    "no character"
                )
            if not value.strip():
                raise DataError(f"{path}, line {number}: {name} is empty")
        yield tuple(unify_ends(str(value)) for _, value in row)
        empty = False
    if empty:
        raise DataError(f"{path} is empty")


Row = tuple[int, list[tuple[str, Any]]]


def _read_objects(path: Source, columns: Sequence[str], count: int) -> Iterator[Row]:
    for number, line in read_lines(path):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except RecursionError:
            raise DataError(f"{path}, line {number}: nested too deeply") from None
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not JSON ({error})") from None
        if not isinstance(found, dict):
            raise DataError(f"{path}, line {number}: an object, but is {type(found).__name__}")
        names = columns or list(found)[:count]
        if len(names) < count:
            has = ", ".join(found) or "none"
            raise DataError(f"{path}, line {number}: {count} columns are needed, but it has {has}")
        row = []
        for name in names:
            value: Any = found
            for key in name.split("."):
                if not isinstance(value, dict) or key not in value:
                    has = ", ".join(found)
                    raise DataError(f"{path}, line {number}: no column {name!r}; it has {has}")
                value = value[key]
            row.append((f"column {name!r}", value))
        yield number, row


def _read_cells(path: Source, columns: Sequence[str], count: int, mark: str) -> Iterator[Row]:
    lines = (line + "\n" for _, line in read_lines(path))
    # quotes are plain characters between tabs
    plain = mark == "\t"
    reader = csv.reader(
        lines,
        delimiter=mark,
        quoting=csv.QUOTE_NONE if plain else csv.QUOTE_MINIMAL,
        # a quote that is not closed would take in the rest of the file
        strict=True,
    )
    places, header = list(range(count)), []
    try:
        if columns or mark == ",":
            header = next(reader, [])
            for name in columns:
                if name not in header:
                    has = ", ".join(header)
                    raise DataError(f"{path}, line 1: no column {name!r}; it has {has}")
                if header.count(name) > 1:
                    raise DataError(f"{path}, line 1: the column {name!r} is there twice")
            places = [header.index(name) for name in columns] or places
        for cells in reader:
            if not cells:
                continue
            if header and len(cells) > len(header):
                raise DataError(
                    f"{path}, line {reader.line_num}: {len(cells)} cells, but line 1 has "
                    f"{len(header)} columns; text with {mark!r} needs quotes"
                )
            if max(places) >= len(cells):
                raise DataError(
                    f"{path}, line {reader.line_num}: column {max(places) + 1} is missing, "
                    f"there are {len(cells)}"
                )
            yield reader.line_num, [(f"column {n + 1}", cells[n].strip()) for n in places]
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}") from None
