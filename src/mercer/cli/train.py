"""`mercer train lm|translation|vision|recall`: options, progress line, exit codes."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import typer
from rich.console import Console
from rich.markup import escape

from .outcome import again, report
from .train_options import (
    Accumulate,
    BandwidthRate,
    Batch,
    Beams,
    Board,
    Cache,
    Clip,
    Compile,
    ContextParallel,
    Data,
    DataOptions,
    Decay,
    Device,
    DryRun,
    Dtype,
    EvalEvery,
    EvalItems,
    EvaluateBy,
    Filter,
    Floor,
    Fsdp,
    GiveUp,
    Init,
    Json,
    Keep,
    Kernel,
    Length,
    LogEvery,
    NoSamples,
    Options,
    Output,
    Patience,
    Position,
    Preset,
    Rate,
    Resume,
    SaveEvery,
    Schedule,
    Seed,
    Sets,
    Smoothing,
    Split,
    Steps,
    System,
    Threads,
    Time,
    Tokenizer,
    TokenKernels,
    TokenRate,
    Trust,
    Value,
    Warmup,
    Workers,
    read_settings,
)

if TYPE_CHECKING:
    from ..train import Settings

app = typer.Typer(
    help="Train a language model, a translator or a vision transformer with any attention, "
    "or test its recall.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

# Options that a task does not take.
OF_LM = {"evaluate_by", "context_parallel", "token_kernels"}
UNFIT = {
    "lm": {"smoothing", "beams"},
    "translation": OF_LM,
    "vision": OF_LM | {"tokenizer", "length", "beams", "no_samples"},
    "recall": OF_LM | {"data", "tokenizer", "cache", "beams", "smoothing", "no_samples"},
}


def _make(task: str, text: str) -> Callable[..., None]:
    def command(
        context: typer.Context,
        system: System = None,
        kernel: Kernel = None,
        position: Position = None,
        value: Value = None,
        filter: Filter = None,
        token_kernels: TokenKernels = None,
        options: Options = None,
        trust_kernels: Trust = None,
        preset: Preset = None,
        sets: Sets = None,
        data: Data = None,
        tokenizer: Tokenizer = None,
        data_options: DataOptions = None,
        cache: Cache = None,
        init: Init = None,
        steps: Steps = None,
        time: Time = None,
        batch: Batch = None,
        length: Length = None,
        accumulate: Accumulate = None,
        learning_rate: Rate = None,
        bandwidth_rate: BandwidthRate = None,
        token_rate: TokenRate = None,
        warmup: Warmup = None,
        schedule: Schedule = None,
        floor: Floor = None,
        weight_decay: Decay = None,
        clip: Clip = None,
        smoothing: Smoothing = None,
        seed: Seed = None,
        dtype: Dtype = None,
        compile: Compile = False,
        device: Device = None,
        fsdp: Fsdp = False,
        context_parallel: ContextParallel = None,
        workers: Workers = None,
        threads: Threads = None,
        log_every: LogEvery = None,
        eval_every: EvalEvery = None,
        patience: Patience = None,
        give_up: GiveUp = None,
        save_every: SaveEvery = None,
        keep: Keep = None,
        evaluate_by: EvaluateBy = None,
        eval_items: EvalItems = None,
        no_samples: NoSamples = False,
        beams: Beams = None,
        split: Split = None,
        output: Output = None,
        resume: Resume = False,
        tensorboard: Board = False,
        dry_run: DryRun = False,
        as_json: Json = False,
    ) -> None:
        _train(task, context.params)

    command.__doc__ = text
    signature = inspect.signature(command, eval_str=True)
    fit = [p for name, p in signature.parameters.items() if name not in UNFIT[task]]
    command.__signature__ = signature.replace(parameters=fit)  # type: ignore[attr-defined]
    return command


app.command("lm")(
    _make(
        "lm",
        """Train a language model, and print its validation bits per byte.

        Half a minute on a CPU, without a download:

            mercer train lm --system dai2019 --steps 100

        A kernel of your own, with a learning rate for its bandwidths:

            mercer train lm --kernel 'RBF(heads=2)*Exponential(on="position")'
                --position 'ProductKernel()' --bandwidth-lr 0.01

        GPT-2's shape on your own text, on eight GPUs:

            torchrun --nproc-per-node 8 -m mercer train lm --preset gpt2-small
                --data corpus.txt --tokenizer gpt2 --dtype bfloat16 --compile --time 2h

        A kernel that you wrote, in a file of your own:

            mercer train lm --kernel 'my_kernels.py:ARD(32)'

        `--dry-run` prints the cost. To go on after an interrupt:

            mercer train lm --output FOLDER --resume
        """,
    )
)
app.command("translation")(
    _make(
        "translation",
        """Train a translator, and print its BLEU with sacrebleu's signature.

        On sentences of a small grammar, without a download:

            mercer train translation --system tsai2019 --steps 200

        On a folder of tab-separated pairs, German to English:

            mercer train translation --preset iwslt --data data/tatoeba --time 1h --dtype bfloat16
        """,
    )
)
app.command("vision")(
    _make(
        "vision",
        """Train a vision transformer, and print its accuracy.

        On scikit-learn's digits, without a download:

            mercer train vision --system kundu2026 --steps 200

        On CIFAR-10 from the hub:

            mercer train vision --preset cifar --data cifar10 --kernel 'RBF(heads=3)' --time 1h
        """,
    )
)
app.command("recall")(
    _make(
        "recall",
        """Train a small model to recall values by their keys, and print its accuracy.

        The data are drawn; an attention that cannot find a key fails:

            mercer train recall --kernel 'RBF()' --position 'LookupTable(4)' --steps 400

        With more pairs, and a test on more than it was trained on:

            mercer train recall --length 256 --data-option vocabulary=8192
                --data-option pairs=4,8,16,32,64 --data-option held_out_pairs=4,16,64,128
        """,
    )
)


def _train(task: str, given: dict[str, Any]) -> None:
    # Only the main process prints; torchrun sets the rank.
    main = int(os.environ.get("RANK", "0")) == 0
    console = Console(highlight=False, stderr=False, quiet=not main)
    try:
        from .. import train
        from ..train.distributed import Elsewhere
        from ..train.screen import progress_line
    except ModuleNotFoundError as error:
        _fail(f"training needs {error.name}: pip install 'mercer[train]'")
    settings: Settings | None = None
    try:
        settings = read_settings(task, given)
        if given["dry_run"]:
            processes = int(os.environ.get("WORLD_SIZE", "1"))
            plan = train.plan(settings, processes)
            if not given["as_json"]:
                console.print(escape(str(plan)), soft_wrap=True)
            elif main:
                typer.echo(json.dumps(plan.as_dict(), indent=2, allow_nan=False))
            return

        def say(text: str) -> None:
            console.print(f"[yellow]{escape(text)}[/]", soft_wrap=True)

        with progress_line(console) as show:
            result = train.run(settings, show, say=say)
    except Elsewhere:
        raise typer.Exit(1) from None
    except train.DiskFull as error:
        then = "" if settings is None else f"; make room, then: {again(task, settings)}"
        _fail(f"{error.strerror}{then}", code=1)
    except torch.OutOfMemoryError:
        _fail(
            "the GPU is out of memory: use more --accumulate (the same result in smaller "
            "parts), a smaller --batch or --length, or --dtype bfloat16",
            code=1,
        )
    except (MemoryError, RuntimeError) as error:
        # torch has no class of its own for a full memory of the CPU.
        if not isinstance(error, MemoryError) and "can't allocate memory" not in str(error):
            raise
        _fail("the memory is full: use more --accumulate, or a smaller model or --batch", code=1)
    except (ValueError, ModuleNotFoundError) as error:
        _fail(str(error))
    except OSError as error:
        _fail(str(error), code=1)
    except KeyboardInterrupt:
        _fail("stopped at once; the last checkpoint is kept", code=130)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    report(console, task, settings, result)


def _fail(message: str, code: int = 2) -> NoReturn:
    if int(os.environ.get("RANK", "0")) == 0:
        Console(stderr=True).print(f"[red]error:[/] {escape(message)}", soft_wrap=True)
    raise typer.Exit(code)
