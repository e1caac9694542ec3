"""From the bytes of an image file to pixels of the wanted size."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from .errors import DataError, need

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
# what Pillow may read, whatever the name says: its EPS reader, for one, starts Ghostscript
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "PPM", "TIFF")
# Pillow's modes of numbers, "I;16" among them
DEEP = ("I", "F")
# larger than any image within Pillow's own limit
LARGEST = 1 << 28


@dataclass(frozen=True)
class Fit:
    """How images become arrays: the side of the square, and 1 or 3 channels; None: as they are."""

    size: int | None = None
    channels: int | None = None

    def decode(self, stream: IO[bytes], where: str) -> np.ndarray[Any, Any]:
        """The pixels of an image file, uint8 [H, W, C]."""
        pillow = need("PIL.Image")
        data = stream.read(LARGEST + 1)
        if not data:
            raise DataError(f"{where} is empty")
        if len(data) > LARGEST:
            raise DataError(f"{where} is not an image: it is larger than {LARGEST} bytes")
        try:
            with warnings.catch_warnings():
                # make Pillow's warning about huge images an error
                warnings.simplefilter("error", pillow.DecompressionBombWarning)
                with pillow.open(io.BytesIO(data), formats=FORMATS) as image:
                    image.load()
                    return self.apply(image, where)
        except DataError:
            raise
        except pillow.UnidentifiedImageError:
            raise DataError(
                f"{where} is not an image that can be read: its content is none of "
                f"{', '.join(FORMATS)}"
            ) from None
        # Pillow raises many kinds of errors for a damaged file
        except Exception as error:
            raise DataError(f"{where} is not an image that can be read ({error})") from error

    def apply(self, image: Any, where: str) -> np.ndarray[Any, Any]:
        """The pixels of a PIL image, uint8 [H, W, C]."""
        pillow = need("PIL.Image")
        if image.mode.startswith(DEEP):
            # a conversion would cut them off at 255
            raise DataError(f"{where} has pixels of more than 8 bits ({image.mode}); save it in 8")
        grey = image.mode in ("1", "L", "LA")
        channels = self.channels or (1 if grey else 3)
        image = image.convert("L" if channels == 1 else "RGB")
        width, height = image.size
        if self.size is None:
            if width != height:
                raise DataError(f"{where} is {width}x{height}, not a square: give a size")
        elif (width, height) != (self.size, self.size):
            scale = self.size / min(width, height)
            wide, high = (max(self.size, round(side * scale)) for side in (width, height))
            image = image.resize((wide, high), pillow.Resampling.BICUBIC)
            left, top = (wide - self.size) // 2, (high - self.size) // 2
            image = image.crop((left, top, left + self.size, top + self.size))
        pixels = np.asarray(image, dtype=np.uint8)
        return pixels.reshape(*pixels.shape[:2], channels)
