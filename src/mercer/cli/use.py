"""`mercer generate | translate | classify | evaluate`: what a trained model is used for."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.console import Console
from rich.markup import escape

from .. import own
from .outcome import trust_words
from .train_options import read_pairs

# The reader of a pipe has closed it: 128 + the number of SIGPIPE.
PIPE_CLOSED = 141

Run = Annotated[
    str,
    typer.Argument(
        help="The folder of a run (runs/NAME) or of a saved model.",
        metavar="RUN",
        show_default=False,
    ),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, …; cuda where there is one.")]
Trust = Annotated[
    list[str] | None,
    typer.Option(
        "--trust-kernels",
        help="A file or module to import for the kernels of this model; may be repeated.",
        metavar="FILE",
    ),
]
Beams = Annotated[int | None, typer.Option(help="Beams of the search; those of the run, or 4.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def run_generate(
    run: Run,
    prompt: Annotated[
        list[str] | None,
        typer.Argument(
            help="The beginning of the text; without it, standard input.", metavar="PROMPT"
        ),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", "-n", help="At most so many tokens.")] = 200,
    temperature: Annotated[
        float, typer.Option(help="0 for the most likely text, 1 for the model's own chances.")
    ] = 0.8,
    top_k: Annotated[
        int | None, typer.Option("--top-k", help="Draw from the k most likely tokens.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", help="Draw from the likely tokens that have this probability."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal texts.")] = 0,
    device: Device = None,
    trust_kernels: Trust = None,
) -> None:
    """Continue a text with a trained language model, token by token.

    The model is the folder that `mercer train lm` wrote:

        mercer generate runs/lm-dai2019 'The class'

    The most likely text, or several to choose from:

        mercer generate runs/lm-dai2019 'The class' --temperature 0 --tokens 50
        for seed in 1 2 3; do mercer generate runs/lm-dai2019 'The class' --seed $seed; done

    The prompt may come from a file: `mercer generate runs/lm-dai2019 < beginning.txt`
    """
    with _answers() as use:
        text = " ".join(prompt) if prompt else "\n".join(_lines("a prompt"))
        trained = use.load(run, task="lm", device=device, trust_kernels=trust_kernels, say=_say)
        pieces = use.generate(
            trained, text, tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p,
            seed=seed, say=_say,
        )  # fmt: skip
        _write(text)
        try:
            for piece in pieces:
                _write(piece)
        finally:
            _write("\n")


def run_translate(
    run: Run,
    sentences: Annotated[
        list[str] | None,
        typer.Argument(help="What to translate; without it, standard input.", metavar="SENTENCE…"),
    ] = None,
    beams: Beams = None,
    batch: Annotated[
        int | None,
        typer.Option(help="Lines at a time; 32, or 1 where lines come one by one."),
    ] = None,
    device: Device = None,
    trust_kernels: Trust = None,
) -> None:
    """Translate with a trained translator: a line for each line, as they come.

    The model is the folder that `mercer train translation` wrote:

        mercer translate runs/translation-tsai2019 'Die Katze schläft.'
        mercer translate runs/translation-tsai2019 < german.txt > english.txt

    From a terminal or a pipe each line is answered before the next is read. `--batch 32` is
    faster.
    """
    with _answers() as use:
        trained = use.load(
            run, task="translation", device=device, trust_kernels=trust_kernels, say=_say
        )
        lines: Iterator[str] = iter(sentences) if sentences else _lines("lines to translate")
        size = batch or (32 if sentences or _is_file(sys.stdin) else 1)
        for text in use.translate(trained, lines, beams=beams, batch=size):
            _write(f"{text}\n")


def run_classify(
    run: Run,
    images: Annotated[
        list[str], typer.Argument(help="Image files.", metavar="IMAGE…", show_default=False)
    ],
    top: Annotated[int, typer.Option(help="How many classes of each image.")] = 3,
    batch: Annotated[int, typer.Option(help="Images at a time.")] = 32,
    device: Device = None,
    trust_kernels: Trust = None,
    as_json: Json = False,
) -> None:
    """Name the class of images with a trained vision transformer.

    The model is the folder that `mercer train vision` wrote:

        mercer classify runs/vision-kundu2026 cat.png dog.jpg --top 1

    A line for each image: its path, then classes with their probabilities, most likely first,
    separated by tabs. Images are resized and cut to the model's square, as for training.
    """
    with _answers() as use:
        trained = use.load(run, task="vision", device=device, trust_kernels=trust_kernels, say=_say)
        found = []
        for guess in use.classify(trained, images, top=top, batch=batch):
            if not as_json:
                classes = [f"{name} {chance:.1%}" for name, chance in guess.classes]
                _write("\t".join([guess.image, *classes]) + "\n")
            classes_of = [{"class": n, "probability": p} for n, p in guess.classes]
            found.append({"image": guess.image, "classes": classes_of})
        if as_json:
            _write_json(found)


def run_evaluate(
    run: Run,
    data: Annotated[
        str | None,
        typer.Option(help="A file, a folder, or a name on the hub; by default the run's own data."),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="valid, test, or all of the files; all of a single --data file."),
    ] = None,
    data_options: Annotated[
        list[str] | None,
        typer.Option(
            "--data-option", help="An option of the data; may be repeated.", metavar="NAME=VALUE"
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences or images at a time.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a window.")] = None,
    beams: Beams = None,
    evaluate_by: Annotated[
        str | None,
        typer.Option(help="Context of a language model's windows: blocks, sliding or memory."),
    ] = None,
    eval_items: Annotated[
        int | None, typer.Option(help="At most so many tokens, pairs or images; all by default.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, or bfloat16 by autocast.")] = None,
    cache: Annotated[
        str | None, typer.Option(help="Where tokens are kept.", metavar="FOLDER")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Where scores and answers go; RUN/evaluations/SPLIT by default.", metavar="FOLDER"
        ),
    ] = None,
    device: Device = None,
    trust_kernels: Trust = None,
    as_json: Json = False,
) -> None:
    """Score a trained model: perplexity and bits per byte, BLEU, or accuracy.

    On the test split of the run's own data, or on other data:

        mercer evaluate runs/translation-tsai2019 --split test
        mercer evaluate runs/lm-dai2019 --data novel.txt

    The folder of the scores also has the translations (hypotheses.txt) or the chosen classes
    (predictions.tsv).
    """
    with _answers() as use:
        trained = use.load(run, device=device, trust_kernels=trust_kernels, say=_say)
        with Console(stderr=True).status("scoring"):
            judged = use.evaluate(
                trained, data, split=split, output=output,
                data_options=read_pairs(data_options or []), batch=batch, length=length,
                beams=beams, evaluate_by=evaluate_by, eval_items=eval_items, dtype=dtype,
                cache=cache,
            )  # fmt: skip
        folder = None if judged.folder is None else str(judged.folder)
        if as_json:
            about = {"model": str(trained.path), "data": judged.data, "split": judged.split}
            _write_json({**about, **judged.figures, "folder": folder})
            return
        rows = [("data", judged.data), ("split", judged.split), *use.words(judged)]
        rows += [] if folder is None else [("saved in", folder)]
        wide = max(len(name) for name, _ in rows)
        for name, text in rows:
            _write(f"{name:<{wide}}  {text}\n")


COMMANDS: dict[str, Any] = {
    "generate": run_generate,
    "translate": run_translate,
    "classify": run_classify,
    "evaluate": run_evaluate,
}


@contextlib.contextmanager
def _answers() -> Iterator[Any]:
    """`mercer.use`; what goes wrong inside is one sentence and an exit code."""
    try:
        from .. import use
    except ImportError as error:
        _fail(str(error))
    try:
        yield use
        sys.stdout.flush()
    except BrokenPipeError:
        # Python would fail again when it flushes standard output at its end.
        with contextlib.suppress(OSError, io.UnsupportedOperation):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(PIPE_CLOSED) from None
    except torch.OutOfMemoryError:
        _fail("the GPU is out of memory: use a smaller --batch, or --device cpu", code=1)
    except own.Untrusted as error:
        _fail(f"{error.reason}: if you trust it, add {shlex.join(trust_words(error.sources))}")
    except (ValueError, ModuleNotFoundError) as error:
        _fail(str(error))
    except OSError as error:
        _fail(str(error), code=1)


def _lines(what: str) -> Iterator[str]:
    """The lines of standard input, without their ends."""
    if sys.stdin.isatty():
        _say(f"reading {what} from the terminal; Ctrl-D ends it")
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"line {number} of standard input is not UTF-8: {error}") from None
        yield text.rstrip("\r\n")


def _is_file(stream: Any) -> bool:
    """Whether all of a stream is there already."""
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, io.UnsupportedOperation):
        return False


def _write(text: str) -> None:
    """Write at once, whatever characters the output's encoding has."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    if sys.stdout.isatty():
        # Control characters of a model would be commands to the terminal.
        text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def _write_json(value: Any) -> None:
    _write(json.dumps(value, indent=2) + "\n")


def _say(text: str) -> None:
    Console(stderr=True, highlight=False).print(f"[yellow]{escape(text)}[/]", soft_wrap=True)


def _fail(message: str, code: int = 2) -> NoReturn:
    Console(stderr=True).print(f"[red]error:[/] {escape(message)}", soft_wrap=True)
    raise typer.Exit(code)
