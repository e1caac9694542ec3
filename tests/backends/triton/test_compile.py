"""Every fused kernel compiles with the installed Triton, for GPUs that need not be present.

A case compiles what a forward and its gradients start; together they have all kernels, and each way
through their sources that is chosen by a constant. benchmarks/hazards.py reads what is compiled.
"""

import ast
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

import mercer as mc
from mercer import backends
from mercer.backends.tokenwise import lookup
from mercer.backends.triton import layout, numbers
from mercer.backends.triton.backend import INSTALLED, INTERPRETED
from mercer.backends.triton.hopper import eligible, launch
from mercer.testing.compiling import compiled

pytestmark = [
    pytest.mark.skipif(not INSTALLED, reason="needs Triton, which is not installed"),
    pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter compiles nothing"),
    # Triton says which default it will change.
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning"),
]
LENGTH, HEADS = 300, 2
CAUSAL = mc.Causal()
FORWARD, QUERIES, KEYS = "triton.forward", "triton.backward_queries", "triton.backward_keys"


@dataclass(frozen=True)
class Call:
    """One call, and the kernels that it must launch on every GPU, on Hopper, and on others."""

    kernel: Callable[[], mc.Kernel]
    starts: set[str] = field(default_factory=set)
    hopper: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)
    filter: mc.Filter = CAUSAL
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    queries: int = LENGTH
    keys: int = LENGTH
    learns: bool = True
    dropout: float = 0.0
    backend: str = "triton"
    # Gradients of queries are summed on Hopper where they see so many keys.
    many: float = math.inf
    # What is alike for all GPUs, or close to another case, is compiled for one.
    on: tuple[int, ...] = (90, 80)


def _rows(count, dim):
    return torch.nn.Parameter(torch.randn(count, dim))


def _rbf():
    return mc.RBF([8.0, 11.0])


def _adaptive(dim):
    return lambda: mc.AdaptiveRBF(dim, heads=HEADS)


def _two():
    return mc.Exponential() * mc.Exponential(on="position")


def _table(count, dim=64):
    return lambda: mc.Exponential() * mc.Lookup(_rows(count, dim))


def _buckets():
    return mc.Exponential() * mc.Buckets(_rows(HEADS, 32).T.contiguous())


def _slopes():
    return mc.Exponential() * mc.ALiBi(mc.ALiBi.standard(HEADS))


def _slopes_learned():
    return mc.Exponential() * mc.ALiBi(torch.nn.Parameter(mc.ALiBi.standard(HEADS)))


HOPPER, AMPERE = (90,), (80,)
ALL = {FORWARD, QUERIES, KEYS}
SUMS = {"hopper.before_sums", "hopper.backward_keys", "hopper.after_sums"}
STORES = {"hopper.forward", "hopper.backward_keys", "triton.deltas"}
BANDS = {"triton.halves", "triton.spread", "triton.band_to_queries", "triton.band_to_rows"} | {
    "triton.sum_rows"
}
NAMES = (
    "prepare",
    "build",
    "scan",
    "forward",
    "prepare_backward",
    "backward_queries",
    "backward_keys",
)
STATES = {f"polynomial.{name}" for name in NAMES}
DOCUMENTS = mc.Documents(torch.arange(LENGTH).div(90, rounding_mode="floor").expand(1, -1))
DECODING = {"queries": 1, "keys": 2048, "learns": False}
CALLS = {
    "softmax": Call(mc.Exponential, ALL, dim=32, filter=mc.Window(70, 30), on=HOPPER),
    "window": Call(
        mc.Exponential, {FORWARD, QUERIES}, {"hopper.backward_keys"}, filter=mc.Window(70, 30),
        on=HOPPER,
    ),
    "rbf": Call(_rbf, ALL | {"triton.half_norms", "triton.sum_to_scale"}, dim=32, on=AMPERE),
    "rbf-sums": Call(_rbf, {FORWARD}, SUMS, many=1, on=HOPPER),
    "rbf-stores": Call(
        _rbf, {"triton.half_norms", "triton.sum_to_scale"}, STORES | {"hopper.stored_to_queries"},
        dim=128, on=HOPPER,
    ),
    "adaptive": Call(_adaptive(64), {"triton.steer", "triton.steer_backward"}, filter=DOCUMENTS),
    "adaptive-sums": Call(_adaptive(64), {FORWARD}, SUMS, many=1, on=HOPPER),
    "adaptive-stores": Call(
        _adaptive(128), set(), STORES | {"hopper.stored_to_queries"}, dim=128, on=HOPPER,
    ),
    "slopes": Call(_slopes, {"triton.split_columns"}, dim=128, on=HOPPER),
    "slopes-learned": Call(
        _slopes_learned, {FORWARD, QUERIES}, {"hopper.backward_keys"}, many=1, on=HOPPER,
    ),
    "product": Call(
        _two, {FORWARD}, {"hopper.stored_to_queries", "hopper.stored_to_keys"}, dim=128,
        on=HOPPER,
    ),
    "two-links": Call(
        lambda: mc.Matern(2.5, 8.0) * mc.RationalQuadratic(on="position"), ALL, dim=32, on=HOPPER,
    ),
    "two-distances": Call(lambda: mc.RBF(8.0) * mc.RBF(9.0, on="position"), ALL, dim=32, on=AMPERE),
    "table-of-all": Call(
        _table(1201), BANDS, {"triton.deltas", "hopper.backward_keys"}, queries=600, keys=600,
        on=HOPPER,
    ),
    "table-far": Call(
        _table(33, 32), BANDS | {"triton.merge_far"}, queries=8192, keys=8192, dim=32,
    ),
    # With num_keys = 1 as a constant, ptxas crashed on what Triton 3.6 made of it.
    "table-one-pair": Call(_table(33, 128), {FORWARD}, queries=1, keys=1, dim=128, on=HOPPER),
    "table-per-head": Call(
        _buckets, {"triton.band_to_table"}, filter=mc.Window(60, 20), dim=32,
    ),
    "polynomial": Call(mc.Polynomial, ALL, on=HOPPER),
    "states": Call(
        mc.Polynomial, STATES, backend="linear", queries=4500, keys=4500,
    ),
    "float32": Call(
        lambda: mc.Laplace(8.0), ALL, dtype=torch.float32, dim=16, on=AMPERE,
    ),
    "dropout": Call(_slopes, ALL, dropout=0.1, dim=32, on=AMPERE),
    "decoding": Call(lambda: mc.RBF(8.0), {FORWARD, "triton.merge"}, **DECODING),
    "decoding-table": Call(_table(33), {FORWARD, "triton.spread"}, **DECODING),
    "decoding-sum": Call(lambda: mc.RBF(8.0) + mc.Exponential(), {FORWARD}, **DECODING, on=HOPPER),
}  # fmt: skip


