"""Token kernels around flash attention: which calls it takes, and how they become tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...filters import Causal, Full
from ...term.factors import Factor
from ...term.layout import pad_features, repeat
from ...term.mix import Smoothed
from .. import Task
from ..runtime.device import INSTALLED, INTERPRETED
from ..triton.layout import by_tokens
from .flash import choice, is_on
from .function import Fused
from .lookup import gather as gather
from .operators import smooth_taps
from .plain import Call
from .taps import Convolution, num_cut

name = "tokenwise"

# Features and values at most, and rows of a grid.
MAX_WIDTH, MAX_ROWS = 256, 65535


def refuses(task: Task, keys: Tensor) -> str | None:
    """Why this backend cannot run the call, or None."""
    term = task.term
    factor = term.factors[0] if len(term.factors) == 1 and not term.biases else None
    if type(factor) is not Factor or factor.k is not keys or factor.link is not None:
        return "the kernel is not Exponential() alone"
    if factor.row is not None or factor.col is not None or not isinstance(factor.scale, float):
        return "the kernel is not Exponential() alone"
    if factor.scale <= 0:
        return "the scale is not positive"
    if task.dropout_p:
        return "weights are dropped"
    if task.log_mass:
        return "it does not return log_mass"
    if not isinstance(task.filter.simplify(task.num_queries, task.num_keys), Causal | Full):
        return f"{task.filter} is neither causal nor full"
    return _refuses(task, factor.q)


def _refuses(task: Task, q: Tensor) -> str | None:
    """The same by shapes, dtypes and the device."""
    device = task.device.type
    if device not in ("cpu", "cuda"):
        return f"it runs on CPU and CUDA, not on {device}"
    if 0 in (task.batch, task.heads, task.num_queries, task.num_keys, q.shape[3], task.v.shape[3]):
        return "the batch or the sequence is empty"
    if task.num_queries != task.num_keys:
        return "it needs as many queries as keys"
    if device == "cpu" and not INTERPRETED:
        return None
    if not INSTALLED:
        return "Triton is not installed"
    halves = (torch.bfloat16, torch.float16)
    if q.dtype not in ((torch.float32,) if INTERPRETED else halves):
        return f"flash attention takes half precision, got {q.dtype}"
    if max(q.shape[3], task.v.shape[3]) > MAX_WIDTH or task.batch * task.heads > MAX_ROWS:
        return "there are too many features or heads"
    if torch.compiler.is_compiling() and not is_on(task.device):
        return "flash attention is switched off, or this GPU has none"
    return None


def keeps_nan(task: Task) -> bool:
    return task.device.type != "cpu"


def run(task: Task, convolution: Convolution) -> Smoothed | None:
    """None if torch has no flash attention for these tensors."""
    (factor,) = task.term.factors
    assert isinstance(factor.scale, float)
    batch, heads, causal = task.batch, task.heads, task.filter.causal
    boundary, normalize = convolution.boundary, convolution.normalize
    cut = num_cut(boundary, causal, convolution.size)
    call = Call(boundary, causal, cut, normalize, factor.scale)
    taps = tuple(None if x is None else _taps(x, batch, heads) for x in convolution[:2])
    q, k, v = (repeat(x, batch, heads) for x in (factor.q, factor.k, task.v))
    wide = v.shape[-1]
    width = max(q.shape[-1], wide)
    # cuDNN and flash attention take multiples of 8.
    width += -width % 8 if v.is_cuda else 0
    q, k, v = (pad_features(x, width) for x in (q, k, v))
    if torch.compiler.is_compiling():
        tokens = (q.is_cuda or INTERPRETED) and by_tokens(q)
        out = smooth_taps(q, k, v, *taps, *call, tokens)[0]
    elif (chosen := choice(q, k, v, call)) is not None:
        out = Fused.apply(q, k, v, *taps, call, chosen)
    else:
        return None
    out = out if width == wide else out[..., :wide]
    if task.bad_queries is not None and task.bad_keys is not None:
        # A key reads itself, so a query sees all that is before it.
        seen = task.bad_keys.cumsum(-1) > 0 if causal else task.bad_keys.any(-1, True)
        out = out.masked_fill((task.bad_queries | seen)[..., None], math.nan)
    return Smoothed(out, None)


def _taps(taps: Tensor, batch: int, heads: int) -> Tensor:
    """Taps of all sequences, shared by all heads or of each query head, [B, K, H or 1, S]."""
    if taps.shape[2] != 1 and taps.shape[2] != heads:
        taps = taps.repeat_interleave(heads // taps.shape[2], 2)
    return taps if taps.shape[0] == batch else taps.expand(batch, -1, -1, -1)
