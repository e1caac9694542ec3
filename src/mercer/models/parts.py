"""The attention of a layer, from the words of a config.

Requirements: any system or any four parts; in a decoder (always causal), an encoder (sees all
unless a filter is given) or cross-attention; one TokenKernels object for a whole model;
construction on the meta device, as transformers does when it loads a model.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn
from transformers import initialization as init

from .. import own, parse, systems
from ..explain import width
from ..filters import Causal, CausalAcross, Filter, Full
from ..kernels import Kernel
from ..names import suggest
from ..nn import (
    GaussianAttention,
    Grid2D,
    KernelAttention,
    Learned,
    NoPosition,
    Position,
    ProductKernel,
    Rotary,
    TokenKernels,
)
from ..systems import Attention
from ..term.biases import QueryTable
from .filters import join
from .starts import remember_start

Role = Literal["decoder", "encoder", "cross"]
TOKEN_OPTIONS = ("size", "on", "heads", "layers", "temperature", "boundary", "start")


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The attention of one layer, as text from a config; None: as the system has it.

    Without a system, the options are those of `KernelAttention`.
    """

    system: str | None = None
    system_options: Mapping[str, Any] = field(default_factory=dict)
    kernel: str | None = None
    position: str | None = None
    value: str | None = None
    filter: str | None = None
    # The files and modules whose classes the text may name.
    trust: tuple[str, ...] = ()

    def check(self) -> Parts:
        """Return self, or raise ValueError."""
        if self.system is not None:
            systems.find(self.system)
        # On the CPU: kernels read the values of bandwidths, which the meta device does not have.
        with torch.device("cpu"):
            for name in ("kernel", "position", "filter"):
                text = getattr(self, name)
                try:
                    if text is not None:
                        getattr(parse, name)(text, self.trust)
                # An argument of another type, or a number that no float can hold.
                except (TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
                    short = text if len(text) <= 60 else f"{text[:50]}…"
                    raise ValueError(f"{name} {short} cannot be built: {error}") from None
        return self

    @property
    def tokens(self) -> dict[str, Any] | None:
        """The options of the token kernels, or None."""
        if not systems.has_token_kernels(self.system):
            return None
        return {n: x for n, x in self.system_options.items() if n in TOKEN_OPTIONS}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a layer stands: sizes and what all layers of the model share."""

    d_model: int
    num_heads: int
    role: Role
    layer: int = 0
    max_length: int = 1024
    memory: int | None = None
    window: Filter | None = None
    tokens: TokenKernels | None = None
    # For images: the grid of patches, and how many tokens stand before them.
    grid: tuple[int, int, int] | None = None
    # Whether x is normalised, as Gaussian attention expects.
    normalized: bool = True
    # Arguments of KernelAttention besides the four parts.
    shape: Mapping[str, Any] = field(default_factory=dict)
    dropout: float = 0.0
    backend: str = "auto"


def build(parts: Parts, place: Place) -> Attention:
    """The attention of one layer."""
    if torch.get_default_device().type != "meta":
        return _build(parts, place)
    # On the CPU: bandwidths and tables are read when made, which the meta device cannot do.
    tokens, rows = place.tokens, place.shape.get("value_vocab")
    small = replace(
        place,
        tokens=_like(tokens),
        shape={**place.shape, "value_vocab": rows and 1},
    )
    with torch.device("cpu"), init.no_init_weights():
        layer = _build(parts, small)
    layer = layer.to("meta")
    if rows and layer.value_embedding is not None:
        layer.value_embedding = nn.Embedding(rows, layer.value_embedding.embedding_dim)
    if isinstance(layer, KernelAttention) and layer.tokens is not None and tokens is not None:
        _lend(layer, tokens)
    return layer


def _build(parts: Parts, place: Place) -> Attention:
    options = _options(parts)
    if parts.system is not None and systems.is_gaussian(parts.system):
        layer = _gaussian(parts.system, options, place)
    else:
        layer = _kernel_attention(parts, options, place)
    layer.filter = _filter(layer.filter, parts, place)
    # This runs the kernel, so sizes that do not fit raise here.
    try:
        layer.cost = cost_of(layer)
    except Exception as error:
        if (blamed := own.blame(error, parts.trust)) is None:
            raise
        raise ValueError(
            f"the kernel {layer.joined_kernel} cannot be computed for {place.num_heads} heads of "
            f"{place.d_model // place.num_heads} features: {blamed}"
        ) from error
    remember_start(layer)
    if isinstance(layer, KernelAttention) and layer.tokens is not None:
        _lend(layer, layer.tokens)
    return layer


def _options(parts: Parts) -> dict[str, Any]:
    """The options of the system, with text read."""
    options = {n: x for n, x in parts.system_options.items() if parts.tokens is None or (
        n not in TOKEN_OPTIONS)}  # fmt: skip
    for name in ("kernel", "position", "value", "filter"):
        if getattr(parts, name) is not None:
            options[name] = getattr(parts, name)
    for name in ("kernel", "position", "filter"):
        if isinstance(options.get(name), str):
            options[name] = getattr(parse, name)(options[name], parts.trust)
    return options


def _gaussian(name: str, options: dict[str, Any], place: Place) -> Attention:
    if place.role == "cross":
        raise ValueError(f"{name} has no cross-attention: its queries are its keys")
    position = options.pop("position", None)
    if isinstance(position, Rotary):
        options["rotary"] = position
    elif position is not None and not isinstance(position, NoPosition):
        raise ValueError(f"the position of {name} must be Rotary() or NoPosition(), got {position}")
    for part in ("kernel", "value"):
        if part in options:
            raise ValueError(f"{name} has its own {part}: leave it out, or name another system")
    if isinstance(options.get("rotary"), int | float) and options["rotary"] is not True:
        options["rotary"] = Rotary(options["rotary"]) if options["rotary"] else False
    # Of the shape of the model, all else acts on projections.
    vocabulary = place.shape.get("value_vocab")
    options = {"normalize": not place.normalized, "value_vocab": vocabulary} | options
    return _call(name, place, options)


def _kernel_attention(parts: Parts, options: dict[str, Any], place: Place) -> Attention:
    name = parts.system
    options = {**place.shape, **options}
    base = name
    if systems.has_token_kernels(name):
        base = options.get("base", "vaswani2017")
        options.pop("vocab_size", None)
        options |= {"tokens": place.tokens, "layer": place.layer}
    if place.role != "cross":
        options = _fit(base, options, place)
    kernel = options.get("kernel")
    if isinstance(kernel, Kernel) and "position" not in options:
        bare = _position_for(kernel, place)
        if bare is not None:
            options["position"] = bare
            options.setdefault("value", "content")
    if name is None:
        layer = _checked(KernelAttention, "the layer", place, options)
    else:
        layer = _call(name, place, options)
    if place.role == "cross":
        _check_cross(layer)
    return layer


def _fit(base: str | None, options: dict[str, Any], place: Place) -> dict[str, Any]:
    """Sizes of positions that follow from the sizes of the model."""
    if base == "child2019":
        return {"max_length": place.max_length} | options
    if base == "huang2018":
        return {"causal": place.role == "decoder"} | options
    if base == "dai2019" and place.memory is not None:
        return {"memory": place.memory} | options
    if base == "parmar2018":
        if place.grid is not None:
            height, width, prefix = place.grid
            grid = Grid2D(height, width, prefix=prefix, combine="sum")
            return {"position": grid} | options
        width = options.get("width", 32)
        if not isinstance(width, int) or width < 1:
            raise ValueError(f"width must be a whole number from 1 up, got {width!r}")
        return {"height": -(-place.max_length // width)} | options
    return options


def _position_for(kernel: Kernel, place: Place) -> Position | None:
    """A position that provides the parts the kernel reads, and adds no factor."""
    parts = kernel.query_parts
    position: Position
    if {"height", "width"} & parts:
        if place.grid is None:
            raise ValueError("kernels on 'height' or 'width' are for images; use on='position'")
        height, width, prefix = place.grid
        position = Grid2D(height, width, prefix=prefix)
    elif "position" in parts:
        position = ProductKernel()
    else:
        return None
    position.kernel = None
    return position


def _call(name: str, place: Place, options: dict[str, Any]) -> Attention:
    def builder(d_model: int, num_heads: int, **rest: Any) -> Attention:
        return systems.build(name, d_model, num_heads, **rest)

    return _checked(builder, name, place, options)


def _checked(builder: Any, name: str, place: Place, options: dict[str, Any]) -> Attention:
    options = {"dropout": place.dropout, "backend": place.backend} | options
    try:
        layer: Attention = builder(place.d_model, place.num_heads, **options)
    except TypeError as error:
        found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if found is None:
            raise ValueError(f"{name} cannot be built with these options: {error}") from None
        raise ValueError(
            f"{name} takes no option {found[1]!r}; {suggest(found[1], _known(name))}"
        ) from None
    return layer


def _known(name: str) -> list[str]:
    """The options of a system, those of its layer included."""
    layer = GaussianAttention if systems.is_gaussian(name) else KernelAttention
    builders = [systems.SYSTEMS[name].builder] if name in systems.SYSTEMS else []
    names = [n for one in (*builders, layer) for n in inspect.signature(one).parameters]
    tokens = TOKEN_OPTIONS if systems.has_token_kernels(name) else ()
    own = ("d_model", "num_heads", "options")
    return [n for n in dict.fromkeys((*names, *tokens)) if n not in own]


def _filter(own: Filter, parts: Parts, place: Place) -> Filter:
    if place.role == "decoder":
        # A decoder has no more queries than keys.
        own = Full() if isinstance(own, CausalAcross) else own
        return join(own, Causal(), place.window)
    # A system's filter is for decoders; an encoder is unfiltered unless its config has a filter.
    asked = parts.filter is not None or "filter" in parts.system_options
    return join(own if asked else Full(), place.window)


def _check_cross(layer: Attention) -> None:
    if layer.joined_kernel.relative:
        raise ValueError(
            "cross-attention cannot decode a kernel of i - j step by step, got "
            f"{layer.joined_kernel}; use NoPosition, DirectSum or ProductKernel, and a kernel of "
            "the features alone"
        )


@dataclass(frozen=True)
class Cost:
    """What the kernel of a layer lowers to, as counted for each head."""

    # E + V, summed over the terms, for each visible pair
    pair: int
    # numbers of the lookup tables, for each query
    tables: int


@torch.no_grad()
def cost_of(layer: Attention) -> Cost:
    """What one place costs, from the terms of the kernel that the layer has now."""
    weight = layer.out.weight
    x = torch.zeros(1, 1, layer.d_model, dtype=weight.dtype, device=weight.device)
    q, k, v, _ = layer.parts(x)
    terms = layer.joined_kernel.terms(q, k)
    scored = [bias for term in terms for bias in term.biases if isinstance(bias, QueryTable)]
    return Cost(
        sum(width(term) + v.shape[-1] for term in terms),
        sum((b.past() if layer.filter.causal else b.rows)[0].numel() for b in scored),
    )


def _lend(layer: KernelAttention, tokens: TokenKernels) -> None:
    """Give the layer the model's token kernels without registering them as its submodule."""
    layer._modules.pop("tokens", None)
    # None for layers without kernels: torch.compile would specialise on the layer number.
    object.__setattr__(layer, "tokens", tokens if tokens.acts_on(layer.layer) else None)


def _like(tokens: TokenKernels | None) -> TokenKernels | None:
    if tokens is None:
        return None
    return TokenKernels(
        1, tokens.size, on=tokens.on, heads=tokens.heads, layers=tokens.layers,
        temperature=tokens.temperature, boundary=tokens.boundary, start=tokens.start,
    )  # fmt: skip


def most_places(layer: nn.Module) -> int | None:
    """The number of places the layer's positions have; None: no limit."""
    limits = [m.max_length for m in layer.modules() if isinstance(m, Learned)]
    limits += [m.prefix + m.height * m.width for m in layer.modules() if isinstance(m, Grid2D)]
    return min(limits, default=None)
