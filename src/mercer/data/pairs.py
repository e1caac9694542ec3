"""Pairs of sentences for translation: texts, and their ids padded into batches."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from . import cache, encode, hub, tokens
from .errors import LARGEST_SEED, DataError, check_columns, check_unnamed, check_whole, shorten
from .files import Source
from .grammar import draw_pairs
from .layout import WHOLE, check_divided, check_split, find_files, pick
from .tables import ENDINGS, read_rows

SUFFIXES = (*ENDINGS, hub.TABLE)
SPECIALS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
EMBEDDED = {"train": 20_000, "valid": 500, "test": 500}
HELD_OUT = 0.05
MOST_HELD_OUT = 5_000
IGNORE = -100
BATCH = 10_000

Pair = tuple[str, str]
Item = dict[str, Tensor]


class Pairs(Sequence[Pair]):
    """(source, target) texts."""

    def __init__(self, pairs: Iterable[Pair]) -> None:
        self.pairs = list(pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    @overload
    def __getitem__(self, index: int) -> Pair: ...
    @overload
    def __getitem__(self, index: slice) -> Pairs: ...
    def __getitem__(self, index: int | slice) -> Pair | Pairs:
        return Pairs(self.pairs[index]) if isinstance(index, slice) else self.pairs[index]

    def swap(self) -> Pairs:
        return Pairs((target, source) for source, target in self.pairs)

    def fingerprint(self) -> str:
        total = hashlib.sha256()
        for pair in self.pairs:
            total.update("\t".join(pair).encode() + b"\n")
        return total.hexdigest()


@dataclass(frozen=True, kw_only=True)
class PairData:
    """A parallel corpus with a tokenizer for both sides; `test` is None where there is none.

    The tokenizer is a copy of the given one that ends a text with its end token, as `encoded` does.
    """

    train: Pairs
    valid: Pairs
    test: Pairs | None = None
    tokenizer: Any
    source: str
    cache_dir: Path

    def split(self, name: str) -> Pairs:
        found = getattr(self, name) if name in ("train", "valid", "test") else None
        if found is None:
            has = [n for n in ("train", "valid", "test") if getattr(self, n) is not None]
            raise ValueError(f"split must be one of {', '.join(has)}, got {name!r}")
        assert isinstance(found, Pairs)
        return found

    def encoded(self, split: str, *, max_length: int | None = None) -> EncodedPairs:
        """Ids of both sides, each closed by the end token.

        Pairs with a side of more than `max_length` tokens are left out.
        """
        pairs = self.split(split)
        key = cache.digest("pairs", pairs.fingerprint(), encode.identify(self.tokenizer))

        def write(writer: cache.Writer) -> None:
            _write_ids(pairs, self.tokenizer, writer)

        path = self.cache_dir / f"pairs-{key}.arr"
        stored = cache.load(path, write, dtype=encode.width(self.tokenizer))
        return EncodedPairs(stored, self.tokenizer.eos_token_id, max_length)

    def collate(self, items: Sequence[Item], multiple: int = 1) -> Item:
        """A batch: padded inputs with a mask, and labels padded by -100.

        Both sides are padded to a length that `multiple` divides.
        """
        pad = self.tokenizer.pad_token_id
        ids = _pad([item["input_ids"] for item in items], pad, multiple)  # [B, S]
        lengths = torch.tensor([len(item["input_ids"]) for item in items])
        labels = _pad([item["labels"] for item in items], IGNORE, multiple)  # [B, T]
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()  # [B, S]
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _pad(rows: Sequence[Tensor], value: int, multiple: int) -> Tensor:
    padded = pad_sequence(list(rows), batch_first=True, padding_value=value)
    return F.pad(padded, (0, -padded.shape[1] % multiple), value=value)


class EncodedPairs(Dataset[Item]):
    """Item n is {"input_ids", "labels"} of pair n, memory-mapped."""

    def __init__(self, stored: cache.Stored, end: int, max_length: int | None) -> None:
        self.stored = stored
        # no text contains the end token, so the sides are found by it
        ends = np.flatnonzero(stored.array == end) + 1
        self.bounds = np.concatenate([[0], ends]).astype(np.int64)  # [2N + 1]
        longest = np.diff(self.bounds).reshape(-1, 2).max(1, initial=0)
        fits = np.arange(len(longest))
        self.kept = fits if max_length is None else fits[longest <= max_length]
        if len(self.kept) == 0:
            raise ValueError(
                f"max_length must let some pairs in, but the shortest has {longest.min()} tokens "
                f"and max_length is {max_length}"
            )

    def __len__(self) -> int:
        return len(self.kept)

    @property
    def lengths(self) -> np.ndarray[Any, Any]:
        """The tokens of both sides of each pair."""
        return (self.bounds[2::2] - self.bounds[:-2:2])[self.kept]

    def targets(self, most: int) -> np.ndarray[Any, Any]:
        """The ids of the targets, one after the other; of the first `most` ids of both sides."""
        ids = self.stored.array[:most]
        # sides alternate, and an end token belongs to its side
        side = np.searchsorted(self.bounds[1:], np.arange(len(ids)), side="right")
        return np.asarray(ids)[side % 2 == 1]

    def __getitem__(self, index: int) -> Item:
        at = 2 * int(self.kept[index])
        start, middle, end = (int(place) for place in self.bounds[at : at + 3])
        source, target = self.stored.array[start:middle], self.stored.array[middle:end]
        return {
            "input_ids": torch.from_numpy(source.astype(np.int64)),
            "labels": torch.from_numpy(target.astype(np.int64)),
        }


def pairs(
    source: str | os.PathLike[str] = "embedded",
    *,
    tokenizer: Any = None,
    reverse: bool = False,
    columns: tuple[str, str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    seed: int = 0,
    split: str | None = None,
    more: Sequence[str] = (),
) -> PairData:
    """A parallel corpus.

    Args:
        source: "embedded" (synthetic sentences), a .tsv file, a folder, a folder and a corpus in
            it (`data/tatoeba`), a member of an archive (`a.zip::train.tsv`), or a name on the
            hub.
        tokenizer: as for `text`; a BPE is trained on both sides of the train split.
        reverse: translate from the second column to the first.
        columns: the two columns of a table or of a dataset on the hub; `a.b` is key b of column a.
        cache_dir: where tokens are kept; the platform's folder for caches by default.
        seed: which sentences the embedded grammar draws.
        split: read this split alone, which then stands for all; "all" is the files undivided.
        more: other corpora of the source's folder, whose train files are added to the train split.
    """
    check_split(split)
    check_columns(columns)
    check_whole("seed", seed, 0, LARGEST_SEED)
    if not isinstance(reverse, bool):
        raise ValueError(f"reverse must be True or False, got {shorten(reverse)}")
    folder = cache.choose_folder(cache_dir)
    splits, name = _find_pairs(source, columns, folder, seed, whole=split == WHOLE, more=more)
    if reverse:
        splits = {part: found.swap() for part, found in splits.items()}
        name += ", reversed"
    train = splits["train"]
    spec = ("bpe:1024" if source == "embedded" else "bpe:10000") if tokenizer is None else tokenizer
    chosen = tokens.choose(
        spec,
        train.fingerprint,
        lambda: (side for pair in train for side in pair),
        folder,
        source=source,
        specials=SPECIALS,
    )
    if chosen.eos_token_id is None:
        raise ValueError("a tokenizer for pairs must have an end token (eos_token), but has none")
    if chosen.pad_token_id is None:
        chosen.pad_token = chosen.eos_token
    chosen = tokens.close(chosen)
    if split is not None:
        one = pick(splits, "train" if split == WHOLE else split, name)
        splits = {"train": one, "valid": one}
    return PairData(**splits, tokenizer=chosen, source=name, cache_dir=folder)


def _find_pairs(
    source: str | os.PathLike[str],
    columns: tuple[str, str] | None,
    folder: Path,
    seed: int,
    *,
    whole: bool,
    more: Sequence[str] = (),
) -> tuple[dict[str, Pairs], str]:
    """The splits of a source, and its name; `whole`: all files as the train split."""
    if more:
        splits, name = _find_pairs(source, columns, folder, seed, whole=whole)
        added = [_read_more(source, one, more, columns or ()) for one in more]
        splits["train"] = Pairs([*splits["train"], *(pair for found in added for pair in found)])
        return splits, f"{name}, trained on {', '.join(more)}, too"
    if source == "embedded":
        check_divided(whole, "embedded")
        check_unnamed(columns, "embedded")
        drawn = draw_pairs(EMBEDDED, seed)
        name = f"embedded: synthetic German-English sentences of a small grammar, seed {seed}"
        return {split: Pairs(found) for split, found in drawn.items()}, name
    found = find_files(source, "translation", SUFFIXES)
    if found is None:
        check_divided(whole, str(source))
        meant = hub.find_name(hub.check_source(source), hub.PAIRS, columns)
        tables = hub.load(meant)
        return _hold_out(_read_tables(tables, columns or meant.columns), str(source)), str(source)
    if hub.is_table(found):
        check_divided(whole, str(source))
        tables = hub.load_files(found, folder)
        return _hold_out(_read_tables(tables, columns or ()), str(source)), str(source)
    if whole:
        paths = [path for part in found.files.values() for path in part]
        return {"train": _read_files(paths, columns or ())}, str(found.where)
    splits = {split: _read_files(paths, columns or ()) for split, paths in found.files.items()}
    return _hold_out(splits, str(found.where)), str(found.where)


def _read_more(
    source: str | os.PathLike[str], corpus: str, more: object, columns: Sequence[str]
) -> Pairs:
    """The train files of another corpus in the folder of the source."""
    if isinstance(more, str) or not isinstance(corpus, str):
        raise ValueError(f"more must be a list of names, got {shorten(more)}")
    path = Path(source).expanduser()
    if not path.parent.is_dir() or path.is_dir() or len(path.parts) < 2:
        raise ValueError(
            f"more corpora are added to one of a folder, such as data/tatoeba, got {source}"
        )
    found = find_files(path.parent / corpus, "translation", ENDINGS)
    if found is None or not found.files.get("train"):
        raise DataError(f"{path.parent} has no train files of {corpus!r}, which is to be added")
    return _read_files(found.files["train"], columns)


def _read_files(paths: Sequence[Source], columns: Sequence[str]) -> Pairs:
    return Pairs((first, second) for path in paths for first, second in read_rows(path, columns, 2))


def _read_tables(tables: dict[str, hub.Table], columns: Sequence[str]) -> dict[str, Pairs]:
    if not columns:
        columns = tables["train"].find_languages()
    if len(columns) != 2:
        raise ValueError(f"columns must be two names, got {columns}")
    return {
        split: Pairs((first, second) for first, second in table.read_texts(columns))
        for split, table in tables.items()
    }


def _hold_out(splits: dict[str, Pairs], where: str) -> dict[str, Pairs]:
    """Add a valid split from the end of the train split, without sentences of the rest.

    A single file gives a test split, too.
    """
    found = dict(splits)
    wanted = ("valid", "test") if "all" in found else ("valid",)
    if "all" in found:
        found["train"] = found.pop("all")
    if "train" not in found:
        raise DataError(f"{where} has no file with train in its name")
    held = max(1, min(int(len(found["train"]) * HELD_OUT), MOST_HELD_OUT))
    for split in wanted:
        if split not in found:
            last = found["train"][-held:]
            found["train"] = found["train"][:-held]
            known = {side for part in found.values() for pair in part for side in pair}
            found[split] = Pairs(pair for pair in last if not known & set(pair))
            if not found["train"] or not found[split]:
                raise DataError(f"{where} is too short to hold out a part of it for {split}")
    return found


def _write_ids(pairs: Pairs, tokenizer: Any, writer: cache.Writer) -> None:
    encode_batch, end = encode.choose_encoder(tokenizer), tokenizer.eos_token_id
    for start in range(0, len(pairs), BATCH):
        sides = [side for pair in pairs[start : start + BATCH] for side in pair]
        ids: list[int] = []
        for code in encode_batch(sides):
            ids.extend(code)
            ids.append(end)
        writer.append(encode.pack(ids, writer.dtype))