def start(call):
    """Forward and backward."""
    torch.manual_seed(0)
    kernel = call.kernel()

    def drawn(length):
        x = torch.randn(1, HEADS, length, call.dim, dtype=call.dtype)
        return x.requires_grad_(call.learns)

    q, k = (
        mc.Features(**{name: drawn(length) for name in {"content", *parts}})
        for length, parts in ((call.queries, kernel.query_parts), (call.keys, kernel.key_parts))
    )
    v = drawn(call.keys)
    with torch.set_grad_enabled(call.learns):
        out = mc.smooth(
            kernel, q, k, v, filter=call.filter, backend=call.backend, dropout_p=call.dropout
        )
    if call.learns:
        wanted = [x for _, x in (*q.items(), *k.items())] + [v, *kernel.parameters()]
        torch.autograd.grad(out.float().square().sum(), wanted, allow_unused=True)


@pytest.mark.parametrize(
    ("name", "capability"), [(name, on) for name, call in CALLS.items() for on in call.on]
)
def test_calls_compile(name, capability, monkeypatch):
    call, started = CALLS[name], set()
    if call.hopper == SUMS and not eligible.can_add():
        pytest.skip("this Triton does not let TMA add to memory")
    monkeypatch.setattr(eligible, "MANY_KEYS", call.many)
    with compiled(capability, lambda kernel, _: started.add(kernel)):
        start(call)
    missing = call.starts | (call.hopper if capability == 90 else call.others)
    assert missing <= started, f"started {sorted(started)}"


# What other functions start.
TOKENWISE = ("kernels", "convolve", "merge", "pulls", "backward", "kernels_backward")
LOOKUPS = ("clear", "scatter", "gathered")
OTHERS = {"triton.turn", *(f"tokenwise.{name}" for name in (*TOKENWISE, *LOOKUPS))}


@pytest.mark.parametrize("capability", [90, 80])
def test_other_functions_compile(capability):
    started = set()

    def drawn(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, dtype=dtype).requires_grad_()

    with compiled(capability, lambda kernel, _: started.add(kernel)):
        x = torch.randn(1, HEADS, LENGTH, 64, dtype=torch.bfloat16)
        numbers.turn(x, torch.randn(32), 1.0)
        for length, boundary in ((9, "shrink"), (LENGTH, "shrink"), (LENGTH, "truncate")):
            q, k, v = (drawn(1, HEADS, length, 64) for _ in range(3))
            taps = [drawn(1, length, HEADS, 3, dtype=torch.float32) for _ in range(2)]
            out = mc.vicinity(q, k, v, key_taps=taps[0], value_taps=taps[1], boundary=boundary)
            torch.autograd.grad(out.float().square().sum(), [q, k, v, *taps])
        table = drawn(50, 2, HEADS, 3, dtype=torch.float32)
        found = lookup.gather(table, torch.randint(50, (1, LENGTH)))
        torch.autograd.grad(sum(x.square().sum() for x in found), [table])
    assert started >= OTHERS, f"started {sorted(started)}"


def entries():
    """All kernels that are launched: those without a leading underscore."""
    for path in sorted(Path(backends.__file__).parent.rglob("*.py")):
        if "kernels" in (path.stem, path.parent.name):
            folder = path.parent.parent if path.parent.name == "kernels" else path.parent
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                    yield f"{folder.name}.{node.name}"


@pytest.mark.parametrize("capability", [90, 80])
def test_no_kernel_is_left_out(capability):
    known = set(OTHERS)
    for call in CALLS.values():
        if capability in call.on:
            known |= call.starts | (call.hopper if capability == 90 else call.others)
    expected = set(entries())
    if capability < 90:
        # Only a GPU with TMA stores the gradients of all pairs, and only Hopper reads columns.
        expected = {x for x in expected if "hopper" not in x}
        expected -= {"triton.deltas", "triton.split_columns"}
    assert expected == known


def test_descriptors_are_what_their_constructors_make():
    x = torch.zeros(2, 3, 128, 64, dtype=torch.bfloat16)
    given = x, list(x.shape), list(x.stride()), [1, 1, 64, 64]
    portable, gluon = layout.tma_descriptor(x, 64, 64), launch._of(x)
    for found, made in (
        (portable, type(portable)(*given)),
        (gluon, type(gluon)(*given, layout=gluon.layout)),
    ):
        assert {name: getattr(found, name) for name in vars(made)} == vars(made)
