"""Token kernels as tables: every token, and the means of parts of speech."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..nn import TokenKernels
from .effects import Numbers
from .records import Records
from .tags import Tagger, Weighing, tag_words

# The means that the authors published, by universal part of speech ("prop" there is ADP and PART),
# and the size of their tables.
PUBLISHED: dict[str, dict[str, float]] = {
    "shakes": {
        "DET": 0.0520, "CCONJ": 0.0314, "PRON": 0.0261, "ADP": 0.0244, "AUX": 0.0180,
        "SCONJ": 0.0130, "ADV": 0.0061, "ADJ": 0.0037, "NUM": 0.0033, "INTJ": 0.0015,
        "VERB": 0.0010, "NOUN": 0.0009, "PROPN": 0.0008,
    },
    "victorian": {
        "CCONJ": 0.0513, "DET": 0.0400, "ADP": 0.0245, "PRON": 0.0203, "SCONJ": 0.0171,
        "AUX": 0.0154, "ADJ": 0.0098, "INTJ": 0.0072, "ADV": 0.0036, "NOUN": 0.0020,
        "PROPN": 0.0012, "VERB": 0.0010, "NUM": 0.0005,
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TokenKernel:
    """The kernel of one token; the mean where a token has several.

    Attributes:
        id, text: the token.
        count: how often it occurs in the text; None without one.
        tag: its part of speech, where there are tags.
        kernel: the taps, from the left neighbour to the right.
        deviation: |kernel - Dirac|.
        direction: the taps to the right minus those to the left: below 0 it reads more from the
            tokens before it.
    """

    id: int
    text: str
    count: int | None
    tag: str | None
    kernel: tuple[float, ...]
    deviation: float
    direction: float


class Tokens(Records[TokenKernel]):
    """A row for each token, in the order of their ids."""

    def plot(self, axes: Any = None, *, most: int = 20) -> Any:
        """The most deviating tokens as strips of taps, on matplotlib's axes."""
        from .plots import plot_tokens

        return plot_tokens(self, axes, most=most)


@dataclass(frozen=True, kw_only=True)
class TagSummary:
    """The deviations of one part of speech.

    Attributes:
        tag, tokens: the part of speech, and how many tokens have it.
        mean, spread: of their deviations, with their standard deviation.
        direction: the mean direction.
        published: the mean that the authors published for a corpus, where it is given.
        most, least: the most and the least deviating tokens.
    """

    tag: str
    tokens: int
    mean: float
    spread: float
    direction: float
    published: float | None
    most: tuple[str, ...]
    least: tuple[str, ...]


class TagSummaries(Records[TagSummary]):
    """A row for each part of speech, the largest mean first."""

    def plot(self, axes: Any = None) -> Any:
        """Means with their spread, beside the published ones, on matplotlib's axes."""
        from .plots import plot_tags

        return plot_tags(self, axes)


def find_token_kernels(model: nn.Module) -> TokenKernels | None:
    """The token kernels of a model; None if it has none."""
    found = next((m for m in model.modules() if isinstance(m, TokenKernels)), None)
    # Layers may hold them without registering them.
    for module in model.modules() if found is None else ():
        held = getattr(module, "tokens", None)
        if isinstance(held, TokenKernels):
            return held
    return found


@torch.no_grad()
def tokens(
    model: nn.Module,
    texts: Sequence[str] | None = None,
    *,
    counts: Numbers | None = None,
    tags: Mapping[int, str] | None = None,
) -> Tokens:
    """A row for each token of the vocabulary.

    Args:
        model: a model with token kernels, or the `TokenKernels` themselves.
        texts: what each id stands for; by default the number itself.
        counts: how often each id occurs, as `count_ids` gives it.
        tags: parts of speech by id, as `tags_by_id` gives them.
    """
    table = find_token_kernels(model)
    if table is None:
        raise ValueError(f"there are no token kernels in {type(model).__name__}")
    each = table.kernels().double().flatten(1, 3)  # [vocab, kernels, size]
    kernels, p = each.mean(1), table.size // 2
    deviation = table.deviation()
    direction = kernels[:, p + 1 :].sum(-1) - kernels[:, :p].sum(-1)
    columns = [x.cpu().tolist() for x in (kernels, deviation, direction)]
    number: list[int | None] = [None] * table.vocab_size
    if counts is not None:
        number = [int(n) for n in torch.as_tensor(counts).tolist()]
    for name, given in (("texts", texts), ("counts", number)):
        if given is not None and len(given) < table.vocab_size:
            raise ValueError(
                f"{name} must have one for each of the {table.vocab_size} tokens, got {len(given)}"
            )
    return Tokens(
        tuple(
            TokenKernel(
                id=n, text=str(n) if texts is None else texts[n],
                count=number[n],
                tag=None if tags is None else tags.get(n),
                kernel=tuple(kernel), deviation=away, direction=side,
            )
            for n, (kernel, away, side) in enumerate(zip(*columns, strict=True))
        )
    )  # fmt: skip


