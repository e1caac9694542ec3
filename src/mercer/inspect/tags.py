"""Numbers per token by part of speech: which tokens are words, their tags, and means by tag."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..names import suggest

Path = str | os.PathLike[str]
Shares = Mapping[str, float]
Tagger = Callable[[str], str | Shares | None]
Weighing = Literal["most-frequent", "shares"]
WEIGHINGS = ("most-frequent", "shares")

# How byte-level BPE vocabularies such as GPT-2's write a space before a word.
SPACE = "\u0120"


class Tags:
    """How often each word has each tag. Called with a word, it gives the most frequent one.

    A word that is missing is looked up in lower case.
    """

    def __init__(self, counts: Mapping[str, Counter[str]]) -> None:
        self.counts = counts
        self._lower: dict[str, Counter[str]] = defaultdict(Counter)
        for word, tags in counts.items():
            self._lower[word.lower()].update(tags)

    def find(self, word: str) -> Counter[str] | None:
        return self.counts.get(word) or self._lower.get(word.lower())

    def __call__(self, word: str) -> str | None:
        tags = self.find(word)
        return tags.most_common(1)[0][0] if tags else None

    def shares(self, word: str) -> dict[str, float] | None:
        """All tags of the word, with their shares."""
        tags = self.find(word)
        return None if not tags else {tag: n / tags.total() for tag, n in tags.items()}


def read_conllu(*paths: Path) -> Tags:
    """Words and universal part-of-speech tags of CoNLL-U files, plain, .gz or .xz."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for path in paths:
        try:
            for line in _lines(path):
                fields = line.rstrip("\n").split("\t")
                # Ranges (3-4) and empty words (5.1) are not words of the sentence.
                if len(fields) == 10 and fields[0].isdigit():
                    counts[fields[1]][fields[3]] += 1
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not CoNLL-U: it is not UTF-8") from None
        except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile):
            kind = os.path.splitext(path)[1]
            raise ValueError(f"{path} is no {kind} file, or it is damaged") from None
    if not counts:
        raise ValueError(f"no tagged word in {', '.join(map(str, paths))}: is it CoNLL-U?")
    return Tags(counts)


def _lines(path: Path) -> Iterator[str]:
    name = os.fspath(path)
    read = lzma.open if name.endswith(".xz") else gzip.open if name.endswith(".gz") else open
    with read(name, "rt", encoding="utf-8") as file:
        yield from file


def words_of(vocabulary: Path | Mapping[str, int]) -> dict[int, str]:
    """The tokens of letters only, as words, by id; from GPT-2's vocab.json."""
    tokens = _read_vocabulary(vocabulary)
    words = {id: token.removeprefix(SPACE) for token, id in tokens.items()}
    return {id: word for id, word in words.items() if re.fullmatch("[A-Za-z]+", word)}


def words_in(text: str, vocabulary: Path | Mapping[str, int]) -> dict[int, str]:
    """Those that are whole words of a text."""
    tokens = _read_vocabulary(vocabulary)
    found = {match.replace(" ", SPACE) for match in re.findall(" ?[A-Za-z]+", text)}
    return {tokens[t]: t.removeprefix(SPACE) for t in sorted(found) if t in tokens}


def _read_vocabulary(vocabulary: Path | Mapping[str, int]) -> Mapping[str, int]:
    if isinstance(vocabulary, Mapping):
        return vocabulary
    with open(vocabulary, encoding="utf-8") as file:
        tokens = json.load(file)
    assert isinstance(tokens, dict)
    return tokens


@dataclass(frozen=True)
class Row:
    """A tag, how many tokens have it, and their mean."""

    tag: str
    tokens: int
    mean: float


def by_tag(
    values: Tensor,
    words: Mapping[int, str],
    tagger: Tagger | Mapping[str, str],
    *,
    weighing: Weighing = "most-frequent",
    minimum: int = 5,
    merge: Mapping[str, str] | None = None,
) -> list[Row]:
    """The mean of the tokens of each part of speech, the largest first.

    Args:
        values: one number for each token, such as `TokenKernels.deviation()`.
        words: the tokens to count, by their id, as `words_of` or `words_in` gives them.
        tagger: `Tags`, or a word's tag, its tags with their shares, or None: a table, or any
            callable.
        weighing: "most-frequent": a word counts for its most frequent tag, as the authors count;
            "shares": for each of its tags by its share.
        minimum: tags with fewer tokens are left out.
        merge: tags that count as others, for example {"PART": "ADP"}; they are joined first.
    """
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    numbers = values.detach().double().cpu().tolist()
    for id, shares in tag_words(words, tagger, weighing=weighing, merge=merge).items():
        if not 0 <= id < len(numbers):
            raise ValueError(f"{words[id]!r} has the id {id}, but there are {len(numbers)} values")
        for tag, share in shares.items():
            total = sums[tag]
            total[0] += share * numbers[id]
            total[1] += share
            total[2] += 1
    rows = [
        Row(tag, int(count), value / weight)
        for tag, (value, weight, count) in sums.items()
        if count >= minimum
    ]
    return sorted(rows, key=lambda row: (-row.mean, row.tag))


def tag_words(
    words: Mapping[int, str],
    tagger: Tagger | Mapping[str, str],
    *,
    weighing: Weighing = "most-frequent",
    merge: Mapping[str, str] | None = None,
) -> dict[int, dict[str, float]]:
    """The tags of each token with their weights, which sum to 1; empty for words without a tag."""
    if weighing not in WEIGHINGS:
        raise ValueError(f"no weighing {weighing!r}; {suggest(str(weighing), WEIGHINGS)}")
    lookup: Tagger
    if isinstance(tagger, Tags):
        lookup = tagger.shares
    else:
        lookup = tagger.get if isinstance(tagger, Mapping) else tagger
    found = {}
    for id, word in words.items():
        tags = lookup(word)
        given = {} if tags is None else {tags: 1.0} if isinstance(tags, str) else tags
        shares: dict[str, float] = defaultdict(float)
        for tag, share in given.items():
            shares[(merge or {}).get(tag, tag)] += share
        if shares and weighing == "most-frequent":
            # of equal shares the first by name, as the authors choose
            shares = {max(sorted(shares), key=shares.__getitem__): 1.0}
        found[id] = dict(shares)
    return found


def rank_correlation(a: Mapping[str, float], b: Mapping[str, float]) -> float:
    """Spearman's rank correlation over common names; equal numbers share their rank."""
    names = [name for name in a if name in b]
    if len(names) < 2:
        raise ValueError(f"two names in common are needed, but there are {len(names)}")
    ranks = []
    for table in (a, b):
        x = torch.tensor([table[name] for name in names], dtype=torch.float64)
        ranks.append((x[:, None] > x).sum(1) + ((x[:, None] == x).sum(1) - 1) / 2)
    return float(torch.corrcoef(torch.stack(ranks).double())[0, 1])
