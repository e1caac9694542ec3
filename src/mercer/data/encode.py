"""From text to ids, block by block, for a corpus larger than memory.

With byte-level tokenizers that split by GPT-2's pattern, the pieces of a text have the same tokens
as the whole text. For other tokenizers the text is cut at line ends, or between words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from .cache import Writer, digest
from .corpus import Block
from .errors import need

PIECE = 1 << 14
BATCH = 1 << 20

Ids = Sequence[int] | np.ndarray[Any, Any]

# GPT-2's pattern never joins white space to a word before it, and the last white space of a run
# always begins a new word; so before it a text can be cut without changing its tokens
LINE = re.compile(r"\n(?=\S)")
WORD = re.compile(r"[ \n\t\r](?=\S)")


def _spell() -> dict[str, int]:
    """GPT-2's table from bytes to printable characters."""
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return {chr(byte if byte in printed else next(others)): byte for byte in range(256)}


SPELLING = _spell()


def cut(text: str, size: int = PIECE) -> tuple[list[str], str]:
    """Pieces of about `size` characters that tokenise as the whole does, and the rest."""
    pieces, start = [], 0
    while len(text) - start > 2 * size:
        near, far = start + size, start + 2 * size
        found = LINE.search(text, near, far) or WORD.search(text, near, far)
        end = found.start() if found else far
        pieces.append(text[start:end])
        start = end
    return pieces, text[start:]


def encode(
    blocks: Iterable[Block],
    tokenizer: Any,
    writer: Writer,
    on_progress: Callable[[float], None] | None = None,
) -> None:
    """Write the ids of the blocks; each document begins with the end-of-text token."""
    encode_batch = choose_encoder(tokenizer)
    end = tokenizer.eos_token_id
    batch: list[str | None] = []
    left, size, num_bytes = "", 0, 0

    def flush() -> None:
        codes = iter(encode_batch([piece for piece in batch if piece is not None]))
        ids = [[end] if piece is None else next(codes) for piece in batch]
        if ids:
            writer.append(np.concatenate([pack(run, writer.dtype) for run in ids]))
        batch.clear()

    for block in blocks:
        if block.first:
            batch += [left] if left else []
            batch += [None] if end is not None else []
            left = ""
        num_bytes += len(block.text.encode())
        size += len(block.text)
        pieces, left = cut(left + block.text)
        batch += pieces
        if size >= BATCH:
            flush()
            size = 0
            if on_progress is not None:
                on_progress(block.done)
    batch += [left] if left else []
    flush()
    writer.notes["num_bytes"] = num_bytes
    if on_progress is not None:
        on_progress(1.0)


def choose_encoder(tokenizer: Any) -> Callable[[list[str]], Iterable[Ids]]:
    """The function from texts to ids. Special tokens inside a text are plain text."""
    tokenizers = need("tokenizers")
    # a copy: its settings are changed here
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    if backend.get_vocab(with_added_tokens=False) == SPELLING:
        return lambda texts: [np.frombuffer(text.encode(), np.uint8) for text in texts]
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()

    def encode_batch(texts: list[str]) -> Iterable[Ids]:
        return (code.ids for code in backend.encode_batch_fast(texts, add_special_tokens=False))

    return encode_batch


def width(tokenizer: Any) -> str:
    """The smallest dtype that holds every id."""
    return "uint16" if len(tokenizer) <= 1 << 16 else "uint32"


def pack(ids: Ids, dtype: Any) -> np.ndarray[Any, Any]:
    """The ids as an array."""
    try:
        return np.asarray(ids, dtype=dtype)
    except OverflowError:
        raise ValueError(
            f"the tokenizer gives the id {max(ids)}, which is beyond its number of tokens; "
            "ids must be from 0 on without holes"
        ) from None


def identify(tokenizer: Any) -> str:
    """A fingerprint of a tokenizer."""
    return digest(tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id)
