"""Data for models: text, pairs of sentences, images."""

from .errors import DataError, need

need("numpy")

from .text import TextData, TokenFile, text  # noqa: E402

__all__ = ["DataError", "TextData", "TokenFile", "text"]
