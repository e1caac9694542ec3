"""Small tables of dataclasses: `print` them, index them, or make a pandas data frame of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar, overload

Record = TypeVar("Record")


@dataclass(frozen=True)
class Records(Sequence[Record], Generic[Record]):
    """Records of one kind, in order."""

    records: tuple[Record, ...]

    @overload
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Record, ...]: ...

    def __getitem__(self, index: int | slice) -> Record | tuple[Record, ...]:
        return self.records[index]

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the fields."""
        return tuple(field.name for field in fields(self.records[0])) if self.records else ()  # type: ignore[arg-type]

    def as_dicts(self) -> list[dict[str, Any]]:
        """A dictionary for each record, as JSON takes it: NaN and infinity are None."""
        names = self.columns
        return [{name: _plain(getattr(one, name)) for name in names} for one in self.records]

    def to_pandas(self) -> Any:
        """The same as a pandas.DataFrame; needs pandas."""
        try:
            import pandas
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "to_pandas needs pandas: pip install pandas", name="pandas"
            ) from None
        names = self.columns
        rows = [[getattr(one, name) for name in names] for one in self.records]
        return pandas.DataFrame(rows, columns=list(names))

    def __str__(self) -> str:
        names = self.columns
        cells = [[_text(getattr(one, name)) for name in names] for one in self.records]
        kept = [n for n in range(len(names)) if any(row[n] for row in cells)]
        lines = [[names[n] for n in kept], *([row[n] for n in kept] for row in cells)]
        if not kept:
            return "(nothing)"
        widths = [max(len(line[n]) for line in lines) for n in range(len(kept))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )


def _plain(x: object) -> object:
    if isinstance(x, float):
        return x if math.isfinite(x) else None
    return [_plain(one) for one in x] if isinstance(x, tuple) else x


def _text(x: object) -> str:
    if x is None:
        return ""
    if isinstance(x, float):
        return f"{x:.4g}"
    if isinstance(x, tuple):
        shown = ", ".join(map(_text, x[:5]))
        return shown + (", …" if len(x) > 5 else "")
    return str(x)
