"""The command `mercer`: its parts, and the commands `explain` and `bench`."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.console import Console
from rich.markup import escape

from .. import __version__, bench, own, parse, systems
from ..bench import DTYPES
from ..dispatch.choose import NAMES
from ..explain import Explanation, explain
from ..filters import Full
from ..kernels import Kernel
from ..nn import KernelAttention
from ..term.features import Features
from . import lists
from . import train as train_commands
from . import use as use_commands
from .inspect import run_inspect
from .study import run_study

app = typer.Typer(
    help="Attention as a kernel smoother: see its systems, train them, compare them, time them.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    add_completion=True,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mercer {__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


for name, command in lists.COMMANDS.items():
    app.command(name)(command)


@app.command("explain")
def explain_system(
    system: Annotated[
        str | None,
        typer.Argument(
            help="A name from `mercer systems`, or `all`; none for a kernel alone.",
            show_default=False,
        ),
    ] = None,
    kernel: Annotated[
        str | None,
        typer.Option(
            help="Such as `RBF(2.0)*Polynomial(2)` or `my_kernels.py:ARD(64)`: alone, or as the "
            "kernel of the system."
        ),
    ] = None,
    position: Annotated[
        str | None, typer.Option(help="Such as `rotary`: a layer with this position.")
    ] = None,
    filter: Annotated[str | None, typer.Option(help="Such as `Causal() & Window(64, 0)`.")] = None,
    shape: Annotated[
        str, typer.Option(help="Batch, heads, length and head dimension.", metavar="B,H,T,D")
    ] = "1,8,1024,64",
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")] = "cpu",
    backend: Annotated[str, typer.Option(help=", ".join(NAMES))] = "auto",
    as_json: lists.Json = False,
) -> None:
    """Say which backend runs a system, how its kernel is computed, and why others do not run.

    For example: `mercer explain dai2019 --shape 4,16,8192,64 --dtype bfloat16`, or
    `mercer explain --kernel 'my_kernels.py:ARD(64)' --filter 'Causal()'`
    """
    if system is None and kernel is None:
        _fail("explain needs a system or --kernel; `mercer systems` lists the systems")
    batch, heads, length, head_dim = _shape(shape)
    if dtype not in DTYPES:
        _fail(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    place = _device(device)
    console = Console(highlight=False, soft_wrap=True)
    texts = {"kernel": kernel, "position": position, "filter": filter}
    # What the command line names may be imported.
    trust = own.sources(*texts.values())
    found: list[dict[str, Any]] = []
    try:
        parts = {n: getattr(parse, n)(x, trust) for n, x in texts.items() if x is not None}
        for name in systems.SYSTEMS if system == "all" else [system]:
            if systems.is_gaussian(name) and {"kernel", "position"} & set(parts):
                if system == "all":
                    continue
                raise ValueError(
                    f"{name} has a kernel and positions of its own: give --kernel without a system"
                )
            if name is not None or position is not None:
                build = KernelAttention if name is None else partial(systems.build, name)
                layer = build(heads * head_dim, heads, backend=backend, **parts)
                said = systems.example(layer, batch, length, DTYPES[dtype], place)
            else:
                said = _explain_kernel(
                    parts["kernel"], (batch, heads, length, head_dim), DTYPES[dtype], place,
                    filter=parts.get("filter", Full()), backend=backend,
                )  # fmt: skip
            if as_json:
                found.append({"system": name, **asdict(said)})
                continue
            if name is not None:
                console.print(f"[bold]{name}[/]  {escape(systems.find(name).title)}")
            console.print(escape(str(said)) + "\n")
    except Exception as error:
        blamed = own.blame(error, trust)
        if blamed is None and not isinstance(error, ValueError):
            raise
        _fail(blamed or str(error))
    if as_json:
        typer.echo(json.dumps(found if system == "all" else found[0], indent=2))


@app.command("bench")
def run_bench(
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, …; cuda where there is one.")
    ] = None,
    shapes: Annotated[
        str | None,
        typer.Option(
            help="Batch, heads, length, head dimension: BxHxTxD, or BxH/KxTxD with K key heads.",
            metavar="BxHxTxD,…",
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help=f"{', '.join(DTYPES)}; bfloat16 on CUDA, float32 on CPU.")
    ] = None,
    kernels: Annotated[
        str | None,
        typer.Option(
            help=f"all, or some of: {', '.join(bench.KERNELS)}; or text such as "
            "`my_kernels.py:ARD(64)`."
        ),
    ] = None,
    filter: Annotated[
        str, typer.Option(help="full, causal, window:1024, memory:512, strided:128, fixed:128:8.")
    ] = "causal",
    backends: Annotated[
        str | None, typer.Option(help=f"Some of: {', '.join(NAMES)}; auto by default.")
    ] = None,
    peers: Annotated[
        str, typer.Option(help=f"all, none (SDPA alone), or some of: {', '.join(bench.PEERS)}.")
    ] = "all",
    forward_only: Annotated[bool, typer.Option("--forward-only", help="No backward.")] = False,
    decode: Annotated[
        bool, typer.Option("--decode", help="One query against T keys, forward only.")
    ] = False,
    graph: Annotated[
        bool,
        typer.Option("--graph", help="Time replays of CUDA graphs, without host overhead."),
    ] = False,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="Find the fastest backend of each kind of kernel, as entries of rules.json.",
        ),
    ] = False,
    write: Annotated[
        bool,
        typer.Option("--write", help="Write them to rules.json, which the backend auto follows."),
    ] = False,
    repeats: Annotated[
        int | None,
        typer.Option(help="Timed runs per row; by default as many as fit into a second."),
    ] = None,
    save: Annotated[
        bool, typer.Option("--save", help="Write JSON and Markdown to results/bench/.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="Write to this path instead, given without suffix.", metavar="PATH"),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print JSON, for programs, as --save writes it; progress on stderr."
        ),
    ] = False,
) -> None:
    """Time the kernels beside softmax attention and other libraries. Wrong results get no time.

    For example: `mercer bench --kernels rbf,laplace --shapes 4x16x8192x64 --save`
    """
    place = _device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        settings = bench.read(
            device=place, dtype=dtype, shapes=shapes, filter=filter, kernels=kernels,
            backends=backends, peers=peers, forward_only=forward_only, decode=decode, graph=graph,
            tune=tune, write=write, repeats=repeats, save=save, output=output,
        )  # fmt: skip
        console = Console(highlight=False, stderr=as_json)
        code = bench.run(settings, console, typer.echo if as_json else None)
    except ValueError as error:
        _fail(str(error))
    raise typer.Exit(code)


app.add_typer(train_commands.app, name="train")
app.command("study")(run_study)
app.command("inspect")(run_inspect)
for name, command in use_commands.COMMANDS.items():
    app.command(name)(command)


def _explain_kernel(
    kernel: Kernel,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    **options: Any,
) -> Explanation:
    """How `smooth` would run a kernel whose parts all have the given shape."""
    batch, heads, length, dim = shape
    # One number, expanded without copies: only shapes matter.
    x = torch.zeros(1, 1, 1, 1, dtype=dtype, device=device).expand(batch, heads, length, dim)
    q, k = (
        Features(**dict.fromkeys(sorted(parts | {"content"}), x))
        for parts in (kernel.query_parts, kernel.key_parts)
    )
    with torch.no_grad():
        return explain(kernel.to(device=device, dtype=dtype), q, k, x, **options)


def _shape(text: str) -> tuple[int, int, int, int]:
    try:
        batch, heads, length, head_dim = (int(number) for number in text.split(","))
    except ValueError:
        _fail(f"--shape must be B,H,T,D such as 1,8,1024,64, got {text!r}")
    if min(batch, heads, length, head_dim) < 1:
        _fail(f"--shape must have numbers of at least 1, got {text!r}")
    if max(batch, heads, length, head_dim) >= 2**31:
        _fail(f"--shape must have numbers below 2^31, got {text!r}")
    return batch, heads, length, head_dim


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("it computes nothing")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        _fail(f"--device {name!r} cannot be used here: {str(error).splitlines()[0]}")
    return device


def _fail(message: str) -> NoReturn:
    Console(stderr=True).print(f"[red]error:[/] {escape(message)}", soft_wrap=True)
    raise typer.Exit(2)
