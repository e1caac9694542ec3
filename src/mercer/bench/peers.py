"""What else a user could run: torch's own attention, hand-written code, other libraries.

A peer is built for each workload: masks and compiled code are made once and are not timed.
`available` says why it cannot run on a device at all.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..filters import Causal, Full
from ..term.layout import accumulator
from .contenders import Peer
from .workload import Inputs
from .written import SCORED, Eager, EagerScored, Flex, FlexRBF, FlexScored, bandwidth


class SDPA(Peer):
    """Softmax attention by torch's operator: the yardstick."""

    kernel = "softmax"
    groups = True

    def __init__(self, key: str, title: str, backend: SDPBackend | None = None) -> None:
        self.key, self.name, self.choice = key, f"softmax, SDPA{title}", backend
        self.arguments = cache(lambda filter, *rest: filter.sdpa(*rest))

    def available(self, device: torch.device) -> str | None:
        if (device.type == "cuda") == (self.choice is not None):
            return None
        return "it is for CPU" if self.choice is None else "it needs CUDA"

    def smooth(self, given: Inputs) -> Tensor:
        q, k, v = given.plain
        arguments = self.arguments(given.filter, q.shape[2], k.shape[2], q.device)
        shared = k.shape[1] < q.shape[1]
        if self.choice is None:
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=shared, **arguments)
        with warnings.catch_warnings(record=True) as said, sdpa_kernel(self.choice):
            warnings.simplefilter("always")
            try:
                return F.scaled_dot_product_attention(q, k, v, enable_gqa=shared, **arguments)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                # Torch gives the reasons as warnings; some only introduce the next one.
                why = [str(w.message).split(" (Triggered")[0] for w in said]
                why = [text for text in why if "because:" not in text and "disabled" not in text]
                raise ValueError(why[0] if why else str(error).splitlines()[0]) from None


class XTransformers(Peer):
    """RBF by x-transformers' `l2_distance`, which lifts queries and keys in their own dtype."""

    key, name, kernel = "x-transformers", "rbf, x-transformers l2_distance", "rbf"

    def available(self, device: torch.device) -> str | None:
        return _missing("x_transformers")

    def smooth(self, given: Inputs) -> Tensor:
        attend = importlib.import_module("x_transformers.attend").Attend
        layer = attend(
            causal=_is_causal(given, "x-transformers"),
            flash=True,
            l2_distance=True,
            scale=0.5 * float(bandwidth(given).detach()[0]) ** -2,
        )
        out: Tensor = layer(*given.plain)[0]
        return out


class FlashLinear(Peer):
    """Linear attention by flash-linear-attention: not normalised, so it has its own formula."""

    key, name, kernel = "fla", "linear, flash-linear-attention", "softmax"

    def available(self, device: torch.device) -> str | None:
        return _missing("fla") or (None if device.type == "cuda" else "it needs CUDA")

    def smooth(self, given: Inputs) -> Tensor:
        if not _is_causal(given, "flash-linear-attention") or given.q.length != given.k.length:
            raise ValueError(
                "flash-linear-attention supports only causal attention over whole sequences"
            )
        run = importlib.import_module("fla.ops.linear_attn").chunk_linear_attn
        q, k, v = (x.transpose(1, 2) for x in given.plain)  # [B, T, H, D]
        out: Tensor = run(q, k, v, normalize=False)[0]
        return out.transpose(1, 2)

    def exact(self, given: Inputs) -> Tensor:
        q, k, v = given.plain
        return (q @ k.mT * q.shape[-1] ** -0.5).tril() @ v


class KeOps(Peer):
    """RBF by KeOps' symbolic matrices."""

    key, name, kernel = "keops", "rbf, KeOps", "rbf"

    def available(self, device: torch.device) -> str | None:
        return _missing("pykeops")

    def smooth(self, given: Inputs) -> Tensor:
        q, k, v = given.plain
        if accumulator(q.dtype) != q.dtype:
            raise ValueError("KeOps sums in the dtype itself, so half precision is too coarse")
        lazy = importlib.import_module("pykeops.torch").LazyTensor
        distance = (lazy(q[:, :, :, None].contiguous()) - lazy(k[:, :, None].contiguous())) ** 2
        log = distance.sum(-1) * (-0.5 * float(bandwidth(given).detach()[0]) ** -2)
        if _is_causal(given, "KeOps"):
            j = torch.arange(k.shape[2], device=q.device, dtype=q.dtype)
            i = j[-q.shape[2] :] + 0.5
            ahead = lazy(j[None, None, None, :, None]) - lazy(i[None, None, :, None, None])
            log = log - ahead.step() * 1e4
        out: Tensor = log.sumsoftmaxweight(lazy(v[:, :, None].contiguous()), dim=3)
        return out


def build(kernels: Sequence[str] = SCORED) -> list[Peer]:
    """New peers; those of torch's own operator first.

    `kernels`: those that FlexAttention and the eager form are built for, too.
    """
    return [
        SDPA("sdpa", ""),
        SDPA("sdpa-cudnn", " cuDNN", SDPBackend.CUDNN_ATTENTION),
        SDPA("sdpa-flash", " flash", SDPBackend.FLASH_ATTENTION),
        SDPA("sdpa-efficient", " efficient", SDPBackend.EFFICIENT_ATTENTION),
        Flex(),
        FlexRBF(),
        *(FlexScored(kernel) for kernel in SCORED if kernel in kernels),
        Eager("eager-cdist", "cdist", by_matmul=False),
        Eager("eager-matmul", "cdist by matmul", by_matmul=True),
        *(EagerScored(kernel) for kernel in SCORED if kernel in kernels),
        XTransformers(),
        FlashLinear(),
        KeOps(),
    ]


PEERS = tuple(dict.fromkeys(peer.key for peer in build()))


def _is_causal(given: Inputs, name: str) -> bool:
    simple = given.filter.simplify(given.q.length, given.k.length)
    if not isinstance(simple, Causal | Full):
        raise ValueError(f"{name} takes no filter other than full and causal")
    return isinstance(simple, Causal)


def _missing(module: str) -> str | None:
    return None if importlib.util.find_spec(module) else f"{module} is not installed"
