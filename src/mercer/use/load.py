"""Load a trained model: from the folder of a run, or from a saved model.

Requirements: what a model needs besides its weights (the tokenizer, how it sees images) is found
in one place, here: first in the files beside the weights, else in the data of the run. What is
missing or damaged is a ValueError with one sentence.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .. import models, own
from ..data import DataError, Look
from ..data.tokens import WITH_IDS
from ..data.tokens import load as load_tokenizer
from ..integrations.hf.source import Source
from ..models.config import PARTS, SPELLED
from ..storage import stored
from ..train import Settings
from ..train.checkpoints import Checkpoints
from ..train.run import quiet
from ..train.tasks import make

# task -> the class of its models, what it is, and an example of the command that uses it.
KINDS: dict[str, tuple[Any, str, str]] = {
    "lm": (models.KernelLM, "a language model", "mercer generate {} 'Once upon a time'"),
    "translation": (models.KernelTranslator, "a translator", "mercer translate {} 'a sentence'"),
    "vision": (models.KernelViT, "an image classifier", "mercer classify {} image.png"),
    "recall": (models.KernelLM, "a model that recalls values", "mercer evaluate {} --split test"),
    "tagging": (models.KernelLM, "a model that labels words", "mercer evaluate {} --split test"),
}
# Tasks whose models are language models, but in their runs.
LABELS = ("recall", "tagging")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A trained model on its device, and what its inputs are made with."""

    task: str
    model: Any
    # Of language models of text and translators.
    tokenizer: Any = None
    # Of image classifiers.
    look: Look | None = None
    device: torch.device
    # The folder of the weights; the run that it is of, and its settings.
    path: Path
    run: Path | None = None
    settings: Settings | None = None

    @property
    def most_places(self) -> int | None:
        """The longest sequence that its positions allow, None for any."""
        if isinstance(self.model, models.base.KernelModel):
            return self.model.most_places
        most: int | None = getattr(self.model.config, "max_position_embeddings", None)
        return most

    def new_cache(self) -> Any:
        """An empty cache for `generate`."""
        if isinstance(self.model, models.KernelLM):
            return self.model.new_cache()
        # All keys stay, since token kernels read neighbours.
        return DynamicCache()

    def __repr__(self) -> str:
        return f"Trained({KINDS[self.task][1]} from {self.path} on {self.device})"


def load(
    path: str | Path,
    *,
    task: str | None = None,
    device: str | None = None,
    trust_kernels: own.Trust = None,
    say: Callable[[str], None] | None = None,
    **options: Any,
) -> Trained:
    """The trained model at `path`, a run or a saved model, in evaluation mode.

    Args:
        path: `runs/NAME`, `runs/NAME/model`, or any folder of `save_pretrained`. Of a run that has
            not ended, the last checkpoint is taken.
        task: "lm", "translation", "vision", "recall" or "tagging"; a model of another is then a
            ValueError.
        device: "cpu", "cuda", …; by default cuda where there is one.
        trust_kernels: files and modules to import for the kernels that the model names; a stored
            text alone imports nothing.
        say: called with a message, such as that the run has not ended.
        options: passed on to `from_pretrained`.
    """
    say = say or (lambda text: None)
    place = choose_device(device)
    weights, run = find(Path(path).expanduser(), say)
    trust = own.trusted(trust_kernels)
    settings: Settings | None = None
    if run is not None:
        settings = replace(Settings.read(run / "config.json").resolve(), trust_kernels=trust)
    config = _read_config(weights)
    own_task = settings.task if settings is not None and settings.task in LABELS else "lm"
    kinds = {
        kind.config_class.model_type: name
        for name, (kind, *_) in KINDS.items()
        if name == own_task or name not in ("lm", *LABELS)
    }
    found = kinds.get(config["model_type"])
    foreign = found is None and config["model_type"] in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if foreign:
        found = "lm"
    if found is None:
        raise ValueError(
            f"{weights} holds a model of type {config['model_type']!r}, which is none of Mercer's: "
            f"{', '.join(kinds)}; nor is it a language model of transformers"
        )
    if task is not None and found != task:
        raise ValueError(
            f"{path} is {KINDS[found][1]}, not {KINDS[task][1]}; it is used by: "
            f"{KINDS[found][2].format(path)}"
        )
    texts = ("mercer",) if foreign else (*PARTS, *SPELLED)
    needed = own.sources(*(config.get(name) for name in texts))
    if missing := own.untrusted(needed, trust):
        raise own.Untrusted(missing, f"the model in {weights}")
    with quiet():
        if foreign:
            source = Source(str(weights))
            model = source.read_model(source.read_config(), trust_kernels=trust)
        else:
            model = _read_weights(KINDS[found][0], weights, options | {"trust_kernels": trust})
        model = model.to(place).eval()
        trained = Trained(
            task=found, model=model, device=place, path=weights, run=run, settings=settings
        )
        if found == "vision":
            return replace(trained, look=_read_look(trained))
        if found == "recall":
            return trained
        return replace(trained, tokenizer=_read_tokenizer(trained))


