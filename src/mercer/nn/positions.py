"""How positions enter attention: added to the features, looked up, multiplied in, or rotated.

A position is a template without sizes; an attention module copies it and calls `setup`, so that
one can be given to many layers. It acts in up to four ways: on what the projections read (`add`),
on the features of queries and keys (`query_parts`, `key_parts`), as a factor of the kernel
(`kernel`), and as the embedding t of the value function (f + t) W_v (`embed`).

Places (integer positions) are [T], the same for all sequences, or [B, T].
"""

from __future__ import annotations

import copy
from typing import Literal

import torch
from torch import Tensor, nn

from ..kernels import ALiBi as ALiBiKernel
from ..kernels import Exponential, Kernel, Lookup
from ..kernels import RelativeSinusoid as RelativeSinusoidKernel
from ..term.sinusoids import waves
from .embeddings import Learned, Sinusoid, check_base, check_whole, embedder, in_heads


class Position(nn.Module):
    """How positions enter. This base class changes nothing and has a sinusoid as embedding."""

    symmetric = True

    def __init__(self) -> None:
        super().__init__()
        self.embedding: Sinusoid | Learned = Sinusoid()
        self.kernel: Kernel | None = None

    def setup(self, d_model: int, num_heads: int, head_dim: int) -> None:
        """Create the parameters, whose shapes depend on these sizes."""
        self.embedding.setup(d_model)

    def embed(self, places: Tensor) -> Tensor:
        """t, [T or B, T, d_model]."""
        return self.embedding(places)

    @property
    def adds(self) -> bool:
        """Whether t is added to what the projections of queries and keys read."""
        return False

    def add(self, x: Tensor, places: Tensor) -> Tensor:
        """What the projections of queries and keys read."""
        return x + self.embed(places).to(x.dtype) if self.adds else x

    def query_parts(self, q: Tensor, places: Tensor) -> dict[str, Tensor]:
        return {"content": q}

    def key_parts(self, k: Tensor, places: Tensor) -> dict[str, Tensor]:
        return {"content": k}


class NoPosition(Position):
    """No position: order enters only through the filter."""

    def setup(self, d_model: int, num_heads: int, head_dim: int) -> None:
        pass

    def embed(self, places: Tensor) -> Tensor:
        raise ValueError("NoPosition has no embedding: use value='content'")


class DirectSum(Position):
    """k(f_q + t_q, f_k + t_k) (Eq. 4)."""

    def __init__(self, embedding: Sinusoid | Learned | None = None) -> None:
        super().__init__()
        self.embedding = embedder(embedding)

    @property
    def adds(self) -> bool:
        return True


class LookupTable(Position):
    """L(i - j, f_q) k(f_q, f_k), with L = exp(<f_q W_q, a_{i-j}> / sqrt(D)) (Eq. 6).

    causal: for layers that see no later key: the table has the distances from 0 on alone.
    """

    symmetric = False

    def __init__(
        self, max_distance: int = 16, *, per_head: bool = False, causal: bool = False
    ) -> None:
        super().__init__()
        check_whole(max_distance=max_distance)
        if max_distance < 0:
            raise ValueError(f"max_distance must be at least 0, got {max_distance}")
        self.max_distance = max_distance
        self.per_head, self.causal = per_head, causal

    def setup(self, d_model: int, num_heads: int, head_dim: int) -> None:
        super().setup(d_model, num_heads, head_dim)
        rows = (1 if self.causal else 2) * self.max_distance + 1
        shape = (num_heads, rows, head_dim) if self.per_head else (rows, head_dim)
        table = nn.Parameter(torch.randn(shape) * head_dim**-0.5)
        self.kernel = Lookup(table, causal=self.causal)


