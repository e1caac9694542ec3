"""What the models share: initialisation, blocks, compilation, padding."""

from __future__ import annotations

import copy
import inspect
import math
import re
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init

from .. import own
from ..filters import Documents, Filter
from ..names import suggest
from ..nn import KernelAttention, Learned, RelativeBiases, Sinusoid, TokenKernels
from .adaptive import AdaptiveSoftmax
from .block import Block, Weights, is_known, leading_zeros, make_norm
from .config import KernelConfig
from .parts import Parts, Place, build, most_places
from .patched import record, remember
from .saved import LOADER, write_card, write_loader
from .starts import restart

# How often each block may be recompiled: other lengths, with and without gradients, and so on.
VARIANTS = 4


class KernelModel(PreTrainedModel):
    """A transformer with any kernel smoother as attention."""

    config_class = KernelConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values", "memory"]  # noqa: RUF012
    # Attention is Mercer's; these flags tell transformers not to set up its own.
    _supports_sdpa = True
    _supports_flex_attn = False
    # Whether output shapes of the read-out depend on input shapes alone, as a graph needs.
    graph_read_out = True
    # Takes the states after the last block; returns the loss (with labels) and the logits.
    read_out: Callable[..., tuple[Tensor | None, Tensor | None]]

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, but a tensor that the files lack is an error.

        With `ignore_mismatched_sizes=True` it is initialised anew, as for another head.
        `trust_kernels="my_kernels.py"` imports that file, or module, for the kernels of the config.
        """
        told = kwargs.pop("output_loading_info", False)
        config = kwargs.get("config")
        if isinstance(config, KernelConfig) and "trust_kernels" in kwargs:
            kwargs["config"] = config = copy.deepcopy(config)
            config.add_trust(*own.trusted(kwargs.pop("trust_kernels")))
        try:
            found: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        except TypeError as error:
            name = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if name is None or name[1] not in kwargs:
                raise
            fields = [*inspect.signature(cls.config_class).parameters, "trust_kernels"]
            raise ValueError(
                f"from_pretrained takes no {name[1]!r}; {suggest(name[1], fields)}"
            ) from None
        model, info = found
        missing = sorted(info["missing_keys"])
        if missing and not kwargs.get("ignore_mismatched_sizes"):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ValueError(
                f"the saved weights lack the tensor {missing[0]!r}{more}; to initialise what is "
                "missing, give ignore_mismatched_sizes=True"
            )
        return (model, info) if told else model

    def save_pretrained(
        self, save_directory: Any, *args: Any, whole: bool = True, **kwargs: Any
    ) -> None:
        """As in transformers, with how to load it; weights can be read where the config can.

        Kernels that have replaced those of the config are written into the config. Without `whole`
        there are config and weights alone, as in a checkpoint.
        """
        record(self, self.attention_by_field())
        if whole:
            self.config.auto_map = {"AutoConfig": f"{LOADER}.{type(self.config).__name__}"}
        try:
            super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            # It belongs to the file beside the config, which the config alone does not have.
            vars(self.config).pop("auto_map", None)
        folder = Path(save_directory)
        if not (folder / "config.json").is_file():
            return
        if whole:
            write_loader(folder, self.config)
            write_card(folder, self.config)
        # safetensors makes files for their owner alone; the config follows the umask.
        for file in folder.glob("*.safetensors"):
            shutil.copymode(folder / "config.json", file)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, nn.Linear | nn.Conv2d):
            fan_in = module.weight[0].numel()
            scale = fan_in**-0.5 if std is None else std
            init.normal_(module.weight, std=scale * getattr(module, "start_scale", 1.0))
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=module.embedding_dim**-0.5 if std is None else std)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            if module.weight is not None:
                init.ones_(module.weight)
            if getattr(module, "bias", None) is not None:
                init.zeros_(module.bias)  # type: ignore[arg-type]
        elif isinstance(module, RelativeBiases):
            for x in module.parameters():
                init.normal_(x, std=0.0 if std is None else std)
        elif isinstance(module, AdaptiveSoftmax):
            if module.token_bias is not None:
                init.zeros_(module.token_bias)
        elif hasattr(module, "starts"):
            restart(module)
        elif isinstance(module, TokenKernels):
            if not getattr(module.weight, "_is_hf_initialized", False):
                module.reset_parameters()
        elif isinstance(module, Learned) and getattr(module, "at_input", False):
            init.normal_(module.weight, std=0.02)

    def make_block(
        self, parts: Parts, place: Place, *, cross: KernelAttention | None = None
    ) -> Block:
        """One block, with the options of the config."""
        config = self.config
        attention = build(parts, place)
        remember(attention, parts)
        block = Block(
            attention,
            d_ff=config.d_ff,
            norm=config.norm,
            activation=config.activation,
            bias=config.bias,
            dropout=config.dropout,
            activation_dropout=config.activation_dropout,
            pre_norm=config.pre_norm,
            mlp=config.mlp,
            norm_eps=config.norm_eps,
            cross=cross,
        )
        scales = {"scaled": (2 * config.num_layers) ** -0.5, "zero": 0.0, "plain": 1.0}
        for linear in block.residual:
            linear.start_scale = scales[config.residual_start]
        return block

    def attention_by_field(self) -> dict[str, list[Any]]:
        """The layers of attention whose kernels a field of the config has."""
        blocks: Any = self.blocks
        return {"kernel": [block.attention for block in blocks]}

    def shape(self, **more: Any) -> dict[str, Any]:
        """Arguments of KernelAttention that are the same in all layers."""
        config = self.config
        shared = {"bias": config.bias, "normalize": config.normalize}
        if config.num_kv_heads is not None:
            shared["num_kv_heads"] = config.num_kv_heads
        return shared | more

    def make_input_position(self, length: int | None = None) -> Learned | Sinusoid | None:
        """The position that is added to the embeddings once."""
        kind = self.config.input_position
        if kind is None:
            return None
        length = self.config.context_length if length is None else length
        position = Learned(length) if kind == "learned" else Sinusoid()
        position.setup(self.config.d_model)
        # Positions are initialised with their layer.
        position.at_input = True  # type: ignore[assignment]
        return position

    def make_last_norm(self) -> nn.Module:
        """The norm after all blocks; post-norm blocks need none."""
        config = self.config
        if not config.pre_norm:
            return nn.Identity()
        return make_norm(config.norm, config.d_model, config.bias, config.norm_eps)

    def new_weights(self, wanted: bool | None) -> Weights | None:
        """Where blocks put the weights of attention; None if they are not wanted."""
        return Weights() if (self.config.output_attentions if wanted is None else wanted) else None

    def check_length(self, length: int) -> None:
        """Raise ValueError if learned positions or a grid have fewer places than this length."""
        if self.most_places is not None and length > self.most_places:
            raise ValueError(
                f"this model's positions have {self.most_places} places, got {length}; "
                "raise context_length, or take a system without learned positions"
            )

    def compile_parts(self, **options: Any) -> None:
        """Compile every block and the read-out in place, each by itself.

        Layers of one kind share compiled code, so a deep model compiles as fast as a shallow one.
        The options are those of torch.compile.
        """
        import torch._dynamo.config as limits

        blocks = [module for module in self.modules() if isinstance(module, Block)]
        # Dynamo counts the recompilations of all blocks together. Past its limit it would silently
        # run the rest uncompiled.
        limits.recompile_limit = max(limits.recompile_limit, VARIANTS * len(blocks))
        for block in blocks:
            block.compile(**options)
        if self.graph_read_out:
            own = types.MethodType(type(self).read_out, self)
            self.__dict__["read_out"] = torch.compile(own, **options)

    def __getstate__(self) -> dict[str, Any]:
        # A copy is not compiled, as with nn.Module.compile.
        return {name: x for name, x in super().__getstate__().items() if name != "read_out"}

    @property
    def runs_blocks_twice(self) -> bool:
        """Whether blocks are checkpointed; transformers 5.23 has renamed its own property."""
        return any(getattr(module, "gradient_checkpointing", False) for module in self.modules())

    @property
    def most_places(self) -> int | None:
        """The longest sequence the positions allow, None for any."""
        if not hasattr(self, "_most_places"):
            self._most_places = most_places(self)
        return self._most_places


def embed_places(
    position: Learned | Sinusoid | None, x: Tensor, before: int | Tensor, offset: Tensor | None
) -> Tensor:
    """x plus the embeddings of its places: from `before` on, or these, less the padding."""
    if position is None:
        return x
    places = before
    if not isinstance(places, Tensor):
        places = torch.arange(places, places + x.shape[1], device=x.device)
    places = places if offset is None else (places - offset[:, None]).clamp(min=0)
    # check_length has checked it: reading places here would synchronise with the GPU.
    t = position.weight[places] if isinstance(position, Learned) else position(places)
    return x + t.to(x.dtype)


def check_ids(ids: Tensor, vocab_size: int, name: str = "input_ids") -> None:
    """Raise ValueError for ids outside the vocabulary."""
    if ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"{name} must be whole numbers [B, T], got {ids.dtype} {list(ids.shape)}")
    # Reading the data would synchronise with the GPU.
    if is_known(ids) and ids.is_cpu and ids.numel():
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"{name} must be from 0 to {vocab_size - 1}, but reach from {low} to {high}: "
                "does the tokenizer belong to this model?"
            )


def read_mask(
    mask: Tensor | None, batch: int, length: int, *, causal: bool
) -> tuple[Filter | None, Tensor | None]:
    """From attention_mask [B, K], 1 = token: the filter, and the padding on the left [B]."""
    if mask is None:
        return None, None
    if mask.dim() != 2 or mask.shape != (batch, length):
        raise ValueError(
            f"attention_mask must be {[batch, length]}, 1 for tokens and 0 for padding, "
            f"got {list(mask.shape)}"
        )
    mask = mask != 0
    if is_known(mask):
        if bool(mask.all()):
            return None, None
        # Under a causal filter no query sees padding on its right.
        if causal and bool((mask[:, 1:] <= mask[:, :-1]).all()):
            return None, None
    offset: Tensor | None = leading_zeros(mask)
    if is_known(mask) and not bool(mask[:, 0].logical_not().any()):
        offset = None
    return Documents(mask.long()), offset


def scale_of(config: Any) -> float:
    """The factor on the embeddings."""
    return math.sqrt(config.d_model) if config.embedding_scale else 1.0
