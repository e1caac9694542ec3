"""`patch`: other attention in a model of transformers, in place."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from ...kernels import RBF, Bridge, Kernel
from ...nn import TokenKernels
from ...own import Trust
from ..host import own_kernel
from .attention import NAME
from .host import Host, Owner
from .layers import Layer, Which, attention_layers, choose
from .spec import Spec
from .tokens import Tokens, give_ids, takes_ids

M = TypeVar("M", bound=nn.Module)
Kernels = str | Kernel | Mapping[int | str, str | Kernel]


def patch(
    model: M,
    kernel: Kernels | None = None,
    *,
    layers: Which = "all",
    start: str | None = None,
    token_kernels: TokenKernels | None = None,
    trust_kernels: Trust = None,
) -> M:
    """Give a model of transformers other kernels or token kernels, in place; returns the model.

        hf.patch(model, kernel="RBF(heads=9)", layers="all")
        hf.patch(model, token_kernels=TokenKernels.like(model, size=3, on="v", layers=[0]))

    All weights stay as they are. Kernels and token kernels are new parameters, in the submodules
    `mercer` of the attention layers and `mercer_tokens` of the model. A second call adds to the
    first. An `Exponential()` without a scale takes that of the model, and so is the model as it
    came.

    Args:
        model: any model whose attention goes through transformers' AttentionInterface, or a PEFT
            model around one.
        kernel: a kernel, its text, or a dict {layer: kernel}. Each layer gets a copy.
        layers: which layers get it: "all", a number, the name of a layer or of a module that
            contains layers, or a list of these.
        start: "as-softmax" for RBF that computes softmax at first, so that the model is as it came;
            `leave_softmax` leads it to RBF during training. None starts with the kernel as it is.
        token_kernels: for the tokens of the model; `layers` of its own says where they act.
        trust_kernels: files or modules that a kernel in text may be imported from.
    """
    base = base_of(model)
    found = attention_layers(base)
    if kernel is None and token_kernels is None:
        raise ValueError('patch needs kernel="RBF(heads=8)", or token_kernels=…, or both')
    if start not in (None, "as-softmax"):
        raise ValueError(f'start must be "as-softmax" or None, got {start!r}')
    if start is not None and kernel is None:
        raise ValueError(f'start={start!r} needs kernel="RBF(heads=8)"')
    chosen = _kernels(found, kernel, layers, trust_kernels)
    if start is not None:
        chosen = {number: _as_softmax(one) for number, one in chosen.items()}
    owner = None
    if token_kernels is not None:
        owner = owner_of(base, found, token_kernels)
    _put(base, found, chosen, owner, token_kernels)
    return model


def install(base: Any, spec: Spec, trust: Trust) -> None:
    """Patch a model that is being built, as a config says."""
    found = attention_layers(base)
    texts = spec.texts()
    chosen = choose(found, list(texts)) if texts else []
    kernels = {layer.number: _kernel_of(layer, texts[layer.number], trust) for layer in chosen}
    # A config can ask for any size, so nothing is filled before it is known to fit the model.
    with torch.device("meta"):
        sized = spec.build_tokens()
    owner = None if sized is None else owner_of(base, found, sized)
    with torch.device("cpu"):
        tokens = spec.build_tokens()
    _put(base, found, kernels, owner, tokens)


def _put(
    base: Any,
    layers: list[Layer],
    kernels: Mapping[int, Kernel],
    owner: nn.Module | None,
    tokens: TokenKernels | None,
) -> None:
    """Change the model; everything is checked by now."""
    _prepare(base, layers)
    for layer in layers:
        if layer.number in kernels:
            host = host_of(layer)
            host.set(kernels[layer.number])
            _place(host, beside=layer.module)
    if owner is not None and tokens is not None:
        _add_tokens(owner, layers, tokens)
    record(base, layers)


def _place(module: nn.Module, *, beside: nn.Module) -> None:
    """Move new parameters to where a module has its own; what is on no device yet moves later."""
    mine = {id(x) for x in module.parameters()}
    theirs = (x for x in beside.parameters() if id(x) not in mine)
    x = next(theirs, None)
    if x is not None and not x.is_meta:
        module.to(x.device)


def base_of(model: nn.Module) -> Any:
    """The model of transformers, without what PEFT puts around it."""
    base: Any = model
    if hasattr(base, "get_base_model"):
        base = base.get_base_model()
    if not isinstance(base, nn.Module) or not hasattr(base, "config"):
        raise ValueError(
            f"patch is for models of transformers, such as AutoModelForCausalLM gives them, got "
            f"{type(model).__name__}"
        )
    return base


def host_of(layer: Layer) -> Host:
    """The host of a patched layer; with PEFT, the one that is trained."""
    host: Any = layer.module.mercer
    # PEFT keeps the module as it was, and a copy for each adapter.
    if hasattr(host, "modules_to_save"):
        active = host.active_adapter
        active = active[0] if isinstance(active, list) else active
        host = dict(host.modules_to_save.items()).get(active, host.original_module)
    assert isinstance(host, Host)
    return host


def is_patched(layer: Layer) -> bool:
    return hasattr(layer.module, "mercer")


def tokens_of(model: nn.Module) -> TokenKernels | None:
    """The token kernels of a patched model."""
    for module in model.modules():
        tokens: Any = getattr(module, "mercer_tokens", None)
        if tokens is not None:
            kernels: TokenKernels = tokens.kernels
            return kernels
    return None


def record(base: Any, layers: list[Layer]) -> None:
    """Write what is patched into the model's config."""
    hosts = {layer.number: host_of(layer) for layer in layers}
    kernels = {number: host.kernel for number, host in hosts.items() if host.chosen}
    base.config.mercer = Spec.of(kernels, tokens_of(base)).write()


