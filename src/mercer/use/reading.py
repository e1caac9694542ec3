"""Read a trained model: every table that a page of `mercer inspect` shows.

The text of a language model is cut into windows of `context` tokens, as the model saw it in
training. Heads are measured on the first windows, rows on the first one. Other models are read by
`examples.py`.
"""

from __future__ import annotations

import inspect as python
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import inspect
from ..data import DataError, tokens
from ..data.encode import SPELLING, choose_encoder
from ..nn import TokenKernels
from .examples import read_examples, rename_curves
from .load import KINDS, Trained

# The most tokens of a text on a page, and the most that heads are measured on.
TEXT, MEASURED = 20_000, 2048
# The longest window by itself, and the most weights of rows on a page.
CONTEXT, WEIGHTS = 1024, 90_000

NAMED = {"k": "keys", "v": "values"}
Say = Callable[[str], None]
Facts = tuple[tuple[str, str], ...]


def read(
    trained: Trained,
    text: str | None = None,
    *,
    tagger: inspect.Tags | None = None,
    published: str | None = None,
    context: int | None = None,
    places: tuple[int, int] | None = None,
    most: int = 8,
    rows: bool = True,
    progress: Say | None = None,
) -> inspect.Report:
    """Heads, rows, token kernels and training of a model, with a text of yours or its own.

    A translator or a vision transformer is read with examples of its run's validation data. It has
    heads and training, and takes none of the other arguments but `progress`.

    Args:
        text: by default the validation data of the run, which a saved model does not have.
        tagger: parts of speech, as `read_conllu` gives them.
        published: the corpus whose published means to set beside, "shakes" or "victorian".
        context: how many tokens the model sees at a time; by default as in training.
        places: the first and last token, from 0, whose rows are read; by default the last ones of
            the first window, as many as a page holds.
        most: how many weights of each row are kept.
        rows: whether rows are read.
        progress: called with what is being read.
    """
    say = progress or (lambda text: None)
    if trained.task in ("translation", "vision"):
        return _read_examples(trained, say, {
            "--text": text, "--tags": tagger, "--published": published, "--context": context,
            "--rows": places,
        })  # fmt: skip
    if trained.task not in ("lm", "recall") or trained.tokenizer is None:
        raise ValueError(
            f"the model in {trained.path} is {KINDS[trained.task][1]}, which mercer inspect does "
            "not read; mercer.inspect.heads(model, batch) takes any model"
        )
    words = spell(trained.tokenizer, trained.model.config.vocab_size)
    say("the text")
    ids = _ids(trained, text)
    context = _context(trained, context, len(ids))
    found: dict[str, Any] = {
        "title": _title(trained), "words": tuple(words), "ids": tuple(ids),
        "context": context, "corpus": published if tagger is not None else None,
        "facts": _facts(trained, _text_facts(len(ids), context)),
    }  # fmt: skip
    notes = []
    if len(ids) >= 2:
        windows = torch.tensor(ids[: len(ids) - len(ids) % context], device=trained.device)
        windows = windows.view(-1, context)[: max(1, MEASURED // context)]
        batch = _batch(trained.model, windows)
        say("heads")
        found["heads"] = inspect.heads(trained.model, batch)
        found["positions"] = inspect.by_distance(trained.model, _batch(trained.model, windows[:1]))
        found["spreads"] = inspect.spreads(trained.model, batch, windows, words)
        if rows:
            number = WEIGHTS // (len(found["heads"]) * most)
            chosen = _places(places, context, number)
            found["rows"] = inspect.largest(
                trained.model, _batch(trained.model, windows[:1]), chosen, most=most,
                progress=lambda layer: say(f"rows of {layer}"),
            )  # fmt: skip
    else:
        notes.append("The text is empty, so there are no heads and no rows to read.")
    if inspect.find_token_kernels(trained.model) is not None:
        say("token kernels")
        found |= token_tables(trained.model, words, ids, text, tagger, published)
    return inspect.Report(notes=tuple(notes), curves=_curves(trained), **found)


def _read_examples(trained: Trained, say: Say, given: dict[str, Any]) -> inspect.Report:
    for option, value in given.items():
        if value is not None:
            raise ValueError(
                f"{option} is for language models, and the model in {trained.path} is "
                f"{KINDS[trained.task][1]}, which is read with the validation data of its run"
            )
    found, curves = read_examples(trained, say), _curves(trained)
    found["facts"] = _facts(trained, found["facts"])
    if curves is not None:
        curves = rename_curves(trained, curves)
    return inspect.Report(title=_title(trained), curves=curves, **found)


def read_published(
    path: Path,
    tokenizer: str = "gpt2",
    text: str | None = None,
    *,
    tagger: inspect.Tags | None = None,
    published: str | None = None,
    progress: Say | None = None,
) -> inspect.Report:
    """The authors' token kernels in a file, without a model.

    Args:
        path: what `TokenKernels.load_published` takes, with kernels of the first layer.
        tokenizer: "gpt2", or the files of the tokenizer that the ids are of.
        text, tagger, progress: as for `read`.
        published: the corpus; by default the name of the file, if it is one.
    """
    say = progress or (lambda text: None)
    say("token kernels")
    kernels = TokenKernels.load_published(path)
    # GPT-2's files may stand near the weights.
    found = tokens.choose(tokenizer, str, tuple, path.parent, source=path.parent)
    words = spell(found, kernels.vocab_size)
    own = len(found.get_vocab())
    if len(words) > kernels.vocab_size:
        raise ValueError(
            f"{path} has kernels of {kernels.vocab_size} tokens, but the tokenizer has "
            f"{len(words)}: give its own with --tokenizer"
        )
    ids = [] if text is None else encode(found, text)
    if published is None and path.stem in inspect.PUBLISHED:
        published = path.stem
    shape = f"{kernels.size} taps on {' and '.join(NAMED[t] for t in kernels.on)}"
    facts = [("published kernels", shape), ("vocabulary", f"{kernels.vocab_size:,} tokens")]
    notes = ["These are token kernels without a model, so there are no heads and no rows."]
    if own < kernels.vocab_size:
        notes.append(
            f"The tokenizer {tokenizer} has {own:,} tokens, and there are kernels of "
            f"{kernels.vocab_size:,}: if it is not theirs, the words are wrong."
        )
    if ids:
        facts.append(("text", f"{len(ids):,} tokens"))
    elif tagger is not None and published is not None:
        notes.append(
            "The published means are of the words of a text; these are of the whole vocabulary. "
            "Give the text with --text to compare them."
        )
    return inspect.Report(
        title=path.stem, facts=tuple(facts), words=tuple(words), ids=tuple(ids),
        corpus=published if tagger is not None else None,
        notes=tuple(notes), **token_tables(kernels, words, ids, text, tagger, published),
    )  # fmt: skip


def token_tables(
    model: Any,
    words: Sequence[str],
    ids: Sequence[int],
    text: str | None,
    tagger: inspect.Tags | None,
    published: str | None,
) -> dict[str, Any]:
    """The tables of token kernels: all tokens, and parts of speech where there is a tagger."""
    counts = inspect.count_ids(torch.tensor(ids, dtype=torch.long), len(words)) if ids else None
    if tagger is None:
        return {"tokens": inspect.tokens(model, words, counts=counts)}
    known = inspect.words_from(words)
    tags = inspect.tags_by_id(known, tagger)
    # Published means are of the words of a text, all of it.
    within = text or "".join(words[n] for n in ids)
    some = inspect.words_from(words, within) if published and within else known
    return {
        "tokens": inspect.tokens(model, words, counts=counts, tags=tags),
        "tags": inspect.summarise_tags(model, some, tagger, published=published),
    }


def spell(tokenizer: Any, size: int | None = None) -> list[str]:
    """The text of every id; bytes that are no text by themselves as \\xe2."""
    number = max(tokenizer.get_vocab().values(), default=-1) + 1
    backend = tokenizer.backend_tokenizer
    texts = backend.decode_batch([[n] for n in range(number)], skip_special_tokens=False)
    found = []
    for n, text in enumerate(texts):
        token = backend.id_to_token(n) or ""
        if token.startswith("\u2581") and not text.startswith(" "):
            text = f" {text}"
        elif "\ufffd" in text and "\ufffd" not in token and all(c in SPELLING for c in token):
            text = "".join(_byte(SPELLING[c]) for c in token)
        found.append(text)
    return found + [f"(id {n})" for n in range(number, size or number)]


def _byte(n: int) -> str:
    return chr(n) if 32 <= n < 127 else f"\\x{n:02x}"


def _ids(trained: Trained, text: str | None) -> list[int]:
    if text is not None:
        return encode(trained.tokenizer, text)
    if trained.settings is None:
        raise ValueError(
            f"the model in {trained.path} is not in the folder of a run, so there is no text of "
            "its own: give one with --text"
        )
    from ..train.run import quiet
    from ..train.tasks import TASKS

    try:
        with quiet():
            task = TASKS[trained.task](trained.settings, like=trained.tokenizer)
    except DataError as error:
        raise ValueError(
            f"the data of the run cannot be read ({error}): give a text with --text"
        ) from None
    ids: list[int] = task.valid.ids[:TEXT].tolist()
    return ids


def encode(tokenizer: Any, text: str) -> list[int]:
    """The first tokens of a text, after the token that begins a document."""
    # A token has at least one character.
    text = text[: 16 * TEXT]
    if not text.strip():
        return []
    (codes,) = choose_encoder(tokenizer)([text])
    start = tokenizer.bos_token_id
    start = tokenizer.eos_token_id if start is None else start
    return [*([] if start is None else [start]), *(int(n) for n in codes)][:TEXT]


def _context(trained: Trained, given: int | None, length: int) -> int:
    config = trained.model.config
    most = getattr(trained.model, "most_places", getattr(config, "max_position_embeddings", None))
    if given is not None:
        if given < 2 or (most is not None and given > most):
            end = "" if most is None else f" and at most {most}, where the model's positions end"
            raise ValueError(f"--context must be at least 2{end}, got {given}")
        return max(1, min(given, length))
    own = None if trained.settings is None else trained.settings.length
    return max(1, min(own or CONTEXT, most or CONTEXT, length))


def _places(given: tuple[int, int] | None, context: int, number: int) -> range:
    if given is None:
        return range(max(0, context - max(number, 1)), context)
    first, last = given
    if not 0 <= first <= last < context:
        raise ValueError(
            f"--rows must be FIRST:LAST with 0 <= FIRST <= LAST < {context}, the context, got "
            f"{first}:{last}"
        )
    return range(first, last + 1)


def _batch(model: Any, ids: Tensor) -> dict[str, Any]:
    batch: dict[str, Any] = {"input_ids": ids}
    # The logits of all places would be the largest tensor of all.
    if "logits_to_keep" in python.signature(model.forward).parameters:
        batch["logits_to_keep"] = 1
    return batch


def _title(trained: Trained) -> str:
    name = trained.run or trained.path
    return name.name or str(name)


def _curves(trained: Trained) -> inspect.Curves | None:
    run = trained.run
    return inspect.curves(run) if run is not None and (run / "metrics.jsonl").is_file() else None


def _text_facts(length: int, context: int) -> Facts:
    facts = [("text", f"{length:,} tokens")]
    return (*facts, *([("context", f"{context:,} tokens")] if length else []))


def _facts(trained: Trained, read: Facts) -> Facts:
    """What the model is, and what it was read with."""
    number = sum(p.numel() for p in trained.model.parameters())
    facts = [("parameters", f"{number:,}"), *read]
    settings = trained.settings
    if settings is not None:
        named = {"system": settings.system, "kernel": settings.kernel, "data": settings.data}
        facts += [
            (name, Path(str(value)).name if name == "data" else str(value))
            for name, value in named.items()
            if value is not None
        ]
    return tuple(facts)