def choose_device(name: str | None) -> torch.device:
    """The device of this name; None: cuda where there is one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("it computes nothing")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {name!r} cannot be used here: {reason}") from None
    return device


def find(path: Path, say: Callable[[str], None]) -> tuple[Path, Path | None]:
    """The folder of the weights at a path, and the run that it belongs to."""
    if not path.exists():
        raise ValueError(f"{path} does not exist: give the folder of a run, or of a saved model")
    if not path.is_dir():
        raise ValueError(f"{path} is a file: give the folder of a run, or of a saved model")
    if _is_run(path):
        return _find_in_run(path, say), path
    if (path / "config.json").is_file():
        above = path.absolute().parent
        # runs/NAME/model, or runs/NAME/checkpoints/step-00000100
        runs = [folder for folder in (above, above.parent) if _is_run(folder)]
        return path, runs[0] if runs else None
    inside = sorted(folder.name for folder in path.iterdir() if _is_run(folder))
    if inside:
        shown = ", ".join(inside[:5]) + (", …" if len(inside) > 5 else "")
        raise ValueError(f"{path} is a folder of runs ({shown}): give one, as {path / inside[0]}")
    raise ValueError(
        f"{path} holds neither a run nor a saved model: there is no config.json, which a run has "
        "after its first step"
    )


def _find_in_run(run: Path, say: Callable[[str], None]) -> Path:
    if (run / "model" / "config.json").is_file():
        return run / "model"
    found = Checkpoints(run / "checkpoints", 1).latest(say)
    if found is None:
        raise ValueError(f"the run in {run} has neither a model nor a checkpoint yet")
    step = int(found.name.split("-")[1])
    say(f"the run in {run} has not ended: this is its last checkpoint, of step {step}")
    return found


def _is_run(path: Path) -> bool:
    """Whether the config in a folder is that of a run."""
    try:
        config = stored.parse((path / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "task" in config and "model_type" not in config


def _read_config(weights: Path) -> dict[str, Any]:
    path = weights / "config.json"
    try:
        config = stored.parse(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as the config of a model: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ValueError(f"{path} is not the config of a model: it has no model_type")
    return config


def _read_weights(kind: Any, weights: Path, options: dict[str, Any]) -> Any:
    try:
        return kind.from_pretrained(weights, **options)
    except ValueError as error:
        raise ValueError(f"the model in {weights} cannot be loaded: {error}") from None
    # What transformers, safetensors and torch raise for files that are missing, cut or of another
    # model.
    except (OSError, RuntimeError, KeyError, TypeError, SafetensorError) as error:
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise ValueError(f"the model in {weights} cannot be loaded: {reason}") from None


def _read_tokenizer(trained: Trained) -> Any:
    """The tokenizer beside the weights, else that of the run."""
    run = trained.run
    for folder in [trained.path, *([] if run is None else [run / "model"])]:
        if any((folder / name).is_file() for name in WITH_IDS):
            return load_tokenizer(folder)
    if trained.settings is None:
        raise ValueError(
            f"the model in {trained.path} has no tokenizer: save one beside it, by "
            "tokenizer.save_pretrained"
        )
    return _read_data(trained).tokenizer


def _read_look(trained: Trained) -> Look:
    """How the model sees images: from the image processor beside the weights, else the run."""
    config, path = trained.model.config, trained.path / "preprocessor_config.json"
    if path.is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            mean, std = (tuple(float(x) for x in found[f"image_{n}"]) for n in ("mean", "std"))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            raise ValueError(f"{path} cannot be read as an image processor's config") from None
        names = tuple(str(config.id2label[n]) for n in range(config.num_labels))
    elif trained.settings is not None:
        look = _read_data(trained).like
        mean, std, names = look.mean, look.std, look.class_names
    else:
        raise ValueError(
            f"the model in {trained.path} has no image processor, so it is not known how its "
            "images were normalised: give the folder of its run"
        )
    if len(mean) != config.num_channels or len(std) != config.num_channels or min(std) <= 0:
        raise ValueError(
            f"the model in {trained.path} takes {config.num_channels} channels, but its images "
            f"were normalised by mean {mean} and std {std}"
        )
    return Look(
        image_size=config.image_size, channels=config.num_channels, mean=mean, std=std,
        class_names=names,
    )  # fmt: skip


def _read_data(trained: Trained) -> Any:
    """The task of the run, with its data."""
    assert trained.settings is not None
    try:
        return make(trained.settings)
    except DataError as error:
        raise ValueError(
            f"{trained.path} lacks files that training would have saved with it, and the data of "
            f"the run cannot be read: {error}"
        ) from None
