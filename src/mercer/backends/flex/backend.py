"""torch's FlexAttention: a term of one dot product, with any filter, user-defined ones included.

It runs compiled or raises, since uncompiled it forms all pairs. Numbers per key, scales, rows and
tables are captured in float32. No captured tensor may need a gradient: torch sums such gradients by
atomics, which is slow and not deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...term.layout import pad_features, repeat
from ...term.links import Matern12, Matern32, Matern52, Power, Rational
from ...term.mix import Smoothed
from ...term.term import Term
from .. import Task, one_kind, spreads_nan
from . import compiled
from .lower import MIN_WIDTH, lower

name = "flex"
dense_mask = False
kernels, keeps_nan = one_kind, spreads_nan
LINKS = (Power, Rational, Matern12, Matern32, Matern52)
MAX_WIDTH = 256
# Rows of the mask that are formed at a time to find queries that see a key that is not finite.
ROWS = 1024


def refuses(task: Task) -> str | None:
    """Why FlexAttention cannot run this term, or None."""
    return (
        _refuses_term(task)
        or _refuses_place(task)
        or _refuses_gradient(task)
        or compiled.refuses(task)
    )


def memory(task: Task) -> int:
    """Bytes beyond the inputs and the output: features, captured tensors, and the block mask."""
    width = max(MIN_WIDTH, sum(f.width for f in task.term.factors))
    tokens = task.num_queries + task.num_keys
    bias = task.term.relative
    each = 1 if bias is None or not bias.per_query else task.num_queries
    captured = 3 * tokens + (0 if bias is None else each * (2 * bias.clip + 1))
    blocks = math.ceil(task.num_queries / 128) * math.ceil(task.num_keys / 128)
    features = tokens * width * task.v.dtype.itemsize
    return task.batch * task.heads * (features + 4 * captured) + 16 * blocks * task.batch


def run(tasks: Sequence[Task]) -> list[Smoothed]:
    return [_run(task) for task in tasks]


def _run(task: Task) -> Smoothed:
    lowered = lower(task)
    heads = lowered.k.shape[1]
    v = task.v
    if heads != v.shape[1] or (task.heads // heads).bit_count() != 1:
        heads = task.heads
    k, v = (repeat(x, task.batch, heads) for x in (lowered.k, v))
    q = repeat(lowered.q, task.batch, task.heads)
    one = compiled.compiled_for(task)
    try:
        out, lse = one(
            *(pad_features(x, MIN_WIDTH) for x in (q, k, v)),
            lowered,
            compiled.mask_of(task),
            compiled.asking_for_mass() if task.log_mass else {},
            # No setting of torch turns float32 into TF32 here.
            {"FLOAT32_PRECISION": "'ieee'"} if task.device.type == "cuda" else None,
        )
    except compiled.limit() as error:
        one.full = True
        raise RuntimeError(
            f"backend 'flex' was compiled {compiled.VARIANTS} times for this kernel and filter, "
            "and this shape needs another time; name another backend, or call "
            "torch.compiler.reset()"
        ) from error
    except compiled.failed() as error:
        raise RuntimeError(
            "torch could not compile FlexAttention for this kernel, filter and shape; name another "
            f"backend than 'flex'. It said: {compiled.summary(error)}"
        ) from error
    one.shapes.add(compiled.shape_of(task))
    out = out[..., : task.v.shape[-1]]
    if lse is not None:
        for f in task.term.factors:
            lse = lse if f.row is None or f.link is not None else lse + f.row
    spoiled = _spoiled(task)
    if spoiled is not None:
        out = out.masked_fill(spoiled[..., None], math.nan)
        lse = None if lse is None else lse.masked_fill(spoiled, math.nan)
    return Smoothed(out, lse)


def _refuses_term(task: Task) -> str | None:
    term = task.term
    linked = [f for f in term.factors if f.link is not None]
    plain = [f for f in term.factors if f.link is None]
    if term.signed:
        return "its weights may be negative"
    unknown = [link for link in term.links if type(link) not in LINKS]
    if unknown:
        return f"it does not support the link {unknown[0].formula}"
    if len(linked) > 1 or (linked and any(f.width for f in plain)):
        return "it computes one dot product, and the term needs two"
    if sum(f.keyed and f.per_query for f in plain) > (0 if linked else 1):
        return "a bandwidth of each query cannot join other factors"
    width = sum(f.width for f in linked or plain)
    if max(width, task.v.shape[-1]) > MAX_WIDTH:
        widest = max(width, task.v.shape[-1])
        return f"a part has {widest} features, more than {MAX_WIDTH}"
    return None


def _refuses_place(task: Task) -> str | None:
    device = task.device.type
    if (why := compiled.unavailable(device)) is not None:
        return why
    if torch.compiler.is_compiling():
        return "inside torch.compile it cannot control the limit on recompilations"
    if task.v.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"it computes in float32, got {task.v.dtype}"
    if 0 in (task.batch, task.num_queries, task.num_keys):
        return "the batch or the sequence is empty"
    if task.dropout_p:
        return "it has no dropout"
    if task.log_mass and device == "cpu":
        return "it returns no log_mass on cpu"
    return None


def _refuses_gradient(task: Task) -> str | None:
    if _learns_captured(task.term):
        return (
            "torch sums the gradient of a number per key, per query or per distance by atomics, "
            "too slowly to use"
        )
    if not task.learns:
        return None
    if task.device.type == "cpu":
        return "torch has no backward for it on cpu"
    if any(isinstance(link, Power) for link in task.term.links):
        return "the gradient of log |s| is not finite where s = 0"
    if torch.are_deterministic_algorithms_enabled():
        return "torch does not promise the same bits for its backward"
    return None


def _learns_captured(term: Term) -> bool:
    """Whether a number that a score reads beside the dot product needs a gradient."""
    if term.relative is not None and term.relative.learned:
        return True
    linked = [f.learned for f in term.factors if f.link is not None]
    keyed = [f.learned for f in term.factors if f.link is None and f.keyed]
    return any(x.scale or x.row or x.col for x in linked) or any(x.scale or x.col for x in keyed)


def _spoiled(task: Task) -> Tensor | None:
    """The queries that are not finite or see a key that is not, [B, H, Q]."""
    bad_queries, bad_keys = task.bad_queries, task.bad_keys
    if bad_queries is None or bad_keys is None:
        return None
    # Reading one flag is cheaper than a second pass over all pairs.
    if not bool(bad_queries.any() | bad_keys.any()):
        return None
    start = task.num_keys - task.num_queries
    hits = []
    for places in torch.arange(start, task.num_keys, device=task.device).split(ROWS):
        seen = task.filter.mask_of_rows(places, task.num_keys, start).expand(task.batch, -1, -1, -1)
        hits.append((seen.float() @ bad_keys.float()[..., None])[..., 0] > 0)
    return bad_queries | torch.cat(hits, -1)
