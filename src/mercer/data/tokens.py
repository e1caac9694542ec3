"""Tokenizers: trained, spelled out in bytes, or loaded.

A tokenizer is named "bpe:N" (a byte-level BPE of N tokens, trained on the train split), "bytes",
"gpt2", a path to a tokenizer's files, or a name on the hub. The result is
always a fast tokenizer of transformers, so it can be saved beside a model.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .cache import Stored, Writer, digest
from .cache import load as cache_array
from .cache import read as read_array
from .encode import SPELLING, cut
from .errors import DataError, check_whole, need, shorten
from .files import read_lines
from .members import MARK

END = "<|endoftext|>"
# files of a tokenizer that name ids
WITH_IDS = ("tokenizer.json", "vocab.json", "added_tokens.json", "tokenizer_config.json")
SPECIALS = {"eos_token": END, "bos_token": END}
# more tokens than any vocabulary has; tables of ids have a place for each id up to the largest
LARGEST = 1 << 24
# enough characters to train a BPE of any size
SAMPLE = 1 << 27


def train(texts: Iterable[str], vocab_size: int, specials: dict[str, str] | None = None) -> Any:
    """A byte-level BPE; special tokens come first."""
    tokenizers = need("tokenizers")
    specials = specials or SPECIALS
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
    specials = specials or SPECIALS
    backend = _byte_level(SPELLING, [])
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


def close(tokenizer: Any) -> Any:
    """A copy that ends every text with its end token, and adds nothing else."""
    tokenizers = need("tokenizers")
    closed, end = copy.deepcopy(tokenizer), tokenizer.eos_token
    closed.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=["$A", end],
        pair=["$A", end, "$B", end],
        special_tokens=[(end, tokenizer.eos_token_id)],
    )
    return closed


def _byte_level(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    tokenizers = need("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend


def choose(
    spec: Any,
    fingerprint: Callable[[], str],
    texts: Callable[[], Iterable[str]],
    folder: Path,
    *,
    source: str | os.PathLike[str] = "",
    specials: dict[str, str] | None = None,
) -> Any:
    """The tokenizer that `spec` names; a trained one is kept in `folder`.

    A BPE is trained on `texts`; `fingerprint` is a hash of them.
    """
    specials = specials or SPECIALS
    if not isinstance(spec, str | os.PathLike):
        return _check(spec)
    if spec == "bytes":
        return spell_bytes(specials)
    if str(spec).startswith("bpe:"):
        return _train_once(read_size(spec), fingerprint(), texts, folder, specials)
    path = Path(spec).expanduser()
    if spec == "gpt2" and not path.exists():
        # the layout of a data folder may have GPT-2's files beside the corpora
        near = Path(os.fspath(source).partition(MARK)[0]).expanduser()
        for parent in (near, *near.parents[:3]):
            if (parent / "tokenizer" / "gpt2" / "merges.txt").is_file():
                return load(parent / "tokenizer" / "gpt2")
        return _download("openai-community/gpt2")
    return load(path) if path.exists() else _download(str(spec))


def find(
    spec: Any,
    fingerprint: str,
    folder: Path,
    *,
    source: str | os.PathLike[str] = "",
    specials: dict[str, str] | None = None,
) -> Any:
    """As `choose`, but None for a BPE that is not trained yet."""
    if not str(spec).startswith("bpe:"):
        return choose(spec, str, tuple, folder, source=source, specials=specials)
    try:
        stored = read_array(_trained_path(read_size(spec), fingerprint, folder, specials))
    except (OSError, ValueError, IndexError, KeyError):
        return None
    return _read_trained(stored, specials or SPECIALS)


def read_size(spec: Any) -> int:
    """N of "bpe:N"."""
    if not re.fullmatch(r"[0-9]{1,12}", str(spec)[4:]):
        raise ValueError(f"a BPE is named like 'bpe:1024', got {shorten(spec)}")
    check_whole("the size of a BPE", size := int(str(spec)[4:]), 1, LARGEST)
    return size


def _check(tokenizer: Any) -> Any:
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ValueError(
            "a tokenizer must be one of transformers' fast tokenizers, or the name of one, "
            f"got {type(tokenizer).__name__}"
        )
    return tokenizer


def load(path: Path) -> Any:
    """A tokenizer from its files: vocab.json and merges.txt, or tokenizer.json."""
    tokenizers, transformers = need("tokenizers"), need("transformers")
    file = path if path.is_file() else path / "tokenizer.json"
    for one in [file] if path.is_file() else [path / name for name in WITH_IDS]:
        if one.is_file():
            _check_ids(one)
    if (path / "tokenizer_config.json").is_file():
        try:
            found = transformers.AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
        # transformers raises many kinds for files that are missing or damaged
        except Exception as error:
            raise DataError(f"{path} holds no tokenizer that can be read ({error})") from error
        return _check(found)
    if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
        return load_gpt2(path / "vocab.json", path / "merges.txt")
    if not file.is_file():
        raise DataError(
            f"{path} holds no tokenizer: neither vocab.json and merges.txt nor {file.name}"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    # tokenizers raises a bare Exception
    except Exception as error:
        raise DataError(f"{file} is not a tokenizer ({error})") from error
    known = backend.get_vocab()
    usual = {
        "eos_token": (END, "</s>"),
        "bos_token": (END, "<s>"),
        "pad_token": ("<pad>",),
    }
    found = {role: next((n for n in names if n in known), None) for role, names in usual.items()}
    try:
        return wrap(backend, {role: name for role, name in found.items() if name is not None})
    # a bare Exception again, such as for two tokens of one id
    except Exception as error:
        raise DataError(f"{file} is not a tokenizer ({error})") from error


def _check_ids(file: Path) -> None:
    """Raise DataError for an id that the libraries would fill the memory for, or end the process.

    Other mistakes in a file are found by the libraries themselves.
    """
    try:
        found = json.loads(file.read_bytes())
    except RecursionError:
        raise DataError(f"{file} is nested too deeply") from None
    except ValueError:
        return
    if not isinstance(found, dict):
        return
    model, added = found.get("model"), found.get("added_tokens")
    tables = [found, model.get("vocab") if isinstance(model, dict) else None]
    ids = [one for table in tables if isinstance(table, dict) for one in table.values()]
    if file.name == "tokenizer_config.json":
        # numbers such as model_max_length are no ids
        decoder = found.get("added_tokens_decoder")
        ids = [int(key) for key in decoder if key.isdecimal()] if isinstance(decoder, dict) else []
    ids += (
        [one.get("id") for one in added if isinstance(one, dict)] if isinstance(added, list) else []
    )
    for one in ids:
        if isinstance(one, int) and not 0 <= one < LARGEST:
            raise DataError(f"{file}: an id must be from 0 to {LARGEST - 1}, got {shorten(one)}")


def load_gpt2(vocabulary: Path, merges: Path) -> Any:
    """GPT-2's byte-level BPE from its two files."""
    tokenizers = need("tokenizers")
    try:
        ids = json.loads(vocabulary.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{vocabulary} is not JSON in UTF-8 ({error})") from error
    if not isinstance(ids, dict) or not all(isinstance(value, int) for value in ids.values()):
        raise DataError(f"{vocabulary} must map tokens to ids")
    pairs: list[tuple[str, str]] = []
    for number, line in read_lines(merges):
        if line and not (number == 1 and line.startswith("#version")):
            first, _, second = line.partition(" ")
            if not second or not {first, second, first + second} <= ids.keys():
                raise DataError(f"{merges}, line {number}: no two tokens of {vocabulary.name}")
            pairs.append((first, second))
    backend = _byte_level(ids, pairs)
    specials = SPECIALS if END in ids else {}
    backend.add_special_tokens([tokenizers.AddedToken(END, special=True)] if specials else [])
    return wrap(backend, specials)


def _download(name: str) -> Any:
    transformers = need("transformers")
    try:
        found = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    # a download fails in many ways: no network, unknown name, licence not accepted
    except Exception as error:
        raise DataError(
            f"the tokenizer {name!r} is not a path and could not be loaded from the Hugging Face "
            "hub. Check the name and the network, or give a folder with its files "
            "(tokenizer.json, or vocab.json and merges.txt), 'bpe:N' or 'bytes'"
        ) from error
    return _check(found)


def _train_once(
    vocab_size: int,
    fingerprint: str,
    texts: Callable[[], Iterable[str]],
    folder: Path,
    specials: dict[str, str],
) -> Any:
    path = _trained_path(vocab_size, fingerprint, folder, specials)

    def write(writer: Writer) -> None:
        trained = train(texts(), vocab_size, specials).backend_tokenizer.to_str()
        writer.append(np.frombuffer(trained.encode(), np.uint8))

    # the JSON of the tokenizer as an array of bytes, which has checksums
    return _read_trained(cache_array(path, write, dtype="uint8"), specials)


def _trained_path(
    vocab_size: int, fingerprint: str, folder: Path, specials: dict[str, str] | None
) -> Path:
    return folder / f"bpe-{digest('bpe', vocab_size, fingerprint, specials or SPECIALS)}.arr"


def _read_trained(stored: Stored, specials: dict[str, str]) -> Any:
    text = stored.array.tobytes().decode()
    return wrap(need("tokenizers").Tokenizer.from_str(text), specials)


def sample(texts: Iterable[str]) -> Iterator[str]:
    """Pieces of the texts, until there are enough to train on."""
    seen = 0
    for text in texts:
        pieces, left = cut(text)
        yield from [*pieces, left]
        seen += len(text)
        if seen >= SAMPLE:
            return
