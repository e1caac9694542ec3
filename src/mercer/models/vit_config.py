"""The config of vision transformers."""

from __future__ import annotations

from typing import Any

from .block import Activation, Mlp, Norm
from .config import (
    PARTS,
    Each,
    EachKernel,
    KernelConfig,
    Options,
    check_names,
    check_types,
    check_whole,
    spread,
)
from .parts import Parts


class KernelViTConfig(KernelConfig):
    """An image as a sequence of patches, row by row.

    Args:
        image_size, patch_size, num_channels: of a square image; patches divide it.
        num_labels: how many classes there are.
        pooling: "class" for a class token before the patches, "mean" for the mean of the patches.
        position: as elsewhere, and "grid" for a product of a height and a width kernel, or
            "grid-sum" for the sum of both embeddings (`Grid2D`). A class token is not on the grid:
            its position is 0 in both. With one-dimensional positions it is the first place.
        others: as in `KernelLMConfig`.
    """

    model_type = "mercer-vit"
    attribute_map = {  # noqa: RUF012
        "hidden_size": "d_model",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
    }

    def __init__(
        self,
        *,
        image_size: int = 224,
        patch_size: int = 16,
        num_channels: int = 3,
        d_model: int = 192,
        num_layers: int = 12,
        num_heads: int = 3,
        d_ff: int | None = None,
        pooling: str = "class",
        system: Each = None,
        system_options: Options = None,
        kernel: EachKernel = None,
        position: Each = None,
        value: Each = None,
        filter: Each = None,
        num_kv_heads: int | None = None,
        norm: Norm = "layer",
        norm_eps: float | None = None,
        pre_norm: bool = True,
        activation: Activation = "gelu",
        mlp: Mlp = "plain",
        bias: bool = True,
        normalize: bool = False,
        input_position: str | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        activation_dropout: float = 0.0,
        initializer_range: float | None = None,
        residual_start: str = "scaled",
        backend: str = "auto",
        **kwargs: Any,
    ) -> None:
        check_types(KernelViTConfig, locals())
        self.image_size, self.patch_size = image_size, patch_size
        self.num_channels, self.pooling = num_channels, pooling
        self.d_model, self.num_layers, self.num_heads = d_model, num_layers, num_heads
        self.d_ff = 4 * d_model if d_ff is None else d_ff
        self.mlp, self.norm_eps = mlp, norm_eps
        self.system, self.kernel, self.position = system, kernel, position
        self.value, self.filter = value, filter
        self.system_options = {} if system_options is None else system_options
        self.num_kv_heads, self.norm, self.pre_norm = num_kv_heads, norm, pre_norm
        self.activation, self.bias, self.normalize = activation, bias, normalize
        self.input_position, self.dropout = input_position, dropout
        self.attention_dropout, self.activation_dropout = attention_dropout, activation_dropout
        self.initializer_range, self.residual_start = initializer_range, residual_start
        self.backend = backend
        check_whole(
            image_size=image_size,
            patch_size=patch_size,
            num_channels=num_channels,
            num_layers=num_layers,
        )
        check_names(input_position, residual_start)
        if image_size % patch_size:
            raise ValueError(
                f"patch_size must divide image_size, got {patch_size} and {image_size}"
            )
        if pooling not in ("class", "mean"):
            raise ValueError(f"pooling must be 'class' or 'mean', got {pooling!r}")
        super().__init__(**kwargs)
        for parts in self.layer_parts():
            if parts.tokens is not None:
                raise ValueError(f"{parts.system} has token kernels, but an image has no token ids")

    @property
    def side(self) -> int:
        """The number of patches along one side."""
        return self.image_size // self.patch_size

    @property
    def prefix(self) -> int:
        """Places before the first patch."""
        return 1 if self.pooling == "class" else 0

    @property
    def places(self) -> int:
        return self.prefix + self.side**2

    def layer_parts(self) -> list[Parts]:
        """The parts of every layer's attention."""
        parts = {name: getattr(self, name) for name in PARTS}
        given = parts["position"]
        if isinstance(given, list | tuple):
            parts["position"] = [self._on_grid(one) for one in given]
        else:
            parts["position"] = self._on_grid(given)
        return spread(parts, self.num_layers, trust=self.trust_kernels)

    def _on_grid(self, position: str | None) -> str | None:
        combine = {"grid": "product", "grid-sum": "sum"}.get(position or "")
        if combine is None:
            return position
        return f"Grid2D({self.side}, {self.side}, prefix={self.prefix}, combine={combine!r})"
