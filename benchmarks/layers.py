"""Whole layers against the standard one, forward and backward, in one run.

    python benchmarks/layers.py [--device cuda] [--tokens 16384] [--save]

The standard layer is three projections, torch's fastest softmax attention and the output's own.
Gaussian attention has the output projection alone. Its eager form, all distances written out, is
timed where it fits. Each row is checked against float64 on a short stretch before it is timed, and
times are medians of queued calls; by --graph, of replays of CUDA graphs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mercer.bench.clock import Clock
from mercer.bench.machine import describe, device_name, slug
from mercer.nn import GaussianAttention

RESULTS = Path(__file__).parent.parent / "results" / "layers"
D_MODEL, HEADS = 1280, 10


class Standard(nn.Module):
    """Softmax attention as most models have it."""

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
    """Gaussian attention on a short stretch, against its eager form in float64."""
    if not isinstance(layer, GaussianAttention):
        return
    x = torch.randn(2, 256, D_MODEL, device=device, dtype=dtype)
    wide = GaussianAttention(D_MODEL, HEADS).to(device).double()
    wide.load_state_dict({name: p.double() for name, p in layer.state_dict().items()})
    want = Eager(wide)(x.double())
    error = (layer(x).double() - want).norm() / want.norm()
    if not error < 0.02:
        raise SystemExit(f"GaussianAttention is off by {error:.1e}")


def measure(layer: nn.Module, x: Tensor, clock: Clock) -> dict[str, float | str]:
    steer = torch.randn_like(x)
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


def table(lengths: list[int], tokens: int, run: Callable[[int], dict[str, dict]]) -> list[dict]:
    found = []
    for length in lengths:
        print(f"\n{max(1, tokens // length)} x {length} tokens, d_model {D_MODEL}, {HEADS} heads")
        results = run(length)
        yardstick = results["standard: projections, SDPA"]["forward_backward_ms"]
        for name, row in results.items():
            if "problem" in row:
                print(f"  {name:30s} {row['problem']}")
            else:
                row["speed"] = yardstick / row["forward_backward_ms"]
                print(
                    f"  {name:30s} {row['forward_ms']:8.3f} ms {row['forward_backward_ms']:8.3f} ms"
                    f"  {row['speed']:6.2f} of the standard layer's speed"
                )
            found.append({"length": length, "name": name, **row})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=16384, help="in a batch")
    parser.add_argument("--lengths", default="2048,8192")
    parser.add_argument("--graph", action="store_true", help="time replays of CUDA graphs")
    parser.add_argument("--save", action="store_true", help="write results/layers/DEVICE.json")
    options = parser.parse_args()
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    clock = Clock(device, graph=options.graph)

    def run(length: int) -> dict[str, dict]:
        batch = max(1, options.tokens // length)
        x = torch.randn(batch, length, D_MODEL, device=device, dtype=dtype, requires_grad=True)
        found = {}
        for name, layer in rows(device, dtype).items():
            check(layer, device, dtype)
            if isinstance(layer, Eager) and length > 2048:
                continue
            found[name] = measure(layer, x, clock)
        return found

    lengths = [int(length) for length in options.lengths.split(",")]
    results = table(lengths, options.tokens, run)
    if options.save:
        RESULTS.mkdir(parents=True, exist_ok=True)
        flag = " --graph" if options.graph else ""
        command = f"python benchmarks/layers.py --device {device.type} --tokens {options.tokens}"
        about = {"command": f"{command} --lengths {options.lengths}{flag} --save"}
        about |= describe(device) | {"dtype": str(dtype), "graph": options.graph, "rows": results}
        name = slug(device_name(device)) + ("-graph" if options.graph else "")
        (RESULTS / f"{name}.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
