"""Evaluation: perplexity and bits per byte, BLEU, accuracy, recall.

Every number is a sum over the validation data. The processes share the work, and the result does
not depend on their number.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from .distributed import Team

T = TypeVar("T")
Precision = Callable[[torch.device], contextlib.AbstractContextManager[Any]]
# Cut a stream for a batch only if each part has at least this many segments.
SEGMENTS = 16


@contextlib.contextmanager
def judging(model: nn.Module) -> Iterator[None]:
    """Without dropout and gradients; restored afterwards.

    A compiled model runs uncompiled: the last batch is smaller and `generate` grows, which
    would recompile.
    """
    was = model.training
    model.eval()
    try:
        with torch.no_grad(), _uncompiled(model):
            yield
    finally:
        model.train(was)


def _uncompiled(model: Any) -> contextlib.AbstractContextManager[Any]:
    # Imported only where needed: it loads all of dynamo.
    compiled = any(getattr(m, "_compiled_call_impl", None) is not None for m in model.modules())
    return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()


def mean_loss(
    model: Any,
    items: Dataset[Any],
    count: int,
    *,
    batch: int,
    collate: Callable[[list[Any]], dict[str, Any]],
    targets: Callable[[dict[str, Any]], Any],
    team: Team,
    precision: Precision,
    look: Callable[[Any, dict[str, Any]], Any] | None = None,
    note: Callable[[list[int], Any], None] | None = None,
) -> tuple[float, float, float]:
    """Over the first items: the sum of losses, the number of targets, and the sum of `look`.

    `note` gets the numbers of the items of each batch, and the outputs for them.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    with judging(model):
        for numbers, counts in team.deal(count, batch):
            inputs = to_device(collate([items[n] for n in numbers]), team.device)
            with precision(team.device):
                outputs = model(**inputs)
            if counts:
                number = float(targets(inputs))
                found = float(look(outputs, inputs)) if look is not None else 0.0
                if note is not None:
                    note(numbers, outputs)
                # A batch without targets has no mean.
                loss = float(outputs.loss) * number if number else 0.0
                sums += torch.tensor([loss, number, found], dtype=torch.float64)
    loss, number, found = team.sum(list(sums)).tolist()
    return loss, number, found


def stream_loss(
    model: Any, ids: Any, *, length: int, streams: int, team: Team, precision: Precision
) -> tuple[float, float]:
    """The sum of losses and the number of targets, with a memory from segment to segment.

    The text is cut into streams that are read side by side, each from an empty memory.
    """
    places = len(ids) - 1
    streams = max(1, min(streams, places // (SEGMENTS * length)))
    share = -(-places // streams)
    # All processes read equally many streams; those beyond the end do not count.
    each = -(-streams // team.size)
    starts = [(team.rank * each + n) * share for n in range(each)]
    ends = [min(start + share, places) for start in starts]
    total = torch.zeros((), dtype=torch.float64, device=team.device)
    number = 0
    with judging(model):
        held = getattr(model.config, "memory_length", None)
        memory = model.new_memory(held or length)
        for offset in range(0, share, length):
            text, labels = [], []
            for start, end in zip(starts, ends, strict=True):
                place = start + offset
                row = torch.as_tensor(ids[place : place + length + 1].astype("int64"))
                row = F.pad(row, (0, length + 1 - len(row)))  # [length + 1]
                known = max(0, min(end - place, length))
                text.append(row[:-1])
                labels.append(F.pad(row[1 : known + 1], (0, length - known), value=-100))
                number += known
            target = torch.stack(labels).to(team.device)  # [B, length]
            with precision(team.device):
                logits = model(input_ids=torch.stack(text).to(team.device), memory=memory).logits
            total += F.cross_entropy(
                logits.float().flatten(0, 1), target.flatten(), reduction="sum"
            )
    loss, count = team.sum([total, number]).tolist()
    return loss, count


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def score_translations(
    model: Any,
    pairs: Sequence[tuple[str, str]],
    *,
    inputs: Callable[[list[int]], dict[str, Any]],
    decode: Callable[[Any], list[str]],
    batch: int,
    beams: int,
    team: Team,
    precision: Precision,
) -> tuple[dict[str, Any], list[str]]:
    """BLEU of beam search by sacrebleu with its signature, which makes it comparable; the texts."""
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ModuleNotFoundError:
        raise ValueError("BLEU needs sacrebleu: pip install 'mercer[train]'") from None

    found: dict[int, str] = {}
    with judging(model), whole(model):
        for numbers, counts in team.deal(len(pairs), batch):
            given = to_device(inputs(numbers), team.device)
            synced = team.size > 1 and hasattr(model, "unshard")
            with precision(team.device):
                out = search(model, given, beams=beams, synced_gpus=synced)
            if counts:
                found |= dict(zip(numbers, decode(out), strict=True))
    found = gather(found, team)
    metric = BLEU()
    texts = [found[n] for n in range(len(pairs))]
    score = metric.corpus_score(texts, [[target for _, target in pairs]])
    return {"bleu": score.score, "signature": str(metric.get_signature())}, texts


def search(model: Any, given: dict[str, Any], *, beams: int, **options: Any) -> Tensor:
    """The ids of the best translation of each source, by beam search."""
    longest = int(given["input_ids"].shape[1] * 1.2) + 10
    out: Tensor = model.generate(
        **given, num_beams=beams, do_sample=False, max_new_tokens=longest, **options
    )
    return out


def gather(found: dict[int, T], team: Team) -> dict[int, T]:
    """What the processes found for their items, together; collective."""
    if team.size == 1:
        return found
    gathered: list[Any] = [None] * team.size
    torch.distributed.all_gather_object(gathered, found)
    return {n: one for part in gathered for n, one in part.items()}


def score_recall(
    model: Any, data: Any, split: str, *, limit: Callable[[int], int], **how: Any
) -> dict[str, Any]:
    """`accuracy_N`, the share of right values with N pairs, and the means over all N.

    Each number of pairs counts the same, though more pairs have more queries.
    """

    def right(outputs: Any, inputs: dict[str, Any]) -> Tensor:
        hits: Tensor = outputs.logits[:, :-1].argmax(-1).eq(inputs["labels"][:, 1:]).sum()
        return hits

    losses, shares = [], {}
    for pairs in data.held_out_pairs:
        items = data.held_out(split, pairs)
        loss, targets, hits = mean_loss(model, items, limit(len(items)), look=right, **how)
        losses.append(loss / targets)
        shares[f"accuracy_{pairs}"] = hits / targets
    mean = sum(shares.values()) / len(shares)
    return {"eval_loss": sum(losses) / len(losses), "accuracy": mean, **shares}


@contextlib.contextmanager
def whole(model: Any) -> Iterator[None]:
    """Let `generate` of a sharded model gather its weights as `forward` does."""
    if hasattr(model, "unshard"):
        from torch.distributed.fsdp import register_fsdp_forward_method

        register_fsdp_forward_method(model, "generate")
    yield


def to_device(inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {n: x.to(device) if isinstance(x, Tensor) else x for n, x in inputs.items()}
