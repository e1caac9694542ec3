"""The vision transformer: patches of an image, any kernel, positions in two dimensions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.utils.generic import can_return_tuple

from ..kernels import Kernel
from .base import KernelModel, embed_places
from .parts import Place
from .vit_config import KernelViTConfig


class KernelViT(KernelModel):
    """Logits of the classes of an image.

    With `pooling="class"` a learned token stands before the patches and is read at the end.
    `Grid2D` gives it position 0 in height and width. With "mean", the mean of the patches is read.
    `kernel`, where given, replaces that of the config in all layers.
    """

    config: KernelViTConfig
    config_class = KernelViTConfig
    main_input_name = "pixel_values"
    input_modalities = "image"

    def __init__(self, config: KernelViTConfig, *, kernel: Kernel | str | None = None) -> None:
        super().__init__(config.with_kernel(kernel))
        config = self.config
        assert config.num_labels is not None
        self.num_labels = config.num_labels
        patch = config.patch_size
        self.embed = nn.Conv2d(config.num_channels, config.d_model, patch, stride=patch)
        self.class_token: nn.Parameter | None = None
        if config.pooling == "class":
            self.class_token = nn.Parameter(torch.zeros(1, 1, config.d_model))
        self.input_position = self.make_input_position(config.places)
        blocks = []
        for n, parts in enumerate(config.layer_parts()):
            place = Place(
                d_model=config.d_model,
                num_heads=config.num_heads,
                role="encoder",
                layer=n,
                max_length=config.places,
                grid=(config.side, config.side, config.prefix),
                normalized=config.pre_norm,
                shape=self.shape(),
                dropout=config.attention_dropout,
                backend=config.backend,
            )
            blocks.append(self.make_block(parts, place))
        self.blocks = nn.ModuleList(blocks)
        self.norm = self.make_last_norm()
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.d_model, self.num_labels)
        # For `count`: runs once for an image, not for each patch.
        self.head.once = True  # type: ignore[assignment]
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self and self.class_token is not None:
            # As large as embedded patches, so that a norm before the first layer scales both alike.
            std = self.config.initializer_range
            init.normal_(self.class_token, std=1.0 if std is None else std)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> ImageClassifierOutput:
        """[B, C, height, width] -> [B, num_labels], and the loss if labels [B] are given."""
        config, weights = self.config, self.new_weights(output_attentions)
        wanted = (config.num_channels, config.image_size, config.image_size)
        if pixel_values.dim() != 4 or pixel_values.shape[1:] != wanted:
            raise ValueError(
                f"pixel_values must be [B, {', '.join(map(str, wanted))}], "
                f"got {list(pixel_values.shape)}"
            )
        x = self.embed(pixel_values).flatten(2).mT  # [B, patches, d_model]
        if self.class_token is not None:
            x = torch.cat([self.class_token.to(x.dtype).expand(len(x), -1, -1), x], 1)
        x = self.dropout(embed_places(self.input_position, x, 0, None))
        hidden = [x]
        for block in self.blocks:
            x = block(x, weights=weights)
            hidden.append(x)
        loss, logits = self.read_out(x, labels)
        out: dict[str, Any] = {"loss": loss, "logits": logits}
        if output_hidden_states:
            out["hidden_states"] = tuple(hidden)
        if weights is not None:
            out["attentions"] = tuple(weights.own)
        return ImageClassifierOutput(**out)

    def read_out(self, x: Tensor, labels: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """The last norm, the head at the class token or the mean, and the loss."""
        x = self.norm(x)
        logits = self.head(x[:, 0] if self.class_token is not None else x.mean(1))
        return None if labels is None else F.cross_entropy(logits.float(), labels), logits
