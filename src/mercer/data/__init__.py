"""Data for models: text, pairs of sentences, images.

Each of `text`, `pairs` and `images` takes "embedded" (here without a download), a file or a folder,
or a name on the Hugging Face hub.
"""

from .errors import DataError, need

# the modules below cannot begin without it
need("numpy")

from .images import ImageData, Images, Look, images  # noqa: E402
from .pairs import EncodedPairs, PairData, Pairs, pairs  # noqa: E402
from .text import Blocks, TextData, TokenFile, Windows, text  # noqa: E402

__all__ = [
    "Blocks",
    "DataError",
    "EncodedPairs",
    "ImageData",
    "Images",
    "Look",
    "PairData",
    "Pairs",
    "TextData",
    "TokenFile",
    "Windows",
    "images",
    "pairs",
    "text",
]
