"""What to measure: the options of `mercer bench`, read and checked."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import own, parse
from ..dispatch.choose import BACKENDS, NAMES
from ..names import suggest
from .catalogue import KERNELS, build_filter, is_text, one_of_each_kind
from .peers import PEERS
from .workload import Workload

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
SHAPES = {"cpu": "1x4x1024x64", "cuda": "8x10x2048x128,4x16x8192x64,2x16x8192x128"}
DECODE = {"cpu": "1x4x32768x64", "cuda": "8x16x32768x128"}
# For each length, one kernel of each kind on every backend.
TUNE = {
    "cpu": "1x4x256x64,1x4x1024x64",
    "cuda": "8x16x512x64,8x16x2048x64,2x16x8192x64,8x16x512x128,8x16x2048x128,2x16x8192x128",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run of the bench."""

    device: torch.device
    dtype: str
    shapes: str
    filter: str
    kernels: tuple[str, ...]
    backends: tuple[str, ...]
    peers: tuple[str, ...]
    forward_only: bool
    decode: bool
    graph: bool
    tune: bool
    write: bool
    repeats: int | None
    save: bool
    output: Path | None

    @property
    def workloads(self) -> list[Workload]:
        return [
            Workload(
                batch=batch, heads=heads, group=heads // kv_heads, length=length, dim=dim,
                dtype=DTYPES[self.dtype], device=self.device, filter=self.filter,
                decode=self.decode,
            )
            for batch, heads, kv_heads, length, dim in _read_shapes(self.shapes)
        ]  # fmt: skip

    @property
    def command(self) -> str:
        """The command line that repeats this run, with all defaults written out."""
        words = ["mercer", "bench", "--device", str(self.device), "--dtype", self.dtype]
        words += ["--shapes", self.shapes, "--filter", self.filter]
        words += ["--kernels", _write(self.kernels, KERNELS)]
        words += ["--backends", ",".join(self.backends)]
        if not self.tune:
            words += ["--peers", _write(self.peers, PEERS)]
        if self.repeats is not None:
            words += ["--repeats", str(self.repeats)]
        flags = {"--decode": self.decode, "--graph": self.graph, "--tune": self.tune}
        flags |= {"--write": self.write, "--save": self.save}
        # A step of decoding has no backward.
        flags["--forward-only"] = self.forward_only and not self.decode
        words += [flag for flag, given in flags.items() if given]
        # An absolute path is of use on this machine only.
        if self.output is not None and not self.output.is_absolute():
            words += ["--output", str(self.output)]
        return shlex.join(words)

    @property
    def suffix(self) -> str:
        """The suffix of file names for settings that are not the default."""
        parts = [name for name in ("tune", "decode", "graph") if getattr(self, name)]
        parts += ["forward"] if self.forward_only and not self.decode else []
        parts += [self.filter.replace(":", "-")] if self.filter != "causal" else []
        return "".join(f"-{part}" for part in parts)


def read(
    *,
    device: torch.device,
    dtype: str | None = None,
    shapes: str | None = None,
    filter: str = "causal",
    kernels: str | None = None,
    backends: str | None = None,
    peers: str = "all",
    forward_only: bool = False,
    decode: bool = False,
    graph: bool = False,
    tune: bool = False,
    write: bool = False,
    repeats: int | None = None,
    save: bool = False,
    output: Path | None = None,
) -> Settings:
    """The settings of a run; raises ValueError for a wrong option."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    if dtype is None:
        dtype = "bfloat16" if kind == "cuda" else "float32"
    if dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if write and not tune:
        raise ValueError("--write saves the findings of --tune: it needs --tune")
    if graph and kind == "cpu":
        raise ValueError("--graph replays CUDA graphs: it needs a CUDA device")
    if repeats is not None and repeats < 1:
        raise ValueError(f"--repeats must be at least 1, got {repeats}")
    if output is not None and output.suffix in (".json", ".md"):
        output = output.with_suffix("")
    shapes = shapes or (TUNE if tune else DECODE if decode else SHAPES)[kind]
    _read_shapes(shapes)
    build_filter(filter)
    kernels = kernels or (",".join(one_of_each_kind()) if tune else "all")
    backends = backends or (",".join(BACKENDS) if tune else "auto")
    names = () if peers == "none" else _choose("--peers", peers, PEERS)
    return Settings(
        device=device, dtype=dtype, shapes=shapes, filter=filter,
        kernels=_choose("--kernels", kernels, tuple(KERNELS), texts=not tune),
        backends=_choose("--backends", backends, NAMES), peers=names,
        forward_only=forward_only or decode, decode=decode, graph=graph, tune=tune, write=write,
        repeats=repeats, save=save or output is not None, output=output,
    )  # fmt: skip


def _choose(
    option: str, text: str, known: tuple[str, ...], *, texts: bool = False
) -> tuple[str, ...]:
    """Names separated by commas, or all of them; with `texts`, also kernels such as RBF(2.0)."""
    if text == "all":
        return tuple(name for name in known if name != "auto")
    chosen = tuple(dict.fromkeys(name.strip() for name in _split(text)))
    for name in chosen:
        if texts and is_text(name):
            parse.kernel(name, own.sources(name))
        elif name not in known:
            raise ValueError(f"{option} has no {name!r}; {suggest(name, ('all', *known))}")
    return chosen


def _split(text: str) -> list[str]:
    """The parts between commas; a comma inside of parentheses belongs to a kernel."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign in "([") - (sign in ")]")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return parts


def _write(chosen: tuple[str, ...], known: object) -> str:
    everything = tuple(known) if isinstance(known, tuple | dict) else ()
    return "all" if chosen == everything else ",".join(chosen) or "none"


def _read_shapes(text: str) -> list[tuple[int, int, int, int, int]]:
    """Batch, heads, heads of keys, length and dimension of each."""
    shapes = []
    for shape in text.split(","):
        try:
            batch, both, length, dim = shape.strip().split("x")
            heads, slash, kv_heads = both.partition("/")
            kv_heads = kv_heads if slash else heads
            found = (int(batch), int(heads), int(kv_heads), int(length), int(dim))
        except ValueError:
            raise ValueError(
                "--shapes must be BxHxTxD such as 8x10x2048x128, or BxH/KxTxD with K key heads,"
                f" got {shape!r}"
            ) from None
        if min(found) < 1:
            raise ValueError(f"--shapes must have numbers of at least 1, got {shape!r}")
        if found[1] % found[2]:
            raise ValueError(
                "--shapes must have a number of key heads that divides the query heads,"
                f" got {shape!r}"
            )
        shapes.append(found)
    return shapes
