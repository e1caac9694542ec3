"""The tasks: language modelling, translation, vision, associative recall, tagging.

A task has the data, the model, the loss and the evaluation. The trainer is the same for all.
"""

from collections.abc import Callable
from typing import Any

from ..pretrained import PRETRAINED
from ..settings import Settings
from .language import LanguageModel as LanguageModel
from .pretrained import Pretrained as Pretrained
from .recall import Recall as Recall
from .tagging import Tagging as Tagging
from .task import Task as Task
from .translation import Translation as Translation
from .vision import Vision as Vision

TASKS: dict[str, Callable[..., Task]] = {
    "lm": LanguageModel,
    "translation": Translation,
    "vision": Vision,
    "recall": Recall,
    "tagging": Tagging,
}


def make(settings: Settings, **options: Any) -> Task:
    """The task of settings that are resolved."""
    kind = Pretrained if settings.preset == PRETRAINED else TASKS[settings.task]
    return kind(settings, **options)
