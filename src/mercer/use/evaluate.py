"""Score a trained model on a split of data, as training does, and keep its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..train import Settings
from ..train.distributed import Team
from ..train.run import TURNS, quiet
from ..train.scores import Answers, save_scores
from ..train.state import kept_random
from ..train.tasks import make
from .load import Trained

# Of models without a run.
BATCH, LENGTH = 16, 1024


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The figures of a model on a split."""

    # Where the data is from, and which part of it this is: "valid", "test", or "all" of a file.
    data: str
    split: str
    figures: Mapping[str, Any]
    # Translations, or the predicted class of each image; None for language models.
    answers: Answers | None = None
    # Where the files are.
    folder: Path | None = None


def evaluate(
    trained: Trained,
    data: str | Path | None = None,
    *,
    split: str | None = None,
    output: str | Path | None = None,
    data_options: Mapping[str, Any] | None = None,
    **given: Any,
) -> Judged:
    """The figures of the task: perplexity and bits per byte, BLEU, or accuracy.

    Args:
        data: as for training; by default that of the run.
        split: "valid", "test", or "all" for files undivided; by default "all" of a single file
            that is given, else "valid".
        output: the folder of the scores and answers; by default one in the run's `evaluations`.
            A model without a run keeps none unless it is given.
        data_options: options of the data, as for training.
        given: `batch`, `length`, `beams`, `eval_items`, `evaluate_by`, `dtype` and `cache`, as in
            `train.Settings`; by default those of the run, but all items.
    """
    settings, split = _settings(trained, data, split, data_options, given)
    with TURNS, quiet(), kept_random():
        task = make(settings, split=split, like=trained.look or trained.tokenizer)
        figures = task.evaluate(trained.model, Team(trained.device), final=True)
    folder = None if output is None else Path(output).expanduser()
    if folder is None and trained.run is not None:
        folder = trained.run / "evaluations" / name_of(data, split)
    judged = Judged(
        data=task.source, split=split, figures=figures, answers=task.answers, folder=folder
    )
    if folder is not None:
        about = {"data": judged.data, "split": split, "model": str(trained.path), **figures}
        save_scores(folder, about, judged.answers)
    return judged


def name_of(data: str | Path | None, split: str) -> str:
    """The name of an evaluation's folder: the split, after the name of data that was given."""
    if data is None:
        return split
    stem = "".join(c if c.isalnum() or c in "-_." else "-" for c in Path(data).name).strip(".-")
    return f"{stem[:80] or 'data'}-{split}"


def _settings(
    trained: Trained,
    data: str | Path | None,
    split: str | None,
    data_options: Mapping[str, Any] | None,
    given: Mapping[str, Any],
) -> tuple[Settings, str]:
    own = trained.settings
    if own is None and data is None:
        raise ValueError(
            f"the model in {trained.path} is not in the folder of a run, so say which data to "
            "score it on: a file, a folder, or a name on the hub"
        )
    if own is None:
        places = trained.most_places or LENGTH
        length = min(LENGTH, getattr(trained.model.config, "context_length", places))
        own = Settings(task=trained.task, batch=BATCH, length=length)
    # A model of a run may be scored after it was copied or resumed: nothing of the run is touched.
    changes: dict[str, Any] = {
        "output": None, "resume": False, "eval_items": None, "fsdp": False, "compile": False,
        "accumulate": 1, "context_parallel": 1, "split": "valid",
    }  # fmt: skip
    changes["batch"] = None if own.batch is None else max(1, own.batch // own.accumulate)
    if data is not None:
        changes |= {"data": str(data), "data_options": {}}
        if trained.look is not None:
            look = trained.look
            changes["data_options"] = {"size": look.image_size, "channels": look.channels}
    changes |= {name: value for name, value in given.items() if value is not None}
    options = {**(own.data_options if data is None else changes["data_options"])}
    # Random crops and flips are for training.
    options.pop("augment", None)
    changes["data_options"] = {**options, **(data_options or {})}
    file = data is not None and Path(data).expanduser().is_file()
    return replace(own, **changes).resolve(), split or ("all" if file else "valid")


def words(judged: Judged) -> Sequence[tuple[str, str]]:
    """The figures as rows of text."""
    names = {
        "bleu": ("BLEU", ".2f"), "signature": ("sacrebleu", ""), "accuracy": ("accuracy", ".2%"),
        "perplexity": ("perplexity", ".4g"), "bits_per_byte": ("bits per byte", ".4f"),
        "eval_loss": ("loss (nats)", ".4f"), "eval_tokens": ("tokens", ",d"),
    }  # fmt: skip
    found = judged.figures
    rows = [(text, format(found[n], form)) for n, (text, form) in names.items() if n in found]
    pairs = {n.removeprefix("accuracy_"): x for n, x in found.items() if n[:9] == "accuracy_"}
    return [*rows, *((f"{n} pairs", f"{x:.2%}") for n, x in pairs.items())]
