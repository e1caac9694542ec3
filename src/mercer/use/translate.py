"""Translations by beam search, in the order of the lines, batch by batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..data.encode import choose_encoder
from ..train.evaluate import search, to_device
from ..train.run import quiet
from ..train.scores import one_line
from .load import Trained

BEAMS, BATCH = 4, 32
MOST_BEAMS, MOST_BATCH = 1024, 1 << 20


def translate(
    trained: Trained, lines: Iterable[str], *, beams: int | None = None, batch: int = BATCH
) -> Iterator[str]:
    """A translation of each line, one line each; an empty line stays empty.

    Args:
        lines: read `batch` at a time, so with batch=1 each is answered before the next is read.
        beams: of the search; by default those of the run, else 4. 1 is greedy.
    """
    if trained.task != "translation":
        raise ValueError("translate needs a translator")
    if beams is None:
        beams = BEAMS if trained.settings is None else trained.settings.beams
    for name, value, most in (("beams", beams, MOST_BEAMS), ("batch", batch, MOST_BATCH)):
        if not isinstance(value, int) or not 1 <= value <= most:
            raise ValueError(f"{name} must be a whole number from 1 to {most}, got {value!r}")
    return _translations(trained, iter(lines), beams, batch)


def _translations(trained: Trained, lines: Iterator[str], beams: int, batch: int) -> Iterator[str]:
    encode, read = choose_encoder(trained.tokenizer), 0
    while some := [line.strip() for line in itertools.islice(lines, batch)]:
        places = [n for n, line in enumerate(some) if line]
        found = [""] * len(some)
        if places:
            codes = list(encode([some[n] for n in places]))
            ids = [[*map(int, code), trained.tokenizer.eos_token_id] for code in codes]
            for n, code in zip(places, ids, strict=True):
                _check_length(trained, read + n + 1, len(code))
            for n, text in zip(places, _search(trained, ids, beams), strict=True):
                found[n] = text
        read += len(some)
        yield from found


def _search(trained: Trained, ids: list[list[int]], beams: int) -> list[str]:
    """The translations of sources that have an end token each."""
    pad = trained.tokenizer.pad_token_id
    rows: list[Tensor] = [torch.tensor(row) for row in ids]
    source = pad_sequence(rows, batch_first=True, padding_value=0 if pad is None else pad)  # [B, S]
    lengths = torch.tensor([len(row) for row in ids])
    mask = (torch.arange(source.shape[1]) < lengths[:, None]).long()  # [B, S]
    given: dict[str, Any] = to_device({"input_ids": source, "attention_mask": mask}, trained.device)
    with torch.no_grad(), quiet():
        out = search(trained.model, given, beams=beams)
    texts = trained.tokenizer.batch_decode(out, skip_special_tokens=True)
    return [one_line(text) for text in texts]


def _check_length(trained: Trained, line: int, length: int) -> None:
    most = trained.model.most_places
    if most is not None and length > most:
        raise ValueError(
            f"line {line} has {length} tokens, but the model's positions end at {most}: "
            "split it into sentences"
        )
