"""From images to what a vision transformer reads, as its training did: Pillow and numpy alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor
from transformers.image_utils import make_flat_list_of_images

from ..data.pictures import Fit


class KernelImageProcessor(BaseImageProcessor):
    """(pixel / 255 - mean) / std of the middle square of an image, [B, C, size, size].

    Args:
        size: the shorter side is resized to it, and the middle is cut out.
        num_channels: 1 for grey, 3 for colours; images of the other kind are converted.
        image_mean, image_std: of pixels from 0 to 1, one number for each channel.
    """

    model_input_names = ["pixel_values"]  # noqa: RUF012

    def __init__(
        self,
        *,
        size: int = 224,
        num_channels: int = 3,
        image_mean: Sequence[float] | None = None,
        image_std: Sequence[float] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.size, self.num_channels = size, num_channels
        self.image_mean = list(image_mean or [0.5] * num_channels)
        self.image_std = list(image_std or [0.5] * num_channels)
        if num_channels not in (1, 3):
            raise ValueError(f"num_channels must be 1 or 3, got {num_channels}")
        if not len(self.image_mean) == len(self.image_std) == num_channels:
            raise ValueError(
                f"image_mean and image_std must have {num_channels} numbers, one for each channel, "
                f"got {self.image_mean} and {self.image_std}"
            )

    def preprocess(self, images: Any, *args: Any, **kwargs: Any) -> BatchFeature:
        """Images of Pillow, uint8 arrays [H, W] or [H, W, C], paths or addresses, one or a list."""
        fit = Fit(size=self.size, channels=self.num_channels)
        flat: Any = make_flat_list_of_images(self.fetch_images(images))
        pixels = np.stack([fit.apply(_as_image(image), "the image") for image in flat])
        mean, std = (torch.tensor(x)[:, None, None] for x in (self.image_mean, self.image_std))
        values = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255  # [B, C, H, W]
        data = {"pixel_values": ((values - mean) / std).contiguous().numpy()}
        return BatchFeature(data=data, tensor_type=kwargs.get("return_tensors"))


def _as_image(given: Any) -> Any:
    """An image of Pillow from one, or from an array or tensor of bytes."""
    from PIL import Image

    if isinstance(given, Image.Image):
        return given
    pixels = np.asarray(given)
    if pixels.dtype != np.uint8:
        raise ValueError(f"pixels must be whole numbers from 0 to 255 (uint8), got {pixels.dtype}")
    if pixels.ndim == 3 and pixels.shape[-1] not in (1, 3, 4) and pixels.shape[0] in (1, 3, 4):
        pixels = pixels.transpose(1, 2, 0)
    return Image.fromarray(pixels[..., 0] if pixels.shape[2:] == (1,) else pixels)
