"""Use trained models: `load` one, then generate, translate, classify, evaluate or read it."""

from .classify import Guess, classify
from .evaluate import Judged, evaluate, words
from .generate import generate
from .load import Trained, load
from .reading import read, read_published
from .translate import translate

__all__ = [
    "Guess",
    "Judged",
    "Trained",
    "classify",
    "evaluate",
    "generate",
    "load",
    "read",
    "read_published",
    "translate",
    "words",
]
