"""A short text of a model in training: a greedy continuation, or a greedy translation.

Requirements: cheap, at most `NEW` tokens; without chance, so that a resumed run has the same ones;
and always the same prompt, from the validation data.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .distributed import Team
from .evaluate import Precision, judging, to_device, whole

PROMPT = 32
NEW = 16


def continue_text(model: Any, prompt: Tensor, *, team: Team, precision: Precision) -> list[int]:
    """The most likely next token, `NEW` times."""
    ids = prompt[None].to(team.device)  # [1, T]
    with judging(model):
        for _ in range(NEW):
            # Without a cache: forward alone works for sharded models and for every filter.
            with precision(team.device):
                logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    found: list[int] = ids[0, len(prompt) :].tolist()
    return found


def translate(model: Any, inputs: dict[str, Any], *, team: Team, precision: Precision) -> Tensor:
    """The greedy translation of one sentence, at most `NEW` tokens longer than it."""
    given = to_device(inputs, team.device)
    longest = int(given["input_ids"].shape[1]) + NEW
    with judging(model), whole(model), precision(team.device):
        found: Tensor = model.generate(
            **given, num_beams=1, do_sample=False, max_new_tokens=min(longest, 4 * NEW),
            synced_gpus=team.size > 1 and hasattr(model, "unshard"),
        )  # fmt: skip
    return found


def on_one_line(text: str) -> str:
    """Text that can be shown on a terminal: line ends as ↵, other controls left out."""
    text = text.replace("\n", "↵")
    return "".join(letter for letter in text if letter.isprintable())
