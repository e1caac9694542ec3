"""The options of `mercer train`, by panel of its help, and the settings from them."""

from __future__ import annotations

import ast
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .outcome import again

if TYPE_CHECKING:
    from ..train import Settings

# The longest value of an option NAME=VALUE, in characters.
LONGEST = 10_000

# Options with another name than their setting.
PAIRS = {"options": "system_options", "sets": "overrides", "data_options": "data_options"}

ATTENTION, MODEL, BUDGET = "Attention", "Model and data", "Budget"
OPTIMISER, RUNNING, FILES = "Optimiser", "How it runs", "Evaluation and files"


def _option(panel: str, text: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, metavar=metavar)


System = Annotated[str | None, _option(ATTENTION, "A name from `mercer systems`.")]
Kernel = Annotated[
    str | None,
    _option(
        ATTENTION,
        'Such as `RBF(2.0)*Exponential(on="position")`; parsed, never evaluated. One of your own '
        "is `my_kernels.py:ARD(32)`: naming the file imports it.",
    ),
]
Position = Annotated[str | None, _option(ATTENTION, "Such as `ProductKernel()` or `Rotary()`.")]
Value = Annotated[str | None, _option(ATTENTION, "`content` or `content+position`.")]
Filter = Annotated[str | None, _option(ATTENTION, "Such as `Causal() & Window(64, 0)`.")]
TokenKernels = Annotated[
    str | None,
    _option(
        ATTENTION,
        'With --init of a Hugging Face model: `TokenKernels(size=3, on="v", layers=[0])`.',
        "--token-kernels",
    ),
]
Trust = Annotated[
    list[str] | None,
    _option(
        ATTENTION,
        "A file or module to import for the kernels of a stored run; may be repeated.",
        "--trust-kernels",
        metavar="FILE",
    ),
]
Options = Annotated[
    list[str] | None,
    _option(
        ATTENTION, "An option of the system; may be repeated.", "--option", metavar="NAME=VALUE"
    ),
]
Preset = Annotated[str | None, _option(MODEL, "The model's shape; `tiny` trains on a CPU.")]
Sets = Annotated[
    list[str] | None,
    _option(
        MODEL, "A field of the model's config; may be repeated.", "--set", metavar="NAME=VALUE"
    ),
]
Data = Annotated[
    str | None,
    _option(
        MODEL,
        "`embedded` (no download), a file or folder, members of an archive "
        "(`'novels.zip::*Dickens*'`), or a name on the hub.",
    ),
]
Tokenizer = Annotated[
    str | None, _option(MODEL, "`bpe:1024` (trained), `bytes`, `gpt2`, or a path to its files.")
]
DataOptions = Annotated[
    list[str] | None,
    _option(
        MODEL, "An option of the data; may be repeated.", "--data-option", metavar="NAME=VALUE"
    ),
]
Cache = Annotated[str | None, _option(MODEL, "Where tokens are kept.", metavar="FOLDER")]
Init = Annotated[
    str | None,
    _option(
        MODEL,
        "Start from the weights of a run or of a saved model; or fine-tune a language model of "
        "Hugging Face: a folder, a GGUF file, or a name on the hub.",
        metavar="PATH_OR_NAME",
    ),
]
Steps = Annotated[
    int | None,
    _option(
        BUDGET,
        "Optimiser steps; 300 by default, unless --time is given. May be more on --resume.",
    ),
]
Time = Annotated[
    str | None,
    _option(BUDGET, "Time of steps, evaluations and checkpoints: `90s`, `10m`, `1h30m`."),
]
Batch = Annotated[int | None, _option(BUDGET, "Sequences per step, over all processes.")]
Length = Annotated[int | None, _option(BUDGET, "Tokens per sequence.")]
Accumulate = Annotated[int | None, _option(BUDGET, "Micro-batches per step, to save memory.")]
Rate = Annotated[float | None, _option(OPTIMISER, "The learning rate.", "--lr")]
BandwidthRate = Annotated[
    float | None,
    _option(OPTIMISER, "Learning rate of bandwidths; `--lr` by default.", "--bandwidth-lr"),
]
TokenRate = Annotated[
    float | None,
    _option(OPTIMISER, "Learning rate of token kernels; 5e-3 or `--lr`.", "--token-lr"),
]
Warmup = Annotated[float | None, _option(OPTIMISER, "Warm-up steps; below 1 a share of the run.")]
Schedule = Annotated[
    str | None,
    _option(
        OPTIMISER,
        "After the warm-up: `cosine`, down to --floor, or `inverse-sqrt`, without an end.",
    ),
]
Floor = Annotated[
    float | None, _option(OPTIMISER, "The final learning rate, as a share of `--lr`.")
]
Decay = Annotated[float | None, _option(OPTIMISER, "Weight decay of matrices.", "--weight-decay")]
Clip = Annotated[float | None, _option(OPTIMISER, "The largest gradient norm.")]
Smoothing = Annotated[float | None, _option(OPTIMISER, "Label smoothing.")]
Seed = Annotated[int | None, _option(RUNNING, "Seed of weights, data order and dropout.")]
Dtype = Annotated[str | None, _option(RUNNING, "float32, or bfloat16 by autocast.")]
Compile = Annotated[bool, _option(RUNNING, "Compile the model with torch.compile.", "--compile")]
Device = Annotated[str | None, _option(RUNNING, "cpu or cuda; cuda where there is one.")]
Fsdp = Annotated[bool, _option(RUNNING, "Shard the model over the processes (FSDP2).", "--fsdp")]
ContextParallel = Annotated[
    int | None,
    _option(RUNNING, "So many processes share each sequence.", "--context-parallel"),
]
Workers = Annotated[int | None, _option(RUNNING, "Processes that load data.")]
Threads = Annotated[int | None, _option(RUNNING, "CPU threads; as many as are free by default.")]
LogEvery = Annotated[int | None, _option(FILES, "Steps between logs.", "--log-every")]
EvalEvery = Annotated[int | None, _option(FILES, "Steps between evaluations.", "--eval-every")]
Patience = Annotated[
    int | None,
    _option(
        FILES,
        "End after so many evaluations without a better validation loss; the best model is kept.",
    ),
]
GiveUp = Annotated[
    float | None,
    _option(
        FILES,
        "After this share of the steps, end a run that has learnt no more than the frequencies of "
        "tokens.",
        "--give-up",
    ),
]
SaveEvery = Annotated[int | None, _option(FILES, "Steps between checkpoints.", "--save-every")]
Keep = Annotated[int | None, _option(FILES, "How many checkpoints are kept.")]
EvaluateBy = Annotated[
    str | None,
    _option(FILES, "Context of evaluation: `blocks`, `sliding` or `memory`.", "--evaluate-by"),
]
EvalItems = Annotated[
    int | None,
    _option(
        FILES,
        "Evaluate on at most this many tokens, pairs or images; by default the last evaluation "
        "reads all, earlier ones as many as the steps between them.",
        "--eval-items",
    ),
]
NoSamples = Annotated[
    bool, _option(FILES, "Write no sample of the model with evaluations.", "--no-samples")
]
Beams = Annotated[int | None, _option(FILES, "Beams of the search for BLEU.")]
Split = Annotated[
    str | None,
    _option(FILES, "`test`: score the data's test split at the end, too; `valid` by default."),
]
Output = Annotated[
    str | None,
    _option(FILES, "The folder of the run; by default a new one in runs/.", metavar="FOLDER"),
]
Resume = Annotated[
    bool,
    _option(
        FILES,
        "Continue the run in --output with its settings; with more --steps it is extended.",
        "--resume",
    ),
]
Board = Annotated[bool, _option(FILES, "Write TensorBoard files too.", "--tensorboard")]
DryRun = Annotated[
    bool,
    _option(
        FILES,
        "Print parameters, FLOPs, memory and tokens, then exit. No tokenizer is trained; tokens "
        "are estimated.",
        "--dry-run",
    ),
]
Json = Annotated[bool, _option(FILES, "With --dry-run: print JSON, for programs.", "--json")]


