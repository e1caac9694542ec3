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


def test_a_filter_that_a_compiled_function_reads_may_be_written_to():
    filter, q = mc.Padding([40, 40]), inputs()
    run = torch.compile(
        lambda *x: mc.smooth(mc.Exponential(), *x, filter=filter), backend="eager", fullgraph=True
    )
    run(*q)
    filter.lengths.copy_(torch.tensor([5, 20]))
    want = mc.smooth(mc.Exponential(), *q, filter=mc.Padding([5, 20]))
    assert torch.allclose(run(*q), want, atol=1e-6)


def test_a_compiled_function_may_make_a_filter():
    def run(lengths, ids, *x):
        return mc.smooth(mc.Exponential(), *x, filter=mc.Padding(lengths) & mc.Documents(ids))

    compiled = torch.compile(run, backend="eager", fullgraph=True)
    for lengths in ([40, 3], [1, 2]):
        given = (torch.tensor(lengths), IDS // 7, *inputs())
        assert torch.allclose(compiled(*given), run(*given), atol=1e-6)


@pytest.mark.parametrize("table", [[1j, 2], [1.0, 2.0], [[[1]]], torch.ones(2, dtype=torch.cfloat)])
@pytest.mark.parametrize("make", [mc.Padding, mc.Documents])
def test_a_table_must_be_whole_numbers(make, table):
    with pytest.raises(ValueError, match="must be whole numbers"):
        make(table)
