"""What happens to the parameters of Mercer when a whole model is moved or cast."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def kept(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A change of all tensors of a model, such as `.to` or `.bfloat16()`, that loses no numbers.

    Bandwidths and token kernels stay in float32. `to_empty` fills a model with whatever the memory
    holds before it is loaded; a checkpoint that came without Mercer has nothing to load here.
    """
    empties = getattr(fn, "__qualname__", "").startswith("Module.to_empty")

    def apply(x: Tensor) -> Tensor:
        new = fn(x)
        if x.is_meta or not x.is_floating_point():
            return new
        if new.is_meta:
            return x
        narrow = new.dtype.itemsize < x.dtype.itemsize
        return x.to(new.device) if empties or narrow else new

    return apply
