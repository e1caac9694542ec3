"""`mercer inspect`: what trained models have learned, in the terminal or as a page."""

from __future__ import annotations

import contextlib
import gzip
import json
import lzma
import shlex
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.console import Console
from rich.markup import escape

from .. import inspect, own
from .inspected import show, show_distances
from .outcome import trust_words

PUBLISHED = "published"
LARGEST = 1 << 28


def run_inspect(
    models: Annotated[
        list[str],
        typer.Argument(
            help="The folder of a run, of a saved model or of a patched Hugging Face model; or "
            "`published` and the file of the authors' token kernels.",
            metavar="MODEL…",
            show_default=False,
        ),
    ],
    text: Annotated[
        str | None,
        typer.Option(
            help="Read with this text, plain, .gz or .xz; the run's own by default.", metavar="FILE"
        ),
    ] = None,
    tags: Annotated[
        list[str] | None,
        typer.Option(help="Words with parts of speech, CoNLL-U; may be repeated.", metavar="FILE"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write a page, one HTML file.", metavar="FILE")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Several models beside each other.")
    ] = False,
    context: Annotated[
        int | None, typer.Option(help="Tokens that the model sees at a time; as in training.")
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(help="The tokens whose rows the page has.", metavar="FIRST:LAST"),
    ] = None,
    published: Annotated[
        str | None,
        typer.Option(
            help="Beside the published means of this corpus: shakes or victorian.", metavar="NAME"
        ),
    ] = None,
    tokenizer: Annotated[
        str, typer.Option(help="Of published token kernels: its name, or its files.")
    ] = "gpt2",
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, …; cuda where there is one.")
    ] = None,
    trust_kernels: Annotated[
        list[str] | None,
        typer.Option(
            "--trust-kernels",
            help="A file or module to import for the kernels of a model; may be repeated.",
            metavar="FILE",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Read what a trained model has learned: heads, rows, token kernels, training.

    In the terminal, or as one HTML file that needs no network:

        mercer inspect runs/lm-dai2019
        mercer inspect runs/lm-dai2019 --text novel.txt --output page.html

    Token kernels by part of speech; several models; the published token kernels:

        mercer inspect runs/lm-leng2026 --tags ud-ewt.conllu --output page.html
        mercer inspect runs/a runs/b runs/c --compare --output page.html
        mercer inspect published shakes.pt --tags ud-ewt.conllu
    """
    with _sentences():
        if output is not None:
            _check_output(output)
        names = models[1:] if models[0] == PUBLISHED else models
        if models[0] == PUBLISHED and not names:
            raise ValueError("published needs a file: mercer inspect published shakes.pt")
        if len(names) > 1 and not compare:
            raise ValueError(f"{len(names)} models are compared with --compare")
        if compare and len(names) < 2:
            raise ValueError("--compare needs two models or more")
        if published is not None and published not in inspect.PUBLISHED:
            known = " or ".join(inspect.PUBLISHED)
            raise ValueError(f"--published must be {known}, got {published!r}")
        given: dict[str, Any] = {"published": published, "tagger": None, "text": None}
        if tags:
            given["tagger"] = inspect.read_conllu(*(_file(one, "--tags") for one in tags))
        if text is not None:
            given["text"] = _read_text(_file(text, "--text"))
        places = _places(rows)
        from .. import use

        found = []
        with Console(stderr=True).status("loading") as status:

            def say(what: str) -> None:
                status.update(escape(f"reading {what}"))

            for name in names:
                if models[0] == PUBLISHED:
                    path = _file(name, "published")
                    found.append(use.read_published(path, tokenizer, progress=say, **given))
                    continue
                if use.is_patched(name):
                    trained = use.load_patched(name, device=device, trust_kernels=trust_kernels)
                else:
                    trained = use.load(name, device=device, trust_kernels=trust_kernels, say=_say)
                report = use.read(
                    trained, context=context, places=places, rows=output is not None,
                    progress=say, **given,
                )  # fmt: skip
                found.append(report)
            if len({report.unit for report in found}) > 1:
                raise ValueError("models of text and of images are not compared with each other")
            found = inspect.name_apart(found)
            apart = inspect.distances_between(found) if compare else None
            if output is not None:
                say("the page")
                try:
                    inspect.write_page(found, output, apart)
                except OSError as error:
                    # Its own text names a temporary file.
                    raise OSError(f"cannot write {output}: {error.strerror or error}") from error
        if as_json:
            values: Any = [report.as_dict() for report in found]
            if apart is not None:
                values = {"models": values, "names": apart.names, "matrix": apart.matrix.tolist()}
            typer.echo(json.dumps(values if compare else values[0], indent=2, allow_nan=False))
        elif output is None:
            console = Console(highlight=False)
            for report in found:
                show(report, console)
            if apart is not None:
                show_distances(apart, console)
        else:
            size = output.stat().st_size / 1e6
            typer.echo(f"wrote {output}, {size:.2f} MB: open it in a browser")


@contextlib.contextmanager
def _sentences() -> Iterator[None]:
    """What goes wrong inside is one sentence and an exit code."""
    try:
        yield
    except torch.OutOfMemoryError:
        _fail("the GPU is out of memory: use --device cpu, or a smaller --context", code=1)
    except own.Untrusted as error:
        _fail(f"{error.reason}: if you trust it, add {shlex.join(trust_words(error.sources))}")
    except (ValueError, ImportError) as error:
        _fail(str(error))
    except BrokenPipeError:
        raise
    except OSError as error:
        _fail(str(error), code=1)


def _file(name: str, option: str) -> Path:
    path = Path(name).expanduser()
    if not path.is_file():
        raise ValueError(f"{option}: {path} is {'a folder' if path.is_dir() else 'not there'}")
    return path


def _read_text(path: Path) -> str:
    """A text in UTF-8, plain, .gz or .xz; of a very long one the beginning."""
    openers: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
    read = openers.get(path.suffix, open)
    try:
        with read(path, "rb") as file:
            found: bytes = file.read(LARGEST)
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile):
        raise ValueError(f"--text: {path} is no {path.suffix} file, or it is damaged") from None
    try:
        return found.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # The end may be cut within a character.
        if len(found) == LARGEST and error.start > LARGEST - 4:
            return found[: error.start].decode("utf-8-sig")
        raise ValueError(f"--text: {path} is not UTF-8, at byte {error.start}") from None


def _places(rows: str | None) -> tuple[int, int] | None:
    if rows is None:
        return None
    first, _, last = rows.partition(":")
    if not (first.isdecimal() and last.isdecimal() and len(rows) < 40):
        raise ValueError(f"--rows must be FIRST:LAST such as 100:180, got {rows!r}")
    return int(first), int(last)


def _check_output(path: Path) -> None:
    """Whether a page can be written there, before the work is done."""
    if path.is_dir():
        raise ValueError(f"--output: {path} is a folder: name a file in it, {path / 'page.html'}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--output: the folder {path.parent} is not there")


def _say(text: str) -> None:
    Console(stderr=True, highlight=False).print(f"[yellow]{escape(text)}[/]", soft_wrap=True)


def _fail(message: str, code: int = 2) -> NoReturn:
    Console(stderr=True).print(f"[red]error:[/] {escape(message)}", soft_wrap=True)
    raise typer.Exit(code)
