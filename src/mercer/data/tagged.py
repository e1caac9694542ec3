"""Words with their parts of speech, and documents with their genres, from CoNLL-U files.

An item is a text and its labels: the part of speech of every word of a sentence, or the genre of a
document, which stands first in its name ("newdoc id = reviews-…"). A label belongs to the place
after what it is of, so a language model gives it as its next token; label n is the token n.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from . import cache, tokens
from .errors import DataError, shorten
from .files import Source, hash_files, read_lines
from .layout import check_split, find_files, pick

IGNORE = -100
KINDS = ("tags", "genre")
SUFFIXES = (".conllu", ".conll")


@dataclass
class Sentence:
    """Words, their parts of speech, and the name of the document."""

    document: str
    words: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)


class Tagged(Dataset[dict[str, Tensor]]):
    """Texts as `input_ids` with a token at the end, and `labels`, -100 where there is none."""

    def __init__(self, items: Sequence[tuple[list[int], list[int]]]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    @property
    def lengths(self) -> list[int]:
        """The tokens of each text."""
        return [len(ids) for ids, _ in self.items]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids, labels = self.items[index]
        return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}


@dataclass(frozen=True, kw_only=True)
class TaggedData:
    """Labelled texts; `names` are those of the labels, the most frequent in training first."""

    train: Tagged
    valid: Tagged
    test: Tagged | None = None
    names: tuple[str, ...]
    tokenizer: Any
    source: str
    fingerprint: str


def tagged(
    source: str | os.PathLike[str],
    *,
    what: str = "tags",
    length: int = 128,
    tokenizer: Any = None,
    cache_dir: str | os.PathLike[str] | None = None,
    split: str | None = None,
) -> TaggedData:
    """Words with parts of speech, or documents with genres.

    Args:
        source: a folder with CoNLL-U files of train, valid (or dev) and test, packed or not, or the
            start of their names, such as `style/ud-ewt`.
        what: "tags", an item is a sentence; "genre", an item is a document.
        length: longer texts are cut to so many tokens.
        tokenizer: as in `text`; a BPE of 4096 tokens by default.
        cache_dir: where a trained tokenizer is kept; the platform's folder for caches by default.
        split: read this split alone, which then stands for both.
    """
    check_split(split)
    if what not in KINDS:
        raise ValueError(f"what must be one of {', '.join(KINDS)}, got {shorten(what)}")
    found = find_files(source, "tagged", SUFFIXES)
    if found is None or not {"train", "valid"} <= set(found.files):
        raise DataError(
            f"{source} must be CoNLL-U files of train and valid, such as style/ud-ewt for "
            f"style/ud-ewt-train.conllu.xz, got {', '.join(found.files) if found else 'none'}"
        )
    read = {name: list(_read(files)) for name, files in found.files.items()}
    fingerprint = hash_files([path for name in sorted(read) for path in found.files[name]])
    chosen = tokens.choose(
        "bpe:4096" if tokenizer is None else tokenizer,
        lambda: fingerprint,
        lambda: (" ".join(sentence.words) for sentence in read["train"]),
        cache.choose_folder(cache_dir),
        source=source,
    )
    if what == "tags":
        counts = Counter(tag for sentence in read["train"] for tag in sentence.tags)
    else:
        genres = {sentence.document: genre(sentence) for sentence in read["train"]}
        counts = Counter(genres.values())
    names = tuple(sorted(counts, key=lambda name: (-counts[name], name)))
    if len(names) > len(chosen):
        raise DataError(f"{len(names)} labels need as many tokens, but there are {len(chosen)}")
    make = _Encoder(chosen, {name: n for n, name in enumerate(names)}, length)
    parts = {name: make(sentences, what) for name, sentences in read.items() if name != "all"}
    if split is not None:
        one = pick(parts, split, str(source))
        parts = {"train": one, "valid": one}
    return TaggedData(
        **parts, names=names, tokenizer=chosen, source=str(source), fingerprint=fingerprint
    )


def genre(sentence: Sentence) -> str:
    """The first word of the document's name: reviews-123 is of `reviews`."""
    return sentence.document.partition("-")[0]


def _read(files: Sequence[Source]) -> Iterator[Sentence]:
    """The sentences of CoNLL-U files."""
    for path in files:
        document = ""
        now = Sentence(document)
        for number, line in read_lines(path):
            if line.startswith("# newdoc id = "):
                document = line.removeprefix("# newdoc id = ").strip()
            fields = line.split("\t")
            if not line.strip():
                if now.words:
                    yield now
                now = Sentence(document)
            elif not line.startswith("#"):
                if len(fields) != 10:
                    raise DataError(
                        f"{path}, line {number}: CoNLL-U has 10 columns, got {len(fields)}"
                    )
                # Ranges (3-4) and empty words (5.1) are not words of the sentence.
                if fields[0].isdigit():
                    now.document = document
                    now.words.append(fields[1])
                    now.tags.append(fields[3])
        if now.words:
            yield now


class _Encoder:
    """Sentences or documents as ids and labels."""

    def __init__(self, tokenizer: Any, places: dict[str, int], length: int) -> None:
        self.tokenizer, self.places, self.length = tokenizer, places, length
        self.pieces: dict[str, list[int]] = {}
        self.end: int = tokenizer.eos_token_id or 0

    def __call__(self, sentences: Sequence[Sentence], what: str) -> Tagged:
        if what == "tags":
            return Tagged([self._tags(sentence) for sentence in sentences])
        documents: dict[str, tuple[int, list[int]]] = {}
        for sentence in sentences:
            label = self.places.get(genre(sentence), IGNORE)
            ids = documents.setdefault(sentence.document, (label, []))[1]
            for word in sentence.words:
                ids += self._split(word)
        cut = self.length - 1
        return Tagged(
            [
                ([*ids[:cut], self.end], [IGNORE] * len(ids[:cut]) + [label])
                for label, ids in documents.values()
            ]
        )

    def _tags(self, sentence: Sentence) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        labels = [IGNORE]
        for word, tag in zip(sentence.words, sentence.tags, strict=True):
            pieces = self._split(word)
            ids += pieces
            # After the last piece, when the whole word is known.
            labels += [IGNORE] * (len(pieces) - 1) + [self.places.get(tag, IGNORE)]
        cut = self.length - 1
        return [*ids[:cut], self.end], labels[: cut + 1]

    def _split(self, word: str) -> list[int]:
        if word not in self.pieces:
            found = self.tokenizer(" " + word, add_special_tokens=False)["input_ids"]
            self.pieces[word] = list(found) or [self.end]
        return self.pieces[word]