def _kernels(
    found: list[Layer], kernel: Kernels | None, layers: Which, trust: Trust
) -> dict[int, Kernel]:
    """A kernel of its own for each chosen layer."""
    if kernel is None:
        if layers != "all":
            raise ValueError(
                f"layers={layers!r} says where kernel= goes, but there is no kernel; token "
                "kernels have layers of their own"
            )
        return {}
    if isinstance(kernel, Mapping):
        if layers != "all":
            raise ValueError("a dict {layer: kernel} names its layers: leave out layers=")
        if not kernel:
            raise ValueError("kernel={} names no layer")
        pairs = [(layer, each) for which, each in kernel.items() for layer in choose(found, which)]
    else:
        pairs = [(layer, kernel) for layer in choose(found, layers)]
    return {layer.number: _kernel_of(layer, each, trust) for layer, each in pairs}


def _kernel_of(layer: Layer, kernel: str | Kernel, trust: Trust) -> Kernel:
    return own_kernel(kernel, layer.heads, layer.dim, str(layer), trust)


def _as_softmax(kernel: Kernel) -> Bridge:
    """The bridge to an RBF, at the side of softmax."""
    if isinstance(kernel, Bridge):
        return kernel
    if type(kernel) is not RBF:
        raise ValueError(
            f'start="as-softmax" leads from softmax to RBF, but the kernel is {kernel!r}: give '
            'kernel="RBF(heads=8)"'
        )
    log = kernel.log_bandwidth
    if not kernel.relative_to_default or bool(log.any()):
        raise ValueError(
            'start="as-softmax" takes the bandwidths from the scale of the model: give RBF '
            f"without one, got {kernel!r}"
        )
    given: dict[str, Any] = {"heads": log.numel()} if log.dim() else {}
    with torch.device("cpu"):
        return Bridge(**given) if log.requires_grad else Bridge(**given, trainable=False)


def owner_of(base: nn.Module, layers: list[Layer], tokens: TokenKernels) -> nn.Module:
    """The module that is called with the ids; ValueError where the token kernels do not fit."""
    if not isinstance(tokens, TokenKernels):
        raise ValueError(f"token_kernels must be TokenKernels, got {type(tokens).__name__}")
    numbers = [layer.number for layer in layers]
    asked = tokens.layers if isinstance(tokens.layers, tuple) else range(tokens.layers or 0)
    choose(layers, [n for n in asked if n not in numbers] or "all")
    owners = {
        id(m): m for m in (_caller(base, one) for one in layers if tokens.acts_on(one.number))
    }
    if len(owners) != 1:
        raise ValueError(
            f"{type(base).__name__} has several parts that are called with ids; token kernels are "
            "for one: choose its layers in layers=[…]"
        )
    (owner,) = owners.values()
    embedding = owner.get_input_embeddings()
    count = getattr(embedding, "num_embeddings", None)
    if count is not None and count != tokens.vocab_size:
        raise ValueError(
            f"the token kernels have a vocabulary of {tokens.vocab_size} tokens, but the model has "
            f"{count}: make them by TokenKernels.like(model)"
        )
    for layer in layers:
        if tokens.acts_on(layer.number) and tokens.heads is not None and layer.heads:
            count = layer.heads
            if tokens.heads != count:
                raise ValueError(
                    f"the token kernels are for {tokens.heads} heads, but {layer} has {count}"
                )
    return owner


def _caller(base: nn.Module, layer: Layer) -> Any:
    """The innermost module around a layer that is called with `input_ids`."""
    parts = layer.name.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        module = base.get_submodule(".".join(parts[:depth]))
        if takes_ids(module) and hasattr(module, "get_input_embeddings"):
            return module
    raise ValueError(
        f"{layer} of {type(base).__name__} sees no tokens with ids, so it can have no token kernels"
    )


def _prepare(base: Any, layers: list[Layer]) -> None:
    """Hosts on all layers, and our attention in configs that no other model has."""
    memo: dict[int, Any] = {}
    for module in base.modules():
        config = module.__dict__.get("config")
        if getattr(config, "_attn_implementation", NAME) != NAME:
            module.config = copy.deepcopy(config, memo)
            module.config._attn_implementation = NAME
    for layer in layers:
        if not is_patched(layer):
            layer.module.mercer = Host(None, layer.number, own=layer.own)
    # As a static cache has them made before a call. The model makes them in the call, too.
    base.create_masks_for_generate = keep_mask
    base.init_continuous_batching = refuse_batching


def keep_mask(*args: Any, attention_mask: Any = None, **options: Any) -> Any:
    """The 2-D mask as it is: the masks of a patched model are filters, made in its forward."""
    return attention_mask


def refuse_batching(*args: Any, **options: Any) -> None:
    """Transformers would replace the attention by its own."""
    raise ValueError(
        "a patched model has no continuous batching: its keys come in pages of many requests, "
        "which Mercer does not read; use generate"
    )


def _add_tokens(owner: Any, layers: list[Layer], tokens: TokenKernels) -> None:
    fresh = not hasattr(owner, "mercer_tokens")
    owner.mercer_tokens = Tokens(tokens)
    _place(owner.mercer_tokens, beside=owner.get_input_embeddings())
    for layer in layers:
        host_of(layer).of = Owner(owner)
    if fresh:
        give_ids(owner)
