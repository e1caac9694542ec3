"""Use trained models: `load` one, then generate, translate, classify, evaluate or read it."""

from .classify import Guess, classify
from .evaluate import Judged, evaluate, words
from .generate import generate
from .load import Trained, load
from .patched import is_patched, load_patched
from .reading import read, read_published
from .translate import translate

__all__ = [
    "Guess",
    "Judged",
    "Trained",
    "classify",
    "evaluate",
    "generate",
    "is_patched",
    "load",
    "load_patched",
    "read",
    "read_published",
    "translate",
    "words",
]
