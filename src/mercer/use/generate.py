"""Text from a language model, piece by piece as it is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..data.encode import choose_encoder
from .load import Trained

LARGEST = 10**6
# The seeds that torch's generators take.
LARGEST_SEED = 2**63 - 1
# Tokens that a character may be spread over, and how many earlier ones decide how it is written.
SPREAD, BEFORE = 8, 8


def generate(
    trained: Trained,
    prompt: str,
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    say: Callable[[str], None] | None = None,
) -> Iterator[str]:
    """What follows the prompt, in pieces of one token or a few; ends with the document.

    Args:
        tokens: at most so many.
        temperature: divides the logits; 0 takes the most likely token each time.
        top_k: draw from the k most likely tokens alone.
        top_p: draw from the most likely tokens that together have this probability.
        seed: equal seeds give equal texts, on the same device.
        say: called with a message, such as that the positions of the model have ended.
    """
    if trained.task != "lm":
        raise ValueError("generate needs a language model")
    _check(tokens, temperature, top_k, top_p, seed)
    ids = _encode(trained, prompt)
    most = trained.most_places
    if most is not None and len(ids) > most:
        raise ValueError(
            f"the prompt has {len(ids)} tokens, but the model's positions end at {most}"
        )
    draw = _make_draw(temperature, top_k, top_p, trained.device, seed)
    return _pieces(trained, ids, tokens, draw, say or (lambda text: None))


def _pieces(
    trained: Trained,
    ids: list[int],
    tokens: int,
    draw: Callable[[Tensor], int],
    say: Callable[[str], None],
) -> Iterator[str]:
    model, tokenizer = trained.model, trained.tokenizer
    most, ends = trained.most_places, _ends(trained)
    known, held = ids[-BEFORE:], 0
    cache = trained.new_cache()
    new = torch.tensor([ids], device=trained.device)
    for _ in range(tokens):
        if most is not None and cache.get_seq_length() + new.shape[1] > most:
            say(f"the model's positions end here, at {most} tokens")
            break
        # No gradient for this step alone: the caller runs between the pieces.
        with torch.no_grad():
            logits = model(new, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        chosen = draw(logits[0, -1].float())
        if chosen in ends:
            break
        known.append(chosen)
        held += 1
        piece = _decode(tokenizer, known, held)
        # A character may need more tokens before it can be written.
        if not piece.endswith("\ufffd") or held >= SPREAD:
            yield piece
            known, held = known[-BEFORE:], 0
        new = torch.tensor([[chosen]], device=trained.device)
    if held:
        yield _decode(tokenizer, known, held)


def _decode(tokenizer: Any, ids: list[int], last: int) -> str:
    """The text of the last tokens, as it stands after those before."""
    whole, before = (
        tokenizer.decode(part, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for part in (ids, ids[:-last])
    )
    return str(whole[len(before) :])


def _encode(trained: Trained, prompt: str) -> list[int]:
    """The ids of the prompt as the beginning of a document."""
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError("the prompt is empty: give some words to begin with")
    (codes,) = choose_encoder(trained.tokenizer)([prompt])
    start = trained.tokenizer.eos_token_id
    return [*([] if start is None else [start]), *(int(n) for n in codes)]


def _ends(trained: Trained) -> set[int]:
    """The tokens that end a document."""
    named = [trained.model.config.eos_token_id, trained.tokenizer.eos_token_id]
    return {n for one in named for n in (one if isinstance(one, list) else [one]) if n is not None}


def _make_draw(
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    device: torch.device,
    seed: int,
) -> Callable[[Tensor], int]:
    generator = torch.Generator(device).manual_seed(seed)

    def draw(logits: Tensor) -> int:
        if not bool(logits.isfinite().any()) or bool(logits.isnan().any()):
            raise ValueError("the model gives no finite probability: its training diverged")
        if temperature == 0:
            return int(logits.argmax())
        chance = (logits / temperature).softmax(-1)
        if top_k is not None or top_p is not None:
            chance, order = chance.sort(descending=True, stable=True)
            if top_k is not None:
                chance[top_k:] = 0
            if top_p is not None:
                # The first token stays, whatever its probability is.
                chance[1:][(chance.cumsum(-1) / chance.sum())[:-1] >= top_p] = 0
            return int(order[torch.multinomial(chance, 1, generator=generator)])
        return int(torch.multinomial(chance, 1, generator=generator))

    return draw


def _check(
    tokens: int, temperature: float, top_k: int | None, top_p: float | None, seed: int
) -> None:
    for name, value, least, most in (
        ("tokens", tokens, 1, LARGEST),
        ("top_k", top_k, 1, LARGEST),
        ("seed", seed, 0, LARGEST_SEED),
    ):
        if value is not None and (not isinstance(value, int) or not least <= value <= most):
            raise ValueError(f"{name} must be a whole number from {least} to {most}, got {value!r}")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature must be 0 or more, got {temperature!r}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p!r}")