def words_from(texts: Sequence[str], within: str | None = None) -> dict[int, str]:
    """The tokens of letters only, by id; with a text, those that are whole words of it."""
    found = {id: text for id, text in enumerate(texts) if re.fullmatch(" ?[A-Za-z]+", text)}
    if within is not None:
        whole = set(re.findall(" ?[A-Za-z]+", within))
        found = {id: text for id, text in found.items() if text in whole}
    return {id: text.removeprefix(" ") for id, text in found.items()}


def tags_by_id(words: Mapping[int, str], tagger: Tagger | Mapping[str, str]) -> dict[int, str]:
    """The most frequent part of speech of each word that has one."""
    shares = tag_words(words, tagger)
    return {id: next(iter(one)) for id, one in shares.items() if one}


def summarise_tags(
    model: nn.Module,
    words: Mapping[int, str],
    tagger: Tagger | Mapping[str, str],
    *,
    published: str | None = None,
    weighing: Weighing = "most-frequent",
    minimum: int = 5,
    most: int = 8,
) -> TagSummaries:
    """Means, spread and extreme words of each part of speech, the largest mean first.

    Args:
        model, words, tagger, weighing, minimum: as for `tokens` and `by_tag`.
        published: the corpus whose published means to set beside, "shakes" or "victorian".
        most: how many words to name at each end.
    """
    if published is not None and published not in PUBLISHED:
        raise ValueError(f"published must be {' or '.join(PUBLISHED)}, got {published!r}")
    known = PUBLISHED.get(published or "", {})
    # Where their tags are joined, ours must be too.
    merge = {"PART": "ADP"} if published else None
    table = tokens(model)
    found: dict[str, list[tuple[float, TokenKernel, str]]] = defaultdict(list)
    for id, shares in tag_words(words, tagger, weighing=weighing, merge=merge).items():
        if not 0 <= id < len(table):
            raise ValueError(f"{words[id]!r} has the id {id}, but there are {len(table)} tokens")
        for tag, share in shares.items():
            found[tag].append((share, table[id], words[id]))
    rows = []
    for tag, each in found.items():
        if len(each) < minimum:
            continue
        weight = torch.tensor([share for share, _, _ in each], dtype=torch.float64)
        away = torch.tensor([one.deviation for _, one, _ in each], dtype=torch.float64)
        side = torch.tensor([one.direction for _, one, _ in each], dtype=torch.float64)
        mean = float(_mean(away, weight))
        order = sorted(each, key=lambda item: -item[1].deviation)
        rows.append(
            TagSummary(
                tag=tag, tokens=len(each), mean=mean,
                spread=float(_mean((away - mean).square(), weight).sqrt()),
                direction=float(_mean(side, weight)), published=known.get(tag),
                most=_names(order, most), least=_names(order[::-1], most),
            )
        )  # fmt: skip
    return TagSummaries(tuple(sorted(rows, key=lambda row: (-row.mean, row.tag))))


def _names(order: Sequence[tuple[float, TokenKernel, str]], most: int) -> tuple[str, ...]:
    """The first words, each once."""
    return tuple(dict.fromkeys(word for _, _, word in order))[:most]


def _mean(x: Tensor, weight: Tensor) -> Tensor:
    return (x * weight).sum() / weight.sum()