class RelativeBiases(nn.Module):
    """Transformer-XL's two vectors u and v of every head, for layers that share them."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.content_bias = nn.Parameter(torch.zeros(num_heads, 1, head_dim))
        self.position_bias = nn.Parameter(torch.zeros(num_heads, 1, head_dim))


class RelativeSinusoid(Position):
    """k(f_q, f_k) times a kernel of sinusoids of i - j with coefficients f_q W_q W_R (Eq. 5).

    biases: Transformer-XL's two learned vectors, one added to the query of each factor.
    width: the number of sinusoids, "head" for D or "model" for d_model (as in Transformer-XL).
    max_distance: farther keys have this distance (Transformer-XL's clamp length).
    """

    symmetric = False
    # Where the biases are those of another module, which layers share.
    shared: RelativeBiases | None = None

    def __init__(
        self,
        *,
        biases: bool = True,
        width: Literal["head", "model"] = "model",
        base: float = 10000.0,
        max_distance: int | None = None,
    ) -> None:
        super().__init__()
        if width not in ("head", "model"):
            raise ValueError(f"width must be 'head' or 'model', got {width!r}")
        self.biases = biases
        self.width = width
        # Without its weight, which needs the sizes of a layer.
        self.kernel = RelativeSinusoidKernel(base=base, max_distance=max_distance)

    def setup(self, d_model: int, num_heads: int, head_dim: int) -> None:
        super().setup(d_model, num_heads, head_dim)
        width = head_dim if self.width == "head" else d_model
        if width % 2:
            raise ValueError(f"RelativeSinusoid needs an even width, but {self.width} is {width}")
        weight = nn.Parameter(torch.randn(num_heads, head_dim, width) * d_model**-0.5)
        assert isinstance(self.kernel, RelativeSinusoidKernel)
        self.kernel = RelativeSinusoidKernel(
            base=self.kernel.base, weight=weight, max_distance=self.kernel.max_distance
        )
        if self.biases:
            self.content_bias = nn.Parameter(torch.zeros(num_heads, 1, head_dim))
            self.position_bias = nn.Parameter(torch.zeros(num_heads, 1, head_dim))

    def share(self, biases: RelativeBiases) -> None:
        """Take the biases of this module in place of its own; they are not registered here."""
        del self.content_bias, self.position_bias
        object.__setattr__(self, "shared", biases)

    def query_parts(self, q: Tensor, places: Tensor) -> dict[str, Tensor]:
        content, asking = q, q
        if self.biases:
            held = self if self.shared is None else self.shared
            content, asking = q + held.content_bias, q + held.position_bias
        return {"content": content, "relative": asking * q.shape[-1] ** -0.5}

    @property
    def weight(self) -> Tensor:
        """W_R, [H, D, width]."""
        kernel = self.kernel
        assert isinstance(kernel, RelativeSinusoidKernel)
        assert kernel.weight is not None
        return kernel.weight

    @property
    def base(self) -> float:
        """That of the frequencies, which the kernel holds."""
        assert isinstance(self.kernel, RelativeSinusoidKernel)
        return self.kernel.base

    @base.setter
    def base(self, base: float) -> None:
        check_base(base)
        self.kernel.base = base  # type: ignore[union-attr]


class ProductKernel(Position):
    """k_F(f_q W_F, f_k W_F) k_T(t_q W_T, t_k W_T) (Eq. 9); not symmetric: two matrices W_T."""

    def __init__(
        self,
        embedding: Sinusoid | Learned | None = None,
        *,
        kernel: Kernel | None = None,
        symmetric: bool = True,
    ) -> None:
        super().__init__()
        self.embedding = embedder(embedding)
        kernel = Exponential(on="position") if kernel is None else kernel
        if not isinstance(kernel, Kernel):
            raise ValueError(f"kernel must be a Kernel, got {type(kernel).__name__}")
        self.kernel = kernel
        self.symmetric = symmetric
        if not isinstance(self.kernel, Kernel):
            raise ValueError(f"kernel must be a Kernel, got {self.kernel!r}")
        if self.kernel.query_parts != {"position"}:
            raise ValueError(
                f"kernel must be on part 'position', but reads {sorted(self.kernel.query_parts)}"
            )

    def setup(self, d_model: int, num_heads: int, head_dim: int) -> None:
        super().setup(d_model, num_heads, head_dim)
        self.num_heads = num_heads
        self.query = nn.Linear(d_model, num_heads * head_dim, bias=False)
        self.key: nn.Linear | None = None
        if not self.symmetric:
            self.key = nn.Linear(d_model, num_heads * head_dim, bias=False)

    def query_parts(self, q: Tensor, places: Tensor) -> dict[str, Tensor]:
        return {"content": q, "position": self._heads(self.query, places, q.dtype)}

    def key_parts(self, k: Tensor, places: Tensor) -> dict[str, Tensor]:
        return {"content": k, "position": self._heads(self.key or self.query, places, k.dtype)}

    def _heads(self, projection: nn.Linear, places: Tensor, dtype: torch.dtype) -> Tensor:
        return in_heads(self.embed(places), projection, self.num_heads, dtype)


class Rotary(Position):
    """Pairs of features turned by angles i w_p, so that <q, k> depends on i - j."""

    def __init__(self, base: float = 10000.0) -> None:
        super().__init__()
        check_base(base)
        self.base = base

    def setup(self, d_model: int, num_heads: int, head_dim: int) -> None:
        super().setup(d_model, num_heads, head_dim)
        if head_dim % 2:
            raise ValueError(f"Rotary needs an even head dimension, got {head_dim}")

    def query_parts(self, q: Tensor, places: Tensor) -> dict[str, Tensor]:
        return {"content": self.turn(q, places)}

    def key_parts(self, k: Tensor, places: Tensor) -> dict[str, Tensor]:
        return {"content": self.turn(k, places)}

    def turn(self, x: Tensor, places: Tensor) -> Tensor:
        places = places[:, None] if places.dim() == 2 else places
        sin, cos = waves(places, x.shape[-1], self.base, x.dtype)  # [T or B, 1, T, D / 2]
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class ALiBi(Position):
    """exp(-m_h |i - j|), with the slopes of the paper."""

    def __init__(self, *, trainable: bool = False) -> None:
        super().__init__()
        self.trainable = trainable

    def setup(self, d_model: int, num_heads: int, head_dim: int) -> None:
        super().setup(d_model, num_heads, head_dim)
        slopes = ALiBiKernel.standard(num_heads)
        self.kernel = ALiBiKernel(nn.Parameter(slopes) if self.trainable else slopes)


POSITIONS: dict[str, type[Position]] = {
    "none": NoPosition,
    "direct-sum": DirectSum,
    "lookup": LookupTable,
    "relative-sinusoid": RelativeSinusoid,
    "product": ProductKernel,
    "rotary": Rotary,
    "alibi": ALiBi,
}


def place(position: Position | str | None, d_model: int, num_heads: int, head_dim: int) -> Position:
    """A copy of the position for one attention module."""
    if position is None:
        position = NoPosition()
    elif isinstance(position, str):
        if position not in POSITIONS:
            raise ValueError(
                f"position must be one of {', '.join(POSITIONS)}, or a Position such as "
                f"Grid2D(14, 14), got {position!r}"
            )
        position = POSITIONS[position]()
    elif not isinstance(position, Position):
        raise ValueError(f"position must be a Position, got {type(position).__name__}")
    position = copy.deepcopy(position)
    position.setup(d_model, num_heads, head_dim)
    # Embed one place now, so that sizes that do not fit raise here.
    first = torch.zeros(1, dtype=torch.long)
    position.add(torch.zeros(1, 1, d_model), first)
    position.query_parts(torch.zeros(1, num_heads, 1, head_dim), first)
    return position
