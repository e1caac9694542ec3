"""Kernels that were put into a model after it was built, written into its config when it is saved.

So `model.blocks[0].attention.kernel = RBF(3.0)` survives `save_pretrained` and `from_pretrained`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from .. import parse
from ..kernels import Kernel
from ..nn import KernelAttention
from ..systems import Attention
from .parts import Parts


def remember(layer: Attention, parts: Parts) -> None:
    """Note which kernel a layer was built with."""
    if isinstance(layer, KernelAttention):
        # In a tuple, so that nn.Module does not register the kernel a second time.
        layer.__dict__["built_with"] = parts, layer.kernel, _text(layer.kernel)


def record(model: Any, layers: Mapping[str, Sequence[Attention]]) -> None:
    """Write the kernels that were replaced into the model's config, by its fields.

    ValueError if a kernel has no text form.
    """
    for field, each in layers.items():
        found = [_entry(layer) for layer in each]
        if all(trust is None for _, trust in found):
            continue
        texts = [text for text, _ in found]
        value: Any = texts[0] if len(set(texts)) == 1 else texts
        if field != "kernel":
            value = {**getattr(model.config, field), "kernel": value}
        # A copy, since models may share a config.
        model.config = copy.deepcopy(model.config)
        setattr(model.config, field, value)
        model.config.add_trust(*(name for _, trust in found for name in trust or ()))


def _entry(layer: Attention) -> tuple[str | None, tuple[str, ...] | None]:
    """The kernel of a layer as the config has it; and if it was replaced, what its text needs."""
    built = layer.__dict__.get("built_with")
    if not isinstance(layer, KernelAttention) or built is None:
        return None, None
    parts, kernel, text = built
    if layer.kernel is kernel and _text(kernel) == text:
        return parts.kernel, None
    if parts.position is None and layer.kernel.query_parts - {"content"}:
        raise ValueError(
            f"the kernel {layer.kernel} of a layer reads positions, and cannot be saved without "
            "them: give the model's config a position, and build the model with this kernel"
        )
    return parse.write(layer.kernel)


def _text(kernel: Kernel) -> str | None:
    try:
        return parse.write(kernel)[0]
    except ValueError:
        return None
