"""The module that owns the kernel of an attention layer, as its submodule `mercer`.

Its `forward` computes the attention. So whatever walks over modules, parameters and calls finds it:
state dicts, optimizers, hooks, and PEFT's `modules_to_save`, which wraps a module and calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from ...filters import Documents, Mask
from ...filters.base import can_read
from ...inspect.calls import Hosted
from ...kernels import Bridge, Exponential, Kernel
from ...nn.weights import Call
from ...smoother import smooth
from ...term.features import Features
from ...tokenwise.vicinity import vicinity
from ..moving import kept
from .masks import Seen
from .tokens import Tokens
from .weights import weights_of

# The buffer by which transformers' report of a plain loading tells what to do.
MARK = "load_with_mercer_integrations_hf"


class Owner:
    """A module, but no submodule of its holder; a copy of the holder alone has the same one."""

    def __init__(self, module: nn.Module | None) -> None:
        self.module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> Owner:
        return Owner(memo.get(id(self.module), self.module))


class Host(nn.Module):
    """Attention with a kernel: [B, H, Q, D], [B, H, K, D], [B, H, K, V] -> [B, H, Q, V].

    Args:
        kernel: None keeps softmax with the model's scale.
        number: the number of the layer.
        own: whether its queries and keys are of one sequence.
        of: the module with the token kernels of the model, as `mercer_tokens`, if it has some.
    """

    def __init__(
        self, kernel: Kernel | None, number: int, of: nn.Module | None = None, *, own: bool = True
    ) -> None:
        super().__init__()
        self.number, self.own = number, own
        self.of = Owner(of)
        self.set(kernel)

    def set(self, kernel: Kernel | None) -> None:
        """Replace the kernel."""
        self.chosen = kernel is not None
        self.kernel = Exponential() if kernel is None else kernel
        if self.chosen:
            self.register_buffer(MARK, torch.ones((), dtype=torch.uint8))
        elif MARK in self._buffers:
            del self._buffers[MARK]

    @property
    def tokens(self) -> Tokens | None:
        """The token kernels that act on this layer."""
        tokens: Tokens | None = getattr(self.of.module, "mercer_tokens", None)
        return tokens if tokens is not None and tokens.kernels.acts_on(self.number) else None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        seen: Seen,
        scaling: float | None = None,
        dropout_p: float = 0.0,
        token_ids: Tensor | None = None,
        weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The output, and the weights [B, H, Q, K] if they are wanted."""
        self._take(scaling)
        run = partial(self._smooth, q, k, seen=seen, token_ids=token_ids)
        return run(v, dropout_p=dropout_p), weights_of(run, k) if weights else None

    def read_call(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        seen: Seen,
        scaling: float | None = None,
        token_ids: Tensor | None = None,
        **rest: object,
    ) -> Hosted:
        """What a call of `forward` computes, as `mercer.inspect` reads it."""
        self._take(scaling)
        run = partial(self._smooth, q, k, seen=seen, token_ids=token_ids)
        call = Call(q=Features.of(q), k=Features.of(k), v=v, filter=seen.filter, smooth=run)
        return Hosted(joined_kernel=self.kernel, num_heads=q.shape[1], call=call, own=self.own)

    def _smooth(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        seen: Seen,
        token_ids: Tensor | None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        tokens = self.tokens
        if tokens is not None:
            return self._vicinity(tokens, q, k, v, seen, dropout_p, token_ids)
        return smooth(self.kernel, q, k, v, filter=seen.filter, dropout_p=dropout_p)

    def _take(self, scaling: float | None) -> None:
        """Kernels that were given no scale take the model's."""
        if scaling is None:
            return
        for kernel in self.kernel.modules():
            if isinstance(kernel, Bridge) or (
                isinstance(kernel, Exponential) and kernel.arguments == ""
            ):
                kernel.scale = scaling

    def _vicinity(
        self,
        tokens: Tokens,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seen: Seen,
        dropout_p: float,
        token_ids: Tensor | None,
    ) -> Tensor:
        if token_ids is None:
            raise ValueError(
                f"the token kernels of layer {self.number} need the ids of the tokens, but none "
                "reached the layer: call the model with input_ids"
            )
        if token_ids.shape[1] != k.shape[2]:
            raise ValueError(
                f"layer {self.number} has {k.shape[2]} keys for {token_ids.shape[1]} tokens: "
                "token kernels read neighbours, which a cache of a sliding window has dropped; "
                "generate with past_key_values=DynamicCache(), which keeps all keys"
            )
        filter = seen.filter
        if isinstance(filter, Mask) and not can_read(filter.visible):
            raise ValueError(
                "in a compiled graph token kernels cannot read the mask of this call, and do not "
                "know which tokens belong together: give the model attention_mask, [B, T], or do "
                "not compile it"
            )
        if seen.real is not None:
            # Taps on padding contribute zero.
            filter = filter & Documents(seen.real.long())
        taps, kernels = tokens(token_ids, self.number), tokens.kernels
        return vicinity(
            q, k, v, key_taps=taps.keys, value_taps=taps.values, normalize=kernels.temperature,
            boundary=kernels.boundary, kernel=self.kernel, filter=filter, dropout_p=dropout_p,
        )  # fmt: skip

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        return super()._apply(kept(fn), recurse)

    def extra_repr(self) -> str:
        return "" if self.chosen else "as it came"
