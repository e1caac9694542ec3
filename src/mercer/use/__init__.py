"""Use trained models: `load` one, then generate, translate, classify or evaluate."""

from .classify import Guess, classify
from .evaluate import Judged, evaluate, words
from .generate import generate
from .load import Trained, load
from .translate import translate

__all__ = [
    "Guess",
    "Judged",
    "Trained",
    "classify",
    "evaluate",
    "generate",
    "load",
    "translate",
    "words",
]
