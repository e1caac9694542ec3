"""Whole layers against the standard one, forward and backward, in one run.

    python benchmarks/layers.py [--device cuda] [--tokens 16384] [--save]

The standard layer is three projections, torch's fastest softmax attention and the output's own.
Gaussian attention has the output projection alone. Its eager form, all distances written out, is
timed where it fits, and it is checked against that form in float64 on a short sequence before it is
timed. Token kernels, of 50257 tokens and size 3, are timed beside plain attention on the same
queries, keys and values, and checked against the dense reference. Times are medians of queued
calls; by --graph, of replays of CUDA graphs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mercer as mc
from mercer.bench.clock import Clock
from mercer.bench.machine import describe, device_name, slug
from mercer.nn import GaussianAttention, TokenKernels

RESULTS = Path(__file__).parent.parent / "results" / "layers"
D_MODEL, HEADS = 1280, 10


class Standard(nn.Module):
    """Standard softmax attention."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


class Eager(nn.Module):
    """Gaussian attention with all distances written out."""

    def __init__(self, layer: GaussianAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (self.layer.num_heads, -1)).transpose(1, 2)
        square = torch.cdist(heads.float(), heads.float()).square()
        weight = torch.exp(-square / (2 * self.layer.bandwidth[:, None, None] ** 2)).tril()
        out = (weight / weight.sum(-1, keepdim=True)).to(x.dtype) @ heads
        return self.layer.out(out.transpose(1, 2).flatten(2))


def rows(device: torch.device, dtype: torch.dtype) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    gaussian = GaussianAttention(D_MODEL, HEADS).to(device)
    gaussian.out.to(dtype)
    return {
        "standard: projections, SDPA": Standard(D_MODEL, HEADS).to(device, dtype),
        "GaussianAttention": gaussian,
        "the same, eager": Eager(gaussian),
    }


def check(layer: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Compare Gaussian attention on a short sequence with its eager form in float64."""
    if not isinstance(layer, GaussianAttention):
        return
    x = torch.randn(2, 256, D_MODEL, device=device, dtype=dtype)
    wide = GaussianAttention(D_MODEL, HEADS).to(device).double()
    wide.load_state_dict({name: p.double() for name, p in layer.state_dict().items()})
    want = Eager(wide)(x.double())
    error = (layer(x).double() - want).norm() / want.norm()
    if not error < 0.02:
        raise SystemExit(f"GaussianAttention is off by {error:.1e}")


def measure(
    layer: nn.Module, x: Tensor, clock: Clock, like: Tensor | None = None
) -> dict[str, float | str]:
    steer = torch.randn_like(x if like is None else like)
    wanted = [x, *layer.parameters()]

    def forward() -> None:
        with torch.no_grad():
            layer(x)

    def both() -> None:
        torch.autograd.grad(layer(x), wanted, steer)

    try:
        found: dict[str, float | str] = {"forward_ms": clock.median(forward)}
        found["forward_backward_ms"] = clock.median(both)
    except torch.OutOfMemoryError:
        return {"problem": "out of memory"}
    peak = clock.peak(both)
    return found if peak is None else found | {"memory_mib": peak / 2**20}


class Tokens(nn.Module):
    """Softmax attention with token kernels, without projections."""

    def __init__(self, on: str, ids: Tensor) -> None:
        super().__init__()
        self.kernels = TokenKernels(50257, 3, on=on).to(ids.device) if on else None
        self.ids = ids

    def forward(self, x: Tensor, backend: str = "auto") -> Tensor:
        q, k, v = x.unbind()
        if self.kernels is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        whole = self.ids.shape == (len(q), q.shape[2])
        taps = self.kernels(self.ids if whole else self.ids[: len(q), : q.shape[2]])
        options = {"normalize": self.kernels.temperature, "boundary": self.kernels.boundary}
        return mc.vicinity(
            q, k, v, key_taps=taps.keys, value_taps=taps.values, backend=backend, **options
        )


def token_rows(
    shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype, clock: Clock
) -> dict[str, dict]:
    batch, _, length, dim = shape
    ids = torch.randint(50257, (batch, length), device=device)
    found = {}
    for name, on in (("plain", ""), ("kernels on values", "v"), ("on keys and values", "kv")):
        layer = Tokens(on, ids)
        if on:
            short = torch.randn(3, 1, 2, 64, dim, device=device, dtype=dtype)
            # A graph that stays alive would tie its leaves to the stream it was made in.
            with torch.no_grad():
                want = layer(short, backend="reference").double()
                error = (layer(short).double() - want).norm() / want.norm()
            if not error < 0.02:
                raise SystemExit(f"token {name} are off by {error:.1e}")
        x = torch.randn(3, *shape, device=device, dtype=dtype, requires_grad=True)
        found[name] = measure(layer, x, clock, x[0].detach())
    return found


def table(titles: list[str], run: Callable[[str], dict[str, dict]]) -> list[dict]:
    """The rows of each title, printed at once; the first row is the yardstick."""
    found = []
    for title in titles:
        print(f"\n{title}")
        results = run(title)
        yardstick = next(iter(results.values()))["forward_backward_ms"]
        for name, row in results.items():
            if "problem" in row:
                print(f"  {name:30s} {row['problem']}")
            else:
                row["speed"] = yardstick / row["forward_backward_ms"]
                print(
                    f"  {name:30s} {row['forward_ms']:8.3f} ms {row['forward_backward_ms']:8.3f} ms"
                    f"  {row['speed']:6.2f} of the first row's speed"
                )
            found.append({"shape": title, "name": name, **row})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=16384, help="in a batch")
    parser.add_argument("--lengths", default="2048,8192", help="for Gaussian attention")
    parser.add_argument("--shapes", default="8x12x1024x64,4x16x8192x64", help="for token kernels")
    parser.add_argument("--graph", action="store_true", help="time replays of CUDA graphs")
    parser.add_argument("--save", action="store_true", help="write results/layers/DEVICE.json")
    options = parser.parse_args()
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    clock = Clock(device, graph=options.graph)

    def run(title: str) -> dict[str, dict]:
        if "x" in title.split(" ")[0]:
            batch, heads, length, dim = map(int, title.split(" ")[0].split("x"))
            return token_rows((batch, heads, length, dim), device, dtype, clock)
        length = int(title.split(" ")[0])
        batch = max(1, options.tokens // length)
        x = torch.randn(batch, length, D_MODEL, device=device, dtype=dtype, requires_grad=True)
        found = {}
        for name, layer in rows(device, dtype).items():
            check(layer, device, dtype)
            if isinstance(layer, Eager) and length > 2048:
                continue
            found[name] = measure(layer, x, clock)
        return found

    titles = [f"{n} places of {D_MODEL} in {HEADS} heads" for n in options.lengths.split(",")]
    titles += [f"{shape} with token kernels" for shape in options.shapes.split(",")]
    results = table(titles, run)
    if options.save:
        RESULTS.mkdir(parents=True, exist_ok=True)
        flag = " --graph" if options.graph else ""
        command = f"python benchmarks/layers.py --device {device.type} --tokens {options.tokens}"
        sizes = f"--lengths {options.lengths} --shapes {options.shapes}"
        about = {"command": f"{command} {sizes}{flag} --save"}
        about |= describe(device) | {"dtype": str(dtype), "graph": options.graph, "rows": results}
        name = slug(device_name(device)) + ("-graph" if options.graph else "")
        (RESULTS / f"{name}.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
