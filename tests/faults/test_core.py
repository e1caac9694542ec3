"""Attacks on the core: what is mutated, hidden, assigned or written as text must not be ignored.

A new case is one line of a table.
"""

import copy

import pytest
import torch

import mercer as mc

KEYS = 40


def draw(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(dtype)


def inputs(batch=2, keys=KEYS, width=8, dtype=torch.float32):
    return draw(3, batch, 2, keys, width, dtype=dtype).unbind()


# Filters of a batch: how one is made of a table, the table, and other contents of it.
IDS = torch.arange(2 * KEYS).view(2, KEYS)
TABLED = {
    "padding": (mc.Padding, torch.tensor([40, 40]), torch.tensor([5, 20])),
    "documents": (mc.Documents, IDS // 40, IDS // 7),
    "documents for all": (mc.Documents, IDS[:1] // 40, IDS[:1] // 7),
    "and": (lambda x: mc.Causal() & mc.Padding(x), torch.tensor([40, 40]), torch.tensor([5, 20])),
    "or": (lambda x: mc.Strided(9) | mc.Documents(x), IDS // 40, IDS // 7),
}
BACKENDS = ("auto", "reference", "chunked", "sdpa")


def tabled(name):
    make, before, after = TABLED[name]
    return make, before.clone(), after


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TABLED)
def test_a_filter_does_not_follow_the_tensor_it_was_made_of(name, backend):
    make, table, after = tabled(name)
    filter, q = make(table), inputs()
    want = mc.smooth(mc.RBF(), *q, filter=filter, backend=backend)
    table.copy_(after)
    assert torch.equal(mc.smooth(mc.RBF(), *q, filter=filter, backend=backend), want)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["padding", "documents"])
def test_a_filter_follows_what_is_written_to_its_own_table(name, backend, inference):
    make, table, after = tabled(name)
    with torch.inference_mode(inference):
        filter, q = make(table), inputs()
        mc.smooth(mc.RBF(), *q, filter=filter, backend=backend)
        same = copy.deepcopy(filter)
        for held in (filter, same):
            (held.lengths if name == "padding" else held.ids).copy_(after)
        want = mc.smooth(mc.RBF(), *q, filter=make(after), backend=backend)
        for held in (filter, same):
            assert torch.equal(mc.smooth(mc.RBF(), *q, filter=held, backend=backend), want)
        if name == "padding":
            filter.lengths.fill_(KEYS + 1)
            with pytest.raises(ValueError, match="from 0 to the 40 keys"):
                mc.smooth(mc.RBF(), *q, filter=filter, backend=backend)


@pytest.mark.parametrize("name", TABLED)
def test_filters_are_equal_where_their_contents_are(name):
    make, table, after = tabled(name)
    assert make(table) == make(table.clone())
    assert make(table) == make(table.int())
    assert len({make(table), make(table.clone()), make(table.int())}) == 1
    assert make(table) != make(after)
    assert len({make(table), make(after)}) == 2
    assert make(table) != mc.Causal()


def test_contents_that_cannot_be_read_are_compared_by_identity():
    filter = mc.Padding(torch.tensor([1, 2], device="meta"))
    assert filter == filter
    assert filter != mc.Padding(torch.tensor([1, 2], device="meta"))
    assert hash(filter) == hash(filter)


def test_compiled_functions_may_hold_a_filter_and_make_one():
    held, q = mc.Documents(IDS // 40), inputs()

    def run(lengths, *x):
        return mc.smooth(mc.Exponential(), *x, filter=held & mc.Padding(lengths))

    compiled = torch.compile(run, backend="eager", fullgraph=True)
    for ids, lengths in ((40, [40, 3]), (7, [1, 2])):
        held.ids.copy_(IDS // ids)
        given = (torch.tensor(lengths), *q)
        assert torch.allclose(compiled(*given), run(*given), atol=1e-6)


@pytest.mark.parametrize("table", [[1j, 2], [1.0, 2.0], [[[1]]], torch.ones(2, dtype=torch.cfloat)])
@pytest.mark.parametrize("make", [mc.Padding, mc.Documents])
def test_a_table_must_be_whole_numbers(make, table):
    with pytest.raises(ValueError, match="must be whole numbers"):
        make(table)


# Finite keys whose lifted numbers or products overflow: dtype, what key 7 holds, kernel.
HUGE = {
    "rbf, float16": (torch.float16, 730.0, lambda: mc.RBF()),
    "rbf per head, float16": (torch.float16, 730.0, lambda: mc.RBF([1.0, 30.0])),
    "largest, float16": (torch.float16, 65504.0, lambda: mc.RBF(300.0)),
    "product, float16": (torch.float16, 730.0, lambda: mc.RBF() * mc.Exponential()),
    "softmax, float32": (torch.float32, 1e38, lambda: mc.Exponential()),
    "rbf, float32": (torch.float32, 1e38, lambda: mc.RBF()),
    "softmax, bfloat16": (torch.bfloat16, 1e38, lambda: mc.Exponential()),
    "largest, bfloat16": (torch.bfloat16, 3.38e38, lambda: mc.RBF()),
}


def close(got, want, dtype):
    return torch.allclose(got.float(), want.float(), atol=16 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("mass", [False, True], ids=["out", "log_mass"])
@pytest.mark.parametrize("name", HUGE)
@torch.no_grad()
def test_a_huge_key_that_is_hidden_changes_nothing(name, mass):
    dtype, value, kernel = HUGE[name]
    q, k, v = inputs(1, width=64, dtype=dtype)
    k[:, :, 7] = value
    options = {"filter": mc.Padding([7]), "return_log_mass": mass}
    got = mc.smooth(kernel(), q, k, v, backend="sdpa", **options)
    want = mc.smooth(kernel(), q, k, v, backend="chunked", **options)
    for a, b in zip(got, want, strict=True) if mass else [(got, want)]:
        assert close(a, b, dtype)


# A number that is visible and does not fit float16: kernel, what is multiplied, the reason.
TOO_LARGE = {
    "key": (lambda: mc.RBF(), ("k", 800.0), "number of a key"),
    "scale": (lambda: mc.RBF(0.01), ("q", 1.0), "a scale"),
    "scale of a query": (lambda: mc.AdaptiveRBF(64, 0.01), ("q", 1.0), "a scale"),
    "no bandwidth left": (lambda: mc.RBF(1e-15), ("q", 1.0), "a (query times its )?scale"),
    "query": (lambda: mc.RBF(0.1), ("q", 9000.0), "a query times its scale"),
    "query of a product": (
        lambda: mc.Exponential(100.0) * mc.Exponential(1.0), ("q", 9000.0),
        "a query times its scale",
    ),
    "slope": (lambda: mc.Exponential() * mc.ALiBi([300.0, 1.0]), ("q", 1.0), "a scale"),
}  # fmt: skip


@pytest.mark.parametrize("filter", [mc.Causal(), mc.Causal() & mc.Window(3, 0)], ids=repr)
@pytest.mark.parametrize("name", TOO_LARGE)
@torch.no_grad()
def test_what_does_not_fit_float16_is_refused_with_its_reason(name, filter):
    kernel, (part, factor), reason = TOO_LARGE[name]
    q, k, v = inputs(1, width=64, dtype=torch.float16)
    q, k = (q * factor, k) if part == "q" else (q, k.sign() * factor)
    with pytest.raises(ValueError, match=f"'sdpa' cannot run this: .*{reason}.* float16"):
        mc.smooth(kernel(), q, k, v, filter=filter, backend="sdpa")
    assert mc.explain(kernel(), q, k, v, filter=filter).backend == "chunked"


@torch.no_grad()
def test_where_numbers_cannot_be_read_float16_is_refused_whatever_they_are(monkeypatch):
    x = inputs(1, dtype=torch.float16)
    assert mc.explain(mc.RBF(), *x).backend == "sdpa"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert "may not fit float16" in mc.explain(mc.RBF(), *x).refusals["sdpa"]
    assert mc.explain(mc.Exponential(), *x).backend == "sdpa"
    assert mc.explain(mc.Exponential() * mc.Exponential(0.5), *x).backend == "sdpa"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@torch.no_grad()
def test_what_is_not_finite_is_not_taken_for_a_large_number(bad):
    q, k, v = inputs(1, width=64, dtype=torch.float16)
    q[:, :, 3, 0], k[:, :, 5, 0] = bad, bad
    out = mc.smooth(mc.AdaptiveRBF(64), q, k, v, filter=mc.Window(2, 2), backend="sdpa")
    spoiled = out.isnan().all(-1)[0, 0]
    assert spoiled.nonzero().flatten().tolist() == [3, 4, 5, 6, 7]
    assert not out.isnan()[0, 0, ~spoiled].any()