def read_settings(task: str, given: dict[str, Any]) -> Settings:
    """The settings from the options; on resume, on top of those in the folder."""
    from .. import own
    from ..train import Settings, read_time
    from ..train.settings import TEXTS

    if given["as_json"] and not given["dry_run"]:
        raise ValueError("--json needs --dry-run")
    wanted: dict[str, Any] = {
        PAIRS.get(name, name): read_pairs(value) if name in PAIRS else value
        for name, value in given.items()
        if _said(value) and name not in ("dry_run", "resume", "as_json")
    }
    if wanted.pop("no_samples", False):
        wanted["samples"] = False
    # What the command line names is trusted; what a stored run names is not.
    named = own.sources(*(wanted.get(name) for name in TEXTS))
    wanted["trust_kernels"] = tuple(dict.fromkeys((*wanted.get("trust_kernels", ()), *named)))
    if "time" in wanted:
        wanted["time"] = read_time(wanted["time"])
    resume = bool(given["resume"])
    if resume:
        if "output" not in wanted:
            raise ValueError("--resume needs --output, the folder of the run")
        config = Path(wanted["output"]) / "config.json"
        if config.exists():
            stored = Settings.read(config)
            if stored.task != task:
                raise ValueError(
                    f"the run in {wanted['output']} is of the task {stored.task}: "
                    f"mercer train {stored.task} --output {wanted['output']} --resume"
                )
            settings = replace(stored, **wanted, resume=True)
            if missing := settings.untrusted:
                command = again(task, replace(settings, trust_kernels=missing))
                raise ValueError(
                    f"the run in {settings.output} needs kernels of {', '.join(missing)}, and a "
                    f"stored text alone imports nothing: if you trust this code, {command}"
                )
            return settings
        if set(wanted) == {"output", "trust_kernels"}:
            # With other settings, --resume also starts a new run, so that a script can repeat the
            # command.
            raise ValueError(
                f"{wanted['output']} holds no run to go on with; a run has a config.json, "
                "and starts without --resume"
            )
    settings = Settings(task=task, **wanted, resume=resume)
    if settings.output is None and not given["dry_run"]:
        settings = replace(settings, output=free_folder(settings.name))
    return settings


