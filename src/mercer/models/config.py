"""The base of the configs. They are JSON: sizes, and the parts of attention as text.

`system`, `system_options`, `kernel`, `position`, `value` and `filter` are each one entry for all
layers, or a list with one for each layer.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints

from transformers import PreTrainedConfig

from .. import own, parse
from ..kernels import Kernel
from ..kernels.arguments import is_finite
from ..names import suggest
from ..nn import TokenKernels
from .block import check_block
from .parts import Parts

PARTS = ("system", "system_options", "kernel", "position", "value", "filter")
Each = str | Sequence[str | None] | None
EachKernel = str | Kernel | Sequence[str | Kernel | None] | None
Options = Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None
# Fields that may hold kernels.
SPELLED = (
    "kernel", "system_options", "encoder_attention", "decoder_attention", "cross_attention",
)  # fmt: skip
# More than any model has: a slip such as 1e9 layers would fill the memory.
MOST_LAYERS = 10_000
# Fields of transformers' own that a preset may set.
LABELS = {"num_labels": int | None, "id2label": Mapping | None, "label2id": Mapping | None}
# Arguments of transformers' configs that are not attributes of the class.
OTHERS = (
    "trust_kernels", "torch_dtype", "name_or_path", "output_attentions", "attn_implementation",
    "experts_implementation", "auto_map", "quantization_config", "custom_pipelines",
)  # fmt: skip
# The words for a type in a message.
WORDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a finite number",
    str: "text",
    Kernel: "a kernel",
    Mapping: "a dict",
    Sequence: "a list",
    list: "a list",
    type(None): "None",
}


class KernelConfig(PreTrainedConfig):
    """What the configs of all models have in common."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.pop("auto_map", None)
        for alias, name in self.attribute_map.items():
            if alias in kwargs:
                setattr(self, name, kwargs.pop(alias))
        for name in kwargs:
            if not self._knows(name):
                known = [*signature(type(self)).parameters, *LABELS]
                hint = suggest(name, (n for n in known if n != "kwargs"))
                raise ValueError(f"a {self.model_type} has no field {name!r}; {hint}")
        # Files and modules with classes of the text; never stored, since a text imports nothing.
        self.trust_kernels = own.trusted(kwargs.pop("trust_kernels", None))
        self._spell()
        # Before transformers' own checks, which divide by the heads.
        self._check()
        super().__init__(**kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Nothing: transformers would copy the source of the class into every saved folder."""

    @classmethod
    def _dict_from_json_file(cls, json_file: Any) -> dict[str, Any]:
        try:
            found: dict[str, Any] = super()._dict_from_json_file(json_file)
        except RecursionError:
            raise ValueError(f"{json_file} is nested too deeply to be a config") from None
        return found

    # Transformers allows it for its own attention alone; these models compute the weights aside.
    @property
    def output_attentions(self) -> bool:
        """Whether every call returns the weights of attention."""
        return bool(self._output_attentions)

    @output_attentions.setter
    def output_attentions(self, value: bool) -> None:
        self._output_attentions = value

    def validate_output_attentions(self) -> None:
        """All values are allowed."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers; `trust_kernels` counts only as an argument."""
        # Fields of other versions may be in a file; a person's slip is not.
        given = {n: x for n, x in config_dict.items() if n != "trust_kernels" and cls._knows(n)}
        if (trust := kwargs.pop("trust_kernels", None)) is not None:
            given["trust_kernels"] = trust
        if not kwargs.get("return_unused_kwargs"):
            for name in kwargs:
                hint = suggest(name, (n for n in signature(cls).parameters if n != "kwargs"))
                if not cls._knows(name) and hint.startswith("did"):
                    raise ValueError(f"a {cls.model_type} has no field {name!r}; {hint}")
        return super().from_dict(given, **kwargs)

    @classmethod
    def _knows(cls, name: str) -> bool:
        """Whether a config has this field, of ours or of transformers'."""
        ours = name in signature(cls).parameters or name in (*cls.attribute_map, *LABELS)
        return ours or name in OTHERS or name.startswith("_") or hasattr(PreTrainedConfig, name)

    def to_dict(self) -> dict[str, Any]:
        return {n: x for n, x in super().to_dict().items() if n != "trust_kernels"}

    def with_kernel(self, kernel: Kernel | str | None) -> Self:
        """A copy with this kernel in all layers, or the config itself for None."""
        if kernel is None:
            return self
        config = copy.deepcopy(self)
        config.kernel = kernel
        config._spell()
        return config

    def _spell(self) -> None:
        """Write kernels that were given as objects as text."""
        for name in SPELLED:
            if hasattr(self, name):
                text, trust = parse.spell(getattr(self, name))
                setattr(self, name, text)
                self.add_trust(*trust)

    def add_trust(self, *names: str) -> None:
        """Trust more files and modules."""
        self.trust_kernels = tuple(dict.fromkeys((*self.trust_kernels, *names)))

    def _check(self) -> None:
        check_block(self.norm, self.activation, self.mlp)
        if self.norm_eps is not None and self.norm_eps <= 0:
            raise ValueError(f"norm_eps must be above 0, got {self.norm_eps}")
        check_whole(d_model=self.d_model, num_heads=self.num_heads, d_ff=self.d_ff)
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model {self.d_model} does not divide into {self.num_heads} heads")
        start = self.initializer_range
        if start is not None and start < 0:
            raise ValueError(f"initializer_range must be at least 0, got {start}")
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            share = getattr(self, name)
            if not 0 <= share < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {share}")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads


def spread(
    parts: Mapping[str, Any], num_layers: int, what: str = "", *, trust: tuple[str, ...] = ()
) -> list[Parts]:
    """The parts of every layer; an entry that is a list has one for each layer."""
    unknown = sorted(set(parts) - set(PARTS))
    if unknown:
        raise ValueError(
            f"{what or 'attention '}has no part {unknown[0]!r}; {suggest(unknown[0], PARTS)}"
        )
    each: list[dict[str, Any]] = [{} for _ in range(num_layers)]
    for name, given in parts.items():
        listed = isinstance(given, list | tuple)
        if listed and len(given) != num_layers:
            raise ValueError(
                f"{what}{name} must have one entry for each of {num_layers} layers, got "
                f"{len(given)}"
            )
        for layer, row in enumerate(each):
            one = given[layer] if listed else given
            if one is not None:
                row[name] = one
    return [Parts(**row, trust=trust).check() for row in each]


def token_kernels(layers: Sequence[Parts], vocab_size: int) -> TokenKernels | None:
    """The TokenKernels that all layers share, or None."""
    each = [parts for parts in layers if parts.tokens is not None]
    if not each:
        return None
    if any(parts.tokens != each[0].tokens for parts in each):
        raise ValueError("all layers share their token kernels, so their options must be the same")
    for parts in each:
        asked = parts.system_options.get("vocab_size", vocab_size)
        if asked != vocab_size:
            raise ValueError(
                f"vocab_size of {parts.system} must be the model's {vocab_size}, got {asked}"
            )
    return TokenKernels(vocab_size, **(each[0].tokens or {}))


def check_types(config: type[KernelConfig], given: dict[str, Any]) -> None:
    """Raise ValueError for an argument of another type than the config's `__init__` declares."""
    kinds = get_type_hints(config.__init__) | LABELS
    for name, value in (given | given["kwargs"]).items():
        kind = kinds.get(config.attribute_map.get(name, name), Any)
        if not _fits(value, kind):
            choices = dict.fromkeys(get_origin(one) or one for one in _choices(kind))
            words = " or ".join(WORDS[one] for one in choices)
            raise ValueError(f"{name} must be {words}, got {value!r}")


def _fits(value: Any, kind: Any) -> bool:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    # Names have their own check, which lists them.
    if kind is Any or origin is Literal:
        return True
    if origin in (list, Sequence):
        return isinstance(value, list | tuple) and all(_fits(one, inner[0]) for one in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and is_finite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, origin or kind)


def _choices(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def check_whole(**sizes: Any) -> None:
    """Raise ValueError for a size that is not a whole number >= 1."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} must be a whole number from 1 up, got {size!r}")
        if name.endswith("layers") and size > MOST_LAYERS:
            raise ValueError(f"{name} must be at most {MOST_LAYERS}, got {size}")


def check_names(input_position: object, residual_start: object) -> None:
    """Raise ValueError for an unknown name."""
    if input_position not in (None, "learned", "sinusoid"):
        raise ValueError(
            f"input_position must be 'learned', 'sinusoid' or None, got {input_position!r}"
        )
    if residual_start not in ("scaled", "zero", "plain"):
        raise ValueError(
            f"residual_start must be 'scaled', 'zero' or 'plain', got {residual_start!r}"
        )
