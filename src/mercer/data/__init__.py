"""Data for models: text, pairs of sentences, images, and drawn sequences.

Each of `text`, `pairs` and `images` takes "embedded" (here without a download), a file or a folder,
or a name on the Hugging Face hub. `recall` draws sequences for associative recall. `tagged`
reads words with their parts of speech, and documents with their genres, from CoNLL-U files.
"""

from .errors import DataError, need

# the modules below cannot begin without it
need("numpy")

from .images import ImageData, Images, Look, images  # noqa: E402
from .pairs import EncodedPairs, PairData, Pairs, pairs  # noqa: E402
from .recall import RecallData, Recalls, recall  # noqa: E402
from .sketch import sketch_pairs, sketch_text  # noqa: E402
from .tagged import Tagged, TaggedData, tagged  # noqa: E402
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
    "RecallData",
    "Recalls",
    "Tagged",
    "TaggedData",
    "TextData",
    "TokenFile",
    "Windows",
    "images",
    "pairs",
    "recall",
    "sketch_pairs",
    "sketch_text",
    "tagged",
    "text",
]