def _said(value: Any) -> bool:
    empty = isinstance(value, list | tuple) and not value
    return value is not None and value is not False and not empty


def read_pairs(texts: list[str]) -> dict[str, Any]:
    """NAME=VALUE, where a value is a Python literal, or else text."""
    found: dict[str, Any] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        short = text if len(text) <= 60 else f"{text[:50]}…"
        if not sign or not name.isidentifier():
            raise ValueError(f"an option must be NAME=VALUE, got {short!r}")
        if len(value) > LONGEST:
            raise ValueError(f"a value must have at most {LONGEST} characters, got {short!r}")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                found[name] = ast.literal_eval(value)
        except (MemoryError, RecursionError):
            raise ValueError(f"a value must not be nested so deeply, got {short!r}") from None
        except (ValueError, TypeError, SyntaxError):
            found[name] = {"true": True, "false": False}.get(value.lower(), value)
        try:
            json.dumps(found[name])
        except TypeError:
            raise ValueError(
                f"a value must be a number, text, or a list or dict of these, got {short!r}"
            ) from None
    return found


def free_folder(name: str) -> str:
    """A new folder in runs/."""
    number, path = 1, Path("runs") / name
    while path.exists():
        number += 1
        path = Path("runs") / f"{name}-{number}"
    return str(path)
