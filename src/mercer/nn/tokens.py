"""Token-Wise Kernels (TWiKers): every token has a small convolution kernel on keys or values."""

from __future__ import annotations

import math
import os
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from ..dispatch.tokens import gather
from ..tokenwise.taps import Boundary, check_boundary, check_size, check_temperature

Target = Literal["k", "v", "kv"]

# Adam adds 1e-8 to the size of a gradient. The loss changes by 1e-2 or so with a kernel, so that a
# kernel that changes by less than 1e-6 with its logits has gradients that Adam takes for zero.
LEAST_SLOPE = 1e-6
# of a published table: more than 100 layers of 100 heads with kernels of size 3
MOST_COLUMNS = 1 << 16


class Taps(NamedTuple):
    """What `vicinity` takes, each [B, T, H or 1, S]."""

    keys: Tensor | None
    values: Tensor | None


class TokenKernels(nn.Module):
    """a_token[d], d from -p to p: softmax(weight / temperature), or the weight itself.

    At the start all kernels are a central Dirac: exactly without a softmax, nearly with one.

    Args:
        vocab_size, size: how many tokens, and how many taps each; odd.
        on: "k" for keys, "v" for values, "kv" for both.
        heads: a kernel for each head. By default all heads share one.
        layers: separate kernels for each of this many first layers, or for each layer of a list
            such as [0, 5], and none for other layers. By default all layers share one set.
        temperature: of the softmax; None: free taps, which start exactly at plain attention and
            learn. They are the choice for a model that is already trained.
        boundary: which taps act near the query, as in `vicinity`.
        start: the logit of the central tap at the start, in temperatures. 10 is the published one,
            which leaves 4.5e-5 on each neighbour. From about 15 on kernels cannot learn, and a
            warning says so.
    """

    def __init__(
        self,
        vocab_size: int,
        size: int = 3,
        *,
        on: Target = "v",
        heads: int | None = None,
        layers: int | Sequence[int] | None = None,
        temperature: float | None = 0.4,
        boundary: Boundary = "shrink",
        start: float = 10.0,
    ) -> None:
        super().__init__()
        check_size(size)
        check_boundary(boundary)
        check_temperature("temperature", temperature)
        if on not in ("k", "v", "kv"):
            raise ValueError(f"on must be 'k', 'v' or 'kv', got {on!r}")
        layers = layers if layers is None or isinstance(layers, int) else _listed(layers)
        each = len(layers) if isinstance(layers, tuple) else layers
        for name, count in (("vocab_size", vocab_size), ("heads", heads), ("layers", each)):
            if count is not None and (not isinstance(count, int) or count < 1):
                raise ValueError(f"{name} must be at least 1, got {count}")
        if not math.isfinite(start):
            raise ValueError(f"start must be a finite number, got {start}")
        self.vocab_size, self.size, self.on = vocab_size, size, on
        self.heads, self.layers = heads, layers
        self.temperature, self.boundary, self.start = temperature, boundary, start
        self.weight = nn.Parameter(torch.empty(vocab_size, each or 1, len(on), heads or 1, size))
        if abs(slope := self.start_slope()) < LEAST_SLOPE and size > 1:
            # Python shows one warning of a text and a place once.
            warnings.warn(
                f"start={start:g} leaves token kernels that cannot learn: a central tap changes by "
                f"{slope:.1e} with its logit, and below {LEAST_SLOPE:g} gradients vanish in Adam. "
                "temperature=None (free taps) starts exactly at plain attention, and learns; the "
                "published start is 10",
                stacklevel=1,
            )
        self._checked: tuple[weakref.ref[Tensor], tuple[object, ...]] | None = None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The central Dirac for all tokens."""
        self.weight.zero_()
        centre = 1.0 if self.temperature is None else self.start * self.temperature
        self.weight[..., self.size // 2] = centre

    def start_slope(self) -> float:
        """The derivative of a central tap by its logit at the start, a (1 - a) / T; 1 if free."""
        if self.temperature is None:
            return 1.0
        # a = 1 / (1 + x) and 1 - a = x / (1 + x), without the rounding of 1 - a
        log_x = math.log(max(self.size - 1, 1e-300)) - self.start
        x = math.exp(-abs(log_x))
        return x / (1 + x) ** 2 / self.temperature

    def acts_on(self, layer: int) -> bool:
        """Whether this layer has token kernels."""
        if isinstance(self.layers, tuple):
            return layer in self.layers
        return self.layers is None or layer < self.layers

    def forward(self, token_ids: Tensor, layer: int = 0) -> Taps:
        """The taps of these tokens, before the softmax."""
        self.check(token_ids)
        return self.taps(token_ids, layer)

    def taps(self, token_ids: Tensor, layer: int = 0) -> Taps:
        """The same without checking the ids."""
        if not self.acts_on(layer):
            return Taps(None, None)
        # The gradient of a view needs no copy.
        one = self.weight.shape[1] == 1
        column = self.layers.index(layer) if isinstance(self.layers, tuple) else layer
        table = self.weight.squeeze(1) if one else self.weight[:, column]  # [V, targets, H or 1, S]
        taps = dict(zip(self.on, gather(table, token_ids), strict=True))
        return Taps(taps.get("k"), taps.get("v"))

    def check(self, token_ids: Tensor) -> None:
        """Raise ValueError for ids without a kernel."""
        if not isinstance(token_ids, Tensor) or token_ids.dim() != 2:
            came = list(token_ids.shape) if isinstance(token_ids, Tensor) else type(token_ids)
            raise ValueError(f"token_ids must be [B, T], got {came}")
        if token_ids.is_floating_point() or token_ids.dtype == torch.bool:
            raise ValueError(f"token_ids must be whole numbers, got {token_ids.dtype}")
        if torch.compiler.is_compiling() or token_ids.device.type == "meta":
            return
        # Reading the ids would synchronise with the GPU, which graph capture forbids.
        if token_ids.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        # All layers get the same ids, perhaps as new views of one tensor: check them once.
        base = token_ids if token_ids._base is None else token_ids._base
        version = 0 if base.is_inference() else base._version
        seen = (version, token_ids.storage_offset(), token_ids.shape, token_ids.stride())
        known = self._checked
        if known is not None and known[0]() is base and known[1] == seen:
            return
        outside = token_ids[(token_ids < 0) | (token_ids >= self.vocab_size)]
        if outside.numel():
            raise ValueError(
                f"token id {int(outside[0])} is outside the vocabulary of {self.vocab_size}"
            )
        # Inference tensors have no version counter, so a change would go unnoticed.
        self._checked = None if base.is_inference() else (weakref.ref(base), seen)

    def kernels(self) -> Tensor:
        """The kernels themselves, [vocab, layers, targets, heads, size]."""
        if self.temperature is None:
            return self.weight
        return (self.weight / self.temperature).softmax(-1)

    @torch.no_grad()
    def deviation(self) -> Tensor:
        """|kernel - Dirac| of each token, [vocab]; the mean where a token has several kernels."""
        return self.deviations().flatten(1).mean(-1)

    @torch.no_grad()
    def deviations(self) -> Tensor:
        """|kernel - Dirac| of each kernel, [vocab, layers, targets, heads]."""
        kernels = self.kernels().double()
        dirac = torch.zeros_like(kernels[0, 0, 0, 0])
        dirac[self.size // 2] = 1.0
        return torch.linalg.vector_norm(kernels - dirac, dim=-1)

    @classmethod
    def like(cls, model: nn.Module, size: int = 3, **options: Any) -> Self:
        """Token kernels for the vocabulary of a model of transformers, with free taps.

        Free taps (`temperature=None`) start exactly at plain attention, so the model stays what it
        is until they are trained. `options` are the arguments of the class.
        """
        find = getattr(model, "get_input_embeddings", None)
        embedding = find() if find is not None else None
        if not isinstance(embedding, nn.Embedding):
            raise ValueError(
                f"{type(model).__name__} has no embedding of tokens, so there is no vocabulary for "
                "token kernels"
            )
        return cls(embedding.num_embeddings, size, **{"temperature": None, **options})

    @classmethod
    def load_published(
        cls,
        path: str | os.PathLike[str],
        *,
        on: Target = "v",
        layers: int | None = None,
        heads: int | None = None,
        temperature: float | None = 0.4,
        boundary: Boundary = "shrink",
    ) -> TokenKernels:
        """The authors' weights: a tensor [vocab, layers * 2 * heads * size], keys before values.

        Args:
            path: a file that torch can read with `weights_only`.
            on, temperature, boundary: as above; they are not in the file.
            layers: how many layers have kernels of their own. The published tables have one, for
                the first layer: `layers=1` acts there alone, and None shares it by all layers.
            heads: how many heads have kernels of their own. Where `layers` and `heads` are not
                given, a table that can be read in several ways is an error.
        """
        table, (found, each, size) = _read_published(path, layers, heads)
        kernels = cls(
            table.shape[0],
            size,
            on=on,
            heads=None if each == 1 else each,
            layers=layers if found == 1 else found,
            temperature=temperature,
            boundary=boundary,
        )
        both = table.float().view(-1, found, 2, each, size)
        with torch.no_grad():
            kernels.weight.copy_(both[:, :, ["kv".index(target) for target in on]])
        return kernels

    def describe(self, cut: int, fused: bool) -> str:
        """How a layer uses them, where a query sees the taps of its `cut` nearest keys cut."""
        what = {"k": "keys", "v": "values", "kv": "keys and values"}[self.on]
        near = "no key" if not cut else "the nearest key" if cut == 1 else f"the {cut} nearest keys"
        said = f"{what} by {self.size} taps a token; a query sees {near} cut"
        said = f"{said} ({self.boundary}), beside the call below" if cut else said
        return f"{said}; all of it is one function around flash attention" if fused else said

    def extra_repr(self) -> str:
        return (
            f"{self.vocab_size}, {self.size}, on={self.on!r}, heads={self.heads}, "
            f"layers={self.layers}, temperature={self.temperature}, boundary={self.boundary!r}"
        )

    def __getstate__(self) -> dict[str, object]:
        # A weak reference cannot be copied or saved.
        return self.__dict__ | {"_checked": None}


def _listed(layers: Sequence[int]) -> tuple[int, ...]:
    """The numbers of layers, checked."""
    listed = tuple(layers) if isinstance(layers, list | tuple) else ()
    whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in listed)
    if not listed or not whole or len(set(listed)) < len(listed):
        raise ValueError(
            f"layers must be how many first layers, or a list of different layers such as [0, 5], "
            f"got {layers!r}"
        )
    return listed


def _readings(taps: int, layers: int | None, heads: int | None) -> list[tuple[int, int, int]]:
    """All (layers, heads, size) with this product and an odd size of 3 or more."""
    return [
        (layer, head, size)
        for size in range(3, taps + 1, 2)
        if taps % size == 0
        for layer in range(1, taps // size + 1)
        if taps // size % layer == 0 and layers in (None, layer)
        for head in [taps // size // layer]
        if heads in (None, head)
    ]


def _read_published(
    path: str | os.PathLike[str], layers: int | None, heads: int | None
) -> tuple[Tensor, tuple[int, int, int]]:
    """The table of a file and its layers, heads and size, or ValueError with the file's name."""
    for name, count in (("layers", layers), ("heads", heads)):
        if count is not None and (not isinstance(count, int) or count < 1):
            raise ValueError(f"{name} must be at least 1, got {count}")
    shape = f"{layers or 'layers'} * 2 * {heads or 'heads'} * size"
    wanted = f"published weights are one tensor [vocab, {shape}] with an odd size"
    try:
        # weights_only: no code in the file is run.
        table = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception:
        # A damaged file raises whatever its bytes lead to, with advice that does not fit here.
        raise ValueError(
            f"{wanted}, but {path} cannot be read with weights_only: it is damaged, or holds "
            "something else"
        ) from None
    if not isinstance(table, Tensor):
        raise ValueError(f"{wanted}, but {path} holds {type(table).__name__}")
    rows, columns = table.shape if table.dim() == 2 else (0, 0)
    # A table is [vocab, taps], and a wide one is none of token kernels.
    fits = 0 < columns <= MOST_COLUMNS and columns % 2 == 0
    readings = _readings(columns // 2, layers, heads) if fits and rows else []
    if not readings:
        raise ValueError(f"{wanted}, but {path} holds {list(table.shape)}")
    if len(readings) > 1:
        ways = [f"layers={a}, heads={b} of size {c}" for a, b, c in readings[:4]]
        more = f" or {len(readings) - 4} more ways" if len(readings) > 4 else ""
        raise ValueError(
            f"{path} holds {list(table.shape)}, which may be {'; '.join(ways)}{more}: give layers "
            "and heads"
        )
    plain = table.layout == torch.strided and table.is_cpu and not table.is_quantized
    # A tensor can claim more numbers than the file has.
    whole = plain and table.untyped_storage().nbytes() >= table.numel() * table.element_size()
    if not whole or table.is_complex() or not bool(table.float().isfinite().all()):
        raise ValueError(f"{wanted}, but {path} holds no dense table of real, finite numbers")
    return table, readings[0]
