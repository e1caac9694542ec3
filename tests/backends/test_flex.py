"""FlexAttention: the same numbers as every backend, and never uncompiled.

On a CPU the graphs run without code generation, which needs no C++ compiler and no special machine.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from catalogue import COMPOSED, DIM, FILTERS, KERNELS

import mercer as mc
from mercer.backends.flex import compiled
from mercer.testing import Shape, inputs
from mercer.testing.cases import Case, double, rounding_of

ALL = KERNELS | COMPOSED
GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not GPU, reason="torch has this on CUDA only")


@dataclass(frozen=True)
class Odd(mc.filters.Filter):
    """A filter that no other fast backend supports: odd keys, and the diagonal."""

    step: int = 2

    def sees(self, b, i, j, start):
        return (j <= i) & ((j % self.step == 1) | (i == j))


MANY = mc.Window(0, 0) | mc.Strided(5) | mc.Fixed(4, 1) | mc.Window(2, 1) | mc.Memory(3)


@pytest.fixture
def device():
    return "cuda" if GPU else "cpu"


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    monkeypatch.setattr(compiled, "COMPILER", "inductor" if GPU else "aot_eager")


@pytest.fixture
def fresh(monkeypatch):
    """Nothing compiled before."""
    monkeypatch.setattr(compiled, "structures", {})


def random(*shape, device, dtype=torch.float32):
    return torch.randn(*shape, device=device, dtype=dtype)


def compare(kernel, filter, shape, device, dim=DIM, dtype=torch.float32, *, log_mass=False):
    """The output within the error budget, and -inf in the same places."""
    case = Case(kernel.to(device), filter, shape, dim, 0, dtype, device)
    results = []
    for backend, wide in (("flex", False), ("reference", False), ("reference", True)):
        kernel = double(case.kernel) if wide else case.kernel
        q, k, v = case.inputs(wide=wide)
        options = {"filter": filter, "backend": backend, "return_log_mass": log_mass}
        with torch.no_grad():
            got = mc.smooth(kernel, q, k, v, **options)
        results.append(got if log_mass else (got,))
    for got, plain, want in zip(*results, strict=True):
        assert torch.equal(got.isneginf(), want.isneginf())
        finite = want.isfinite()
        error, usual = ((x.double() - want)[finite].norm().item() for x in (got, plain))
        budget = 2 * usual + rounding_of(case) * want[finite].norm().item()
        assert error <= budget, f"off by {error:.1e}, more than {budget:.1e}"


# Signed weights and sums have no place here; a sum needs log_mass, which CUDA alone gives.
TAKEN = sorted(
    set(ALL)
    - {"linear", "exponential+linear", "rational*exponential", "polynomial*laplace", "nested"}
    - {"spectral"}
    - (set() if GPU else {"rbf+polynomial", "mixture"})
)


@pytest.mark.parametrize("name", TAKEN)
def test_every_kernel_of_one_dot_product(name, device):
    compare(ALL[name](), mc.Causal(), Shape(queries=7, keys=11), device)


@pytest.mark.parametrize("name", FILTERS)
def test_every_filter(name, device):
    compare(mc.RBF(), FILTERS[name](), Shape(queries=11, keys=11), device)


@pytest.mark.parametrize("filter", [Odd(), Odd(3) | mc.Window(2, 0), MANY], ids=repr)
def test_filters_that_no_fused_kernel_takes(filter, device):
    compare(mc.Exponential(), filter, Shape(queries=150, keys=300), device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["rbf-per-head", "adaptive", "laplace", "lookup*buckets*alibi"])
def test_half_precision(name, dtype, device):
    compare(ALL[name](), mc.Causal(), Shape(queries=19, keys=19), device, dtype=dtype)


@pytest.mark.parametrize(("dim", "values"), [(3, 1), (40, 24), (128, 64)])
def test_widths(dim, values, device):
    compare(mc.RBF(dim**0.5), mc.Causal(), Shape(queries=33, keys=33, values=values), device, dim)


def test_a_number_per_key_is_not_rounded(device):
    """Keys that differ in their norm alone, by less than bfloat16 tells apart."""
    q = torch.zeros(1, 1, 1, 2, dtype=torch.bfloat16, device=device)
    k = torch.tensor([[16.0, 0.0], [16.0, 1.0]], dtype=torch.bfloat16, device=device)[None, None]
    v = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.bfloat16, device=device)[None, None]
    with torch.no_grad():
        out = mc.smooth(mc.RBF(1.0).to(device), q, k, v, backend="flex")
    # weights exp(-128) and exp(-128.5); in bfloat16 both would be exp(-128)
    assert abs(out[0, 0, 0, 0].item() - 1 / (1 + math.exp(0.5))) < 4e-3


@pytest.mark.parametrize("heads", [1, 2, 6])
def test_grouped_heads(heads, device):
    q = random(2, 6, 9, 16, device=device)
    k, v = (random(2, heads, 9, 16, device=device) for _ in range(2))
    got = mc.smooth(mc.Exponential(), q, k, v, backend="flex")
    assert (got - mc.smooth(mc.Exponential(), q, k, v, backend="reference")).abs().max() < 1e-5


@needs_gpu
@pytest.mark.parametrize("filter", ["causal", "padding", "either"])
def test_log_mass(filter, device):
    shape = Shape(queries=11, keys=11)
    compare(mc.RBF(), FILTERS[filter](), shape, device, log_mass=True)


@needs_gpu
@pytest.mark.parametrize("filter", [mc.Causal(), Odd(), MANY], ids=repr)
@pytest.mark.parametrize("name", ["exponential", "cosine", "eq-9", "relative-sinusoid"])
def test_gradients(name, filter, device):
    case = Case(
        ALL[name]().to(device), filter, Shape(queries=70, keys=150), 16, 0, torch.float32, device
    )
    got, plain = (case.run(backend, log_mass=True) for backend in ("flex", "reference"))
    for what, want in case.run("reference", log_mass=True, wide=True).items():
        finite = want.isfinite()
        error, usual = ((x[what] - want)[finite].norm().item() for x in (got, plain))
        budget = 2 * usual + rounding_of(case) * want[finite].norm().item()
        assert error <= budget, f"{what}: off by {error:.1e}, more than {budget:.1e}"


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("filter", ["full", "causal", "window", "padding"])
def test_nan_reaches_the_rows_that_see_it_and_no_other(which, filter, device):
    tensors = {name: random(2, 2, 11, 4, device=device) for name in "qkv"}
    tensors[which][0, 1, 6, 2] = math.nan
    mask = FILTERS[filter]().mask(11, 11, device).expand(2, 2, 11, 11)
    want = torch.zeros(2, 2, 11, dtype=torch.bool, device=device)
    want[0, 1] = mask[0, 1, :, 6] if which != "q" else torch.arange(11, device=device) == 6
    out = mc.smooth(mc.Exponential(), *tensors.values(), filter=FILTERS[filter](), backend="flex")
    assert torch.equal(out.isnan().all(-1), want)
    assert torch.equal(out.isnan().any(-1), want)


def refusal(kernel, device, *, dim=16, length=8, dtype=torch.float32, grad=False, **options):
    q, k, v = inputs(kernel, Shape(queries=length, keys=length), dim, dtype, device=device)
    for x in (*q.tensors(), *k.tensors(), v):
        x.requires_grad_(grad)
    return mc.explain(kernel.to(device), q, k, v, backend="chunked", **options).refusals["flex"]


def test_every_refusal_has_its_reason(device):
    with torch.no_grad():
        assert "negative" in refusal(mc.Linear(signed=True), device)
        assert "one dot product" in refusal(mc.Polynomial() * mc.Exponential(), device)
        assert "more than 256" in refusal(mc.Exponential(), device, dim=300)
        assert "float64" in refusal(mc.Exponential(), device, dtype=torch.float64)
        assert "empty" in refusal(mc.Exponential(), device, length=0)
        assert "no dropout" in refusal(mc.Exponential(), device, dropout_p=0.1)
        if device == "cpu":
            assert "log_mass" in refusal(mc.Exponential(), device, return_log_mass=True)


@pytest.mark.parametrize("name", ["rbf", "adaptive", "laplace", "buckets", "alibi", "lookup"])
def test_a_captured_tensor_needs_no_gradient(name, device):
    assert "by atomics" in refusal(KERNELS[name](), device, dim=DIM, filter=mc.Causal(), grad=True)
    with torch.no_grad():
        said = refusal(KERNELS[name](), device, dim=DIM, filter=mc.Causal(), grad=True)
    assert "could run" in said


def test_gradients_that_torch_does_not_have(device):
    if device == "cpu":
        assert "no backward" in refusal(mc.Exponential(), device, grad=True)
        return
    assert "where s = 0" in refusal(mc.Polynomial(), device, grad=True)
    torch.use_deterministic_algorithms(True)
    assert "same bits" in refusal(mc.Exponential(), device, grad=True)


@pytest.mark.usefixtures("fresh")
def test_other_lengths_do_not_compile_again(device):
    for length in range(20, 120, 5):
        q = random(2, 2, length, 16, device=device)
        mc.smooth(mc.Exponential(), q, q, q, filter=mc.Window(length // 2, 0), backend="flex")
    (only,) = compiled.structures.values()
    entries = torch._dynamo.eval_frame._debug_get_cache_entry_list
    assert len(entries(only.function._torchdynamo_orig_callable)) <= 3


@pytest.mark.usefixtures("fresh")
def test_past_the_limit_it_raises_and_then_refuses(device, monkeypatch):
    monkeypatch.setattr(compiled, "VARIANTS", 2)

    def run(*shapes):
        for batch, length in shapes:
            q = random(batch, 2, length, 16, device=device)
            mc.smooth(mc.Exponential(), q, q, q, filter=mc.Causal(), backend="flex")

    run((2, 40))
    with pytest.raises(RuntimeError, match=r"compiled 2 times.*name another backend"):
        # other numbers of blocks, and a batch of one: each needs code of its own
        run((2, 50), (2, 300), (1, 40), (1, 300), (1, 1))
    q = random(3, 2, 777, 16, device=device)
    said = mc.explain(mc.Exponential(), q, q, q, filter=mc.Causal())
    assert said.backend != "flex"
    assert "compiled 2 times" in said.refusals["flex"]
    with pytest.raises(ValueError, match="not for this shape"):
        mc.smooth(mc.Exponential(), q, q, q, filter=mc.Causal(), backend="flex")
    # what was compiled still runs, and another structure has a limit of its own
    run((2, 40))
    mc.smooth(mc.Exponential(), q, q, q, filter=Odd(), backend="flex")


@pytest.mark.usefixtures("fresh")
def test_what_torch_cannot_compile_is_one_sentence(device, monkeypatch):
    def fails(graph, inputs):
        raise AssertionError("no such buffer")

    monkeypatch.setattr(compiled, "COMPILER", fails)
    q = random(1, 2, 40, 16, device=device)
    with pytest.raises(RuntimeError, match=r"another backend than 'flex'\. It said.*no such"):
        mc.smooth(mc.Exponential(), q, q, q, filter=Odd(), backend="flex")


@pytest.mark.usefixtures("fresh")
def test_it_never_runs_uncompiled(device):
    q = random(1, 2, 40, 16, device=device)
    with torch.compiler.set_stance("force_eager"), pytest.raises(RuntimeError, match="all pairs"):
        mc.smooth(mc.Exponential(), q, q, q, filter=mc.Causal(), backend="flex")


def test_inside_torch_compile_it_refuses(device, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert "inside torch.compile" in refusal(mc.Exponential(), device)


def test_auto_takes_it_on_a_gpu_for_filters_that_others_refuse(device):
    q = random(1, 2, 2048, 16, device=device)
    with torch.no_grad():
        for filter in (Odd(), MANY):
            said = mc.explain(mc.Laplace(4.0).to(device), q, q, q, filter=filter)
            assert said.backend == ("flex" if GPU else "chunked")
        assert mc.explain(mc.Exponential(), q, q, q, filter=mc.Causal()).backend != "flex"
    # its numbers per key and query need gradients here
    said = mc.explain(mc.Laplace(4.0).to(device), q, q, q, filter=Odd())
    assert said.backend == "chunked"


def test_memory_is_linear_in_the_length(device):
    def memory(length):
        x = torch.zeros(1, 2, length, 16, device=device)
        return mc.explain(mc.RBF().to(device), x, x, x, filter=Odd(), backend="flex").memory

    with torch.no_grad():
        assert 1 < memory(8192) / memory(4096) <= 2.1


def test_the_block_mask_of_a_long_filter_is_kept(device):
    q = random(1, 1, 20, 16, device=device)
    masks = []
    for _ in range(2):
        mc.smooth(mc.Exponential(), q, q, q, filter=Odd(7), backend="flex")
        masks.append(next(reversed(compiled.masks.values())))
    assert masks[0] is masks[1]
    assert len(compiled.masks) <= compiled.MASKS


@pytest.mark.skipif(
    not GPU and not torch.cpu._is_avx2_supported(),
    reason="torch generates this code for CUDA, and on CPU with AVX2",
)
@pytest.mark.usefixtures("fresh")
def test_the_generated_code(device, monkeypatch):
    monkeypatch.setattr(compiled, "COMPILER", "inductor")
    # Lengths change, as those of texts do.
    for queries, keys in ((40, 60), (44, 70)):
        compare(mc.RBF(), Odd(), Shape(queries=queries, keys=keys), device)
