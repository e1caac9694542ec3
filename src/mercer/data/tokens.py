"""From text to ids: tokenizers, and the encoding of a corpus block by block.

A tokenizer is named "bpe:N" (a byte-level BPE of N tokens, trained on the train split), "bytes",
"gpt2", a path to a tokenizer's files, or a name on the hub. What comes back is always a
`PreTrainedTokenizerFast`, so it can be saved beside a model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .cache import Writer, digest, replacing
from .corpus import Block
from .errors import need

END = "<|endoftext|>"
PIECE = 1 << 14
BATCH = 1 << 22
# a BPE of any size has seen enough after this many characters
SAMPLE = 1 << 27

# GPT-2's pattern never joins white space to a word before it, and the last white space of a run
# always begins a new word; so before it a text can be cut without changing its tokens
LINE = re.compile(r"\n(?=\S)")
WORD = re.compile(r"[ \n\t\r](?=\S)")


def cut(text: str, size: int = PIECE) -> tuple[list[str], str]:
    """Pieces of about `size` characters whose tokens are those of the whole, and what is left."""
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
    backend = prepare(tokenizer)
    end = tokenizer.eos_token_id
    batch: list[str | None] = []
    left, size, num_bytes = "", 0, 0

    def flush() -> None:
        texts = [piece for piece in batch if piece is not None]
        codes = iter(backend.encode_batch_fast(texts, add_special_tokens=False))
        ids = [[end] if piece is None else next(codes).ids for piece in batch]
        if ids:
            writer.append(np.concatenate([np.array(run, dtype=writer.dtype) for run in ids]))
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


def prepare(tokenizer: Any) -> Any:
    """A copy of what is inside a tokenizer, which takes special tokens in a text for plain text."""
    tokenizers = need("tokenizers")
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    return backend


def width(tokenizer: Any) -> str:
    """The smallest dtype that holds every id."""
    return "uint16" if len(tokenizer) <= 1 << 16 else "uint32"


def identify(tokenizer: Any) -> str:
    """A name for what a tokenizer does."""
    return digest(tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id)


def train(texts: Iterable[str], vocab_size: int, specials: dict[str, str] | None = None) -> Any:
    """A byte-level BPE; special tokens come first."""
    tokenizers = need("tokenizers")
    specials = specials or {"eos_token": END, "bos_token": END}
    names = list(dict.fromkeys(specials.values()))
    smallest = 256 + len(names)
    if vocab_size < smallest:
        raise ValueError(
            f"a byte-level BPE must have {smallest} tokens or more (256 bytes and "
            f"{len(names)} special), but {vocab_size} were asked for"
        )
    backend = _byte_level({}, [])
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=names,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(sample(texts), trainer)
    return wrap(backend, specials)


def spell_bytes(specials: dict[str, str] | None = None) -> Any:
    """Ids 0 to 255 are the bytes themselves; special tokens follow."""
    specials = specials or {"eos_token": END, "bos_token": END}
    vocabulary = {letter: byte for byte, letter in enumerate(_letters())}
    backend = _byte_level(vocabulary, [])
    tokenizers = need("tokenizers")
    names = dict.fromkeys(specials.values())
    backend.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in names])
    return wrap(backend, specials)


def wrap(backend: Any, specials: dict[str, str]) -> Any:
    """A transformers tokenizer around one of tokenizers."""
    transformers = need("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        **specials,
    )


def sample(texts: Iterable[str]) -> Iterator[str]:
    """Pieces of the texts, until there are enough to train on."""
    seen = 0
    for text in texts:
        pieces, left = cut(text)
        yield from [*pieces, left]
        seen += len(text)
        if seen >= SAMPLE:
            return


def _byte_level(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    tokenizers = need("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend


def _letters() -> list[str]:
    """The letter that stands for each byte in GPT-2's files: itself where it can be printed."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printed else next(others)) for byte in range(256)]


def choose(spec: Any, fingerprint: str, texts: Callable[[], Iterable[str]], folder: Path) -> Any:
    """The tokenizer that `spec` names; a trained one is kept in `folder`."""
    if not isinstance(spec, str):
        return spec
    if spec == "bytes":
        return spell_bytes()
    if spec.startswith("bpe:"):
        if not spec[4:].isdecimal():
            raise ValueError(f"a BPE is named like 'bpe:1024', but came as {spec!r}")
        return _train_once(int(spec[4:]), fingerprint, texts, folder)
    raise ValueError(f"tokenizer must be 'bpe:N' or 'bytes', but came as {spec!r}")


def _train_once(
    vocab_size: int, fingerprint: str, texts: Callable[[], Iterable[str]], folder: Path
) -> Any:
    tokenizers = need("tokenizers")
    specials = {"eos_token": END, "bos_token": END}
    path = folder / f"bpe-{digest('bpe', vocab_size, fingerprint, specials)}.json"
    try:
        return wrap(tokenizers.Tokenizer.from_file(str(path)), specials)
    # tokenizers raises a bare Exception for a file that is missing or damaged
    except Exception:
        trained = train(texts(), vocab_size, specials)
    with replacing(path) as file:
        assert file is not None
        file.write(trained.backend_tokenizer.to_str().encode())
    return trained
