"""Token kernels where places are said: a tap reads the key at its place + d."""

import pytest
import torch
from catalogue import DIM, HEADS, KERNELS

import mercer as mc
from mercer.backends.tokenwise.taps import BOUNDARIES
from mercer.testing.cases import assert_close

SIZE = 5
PLACES = {
    "usual": (2, 0),
    "static cache": (1, 0),
    "later": (5, 0),
    "between and behind": (7, 3),
    "one by one": (torch.tensor([[3, 9, 1, 4]]), torch.tensor([[3, 8, 1, 0, 10, 2]])),
    "two sequences": (
        torch.tensor([[5, 2, 9, 0], [0, 10, 3, 4]]),
        torch.tensor([[3, 8, 1, 0, 10, 2], [5, 6, 4, 9, 7, 0]]),
    ),
}
FILTERS = [mc.Causal(), mc.Window(3, 1), mc.Causal() & mc.Fixed(4) | mc.Window(2, 0), mc.Memory(1)]


def draw(queries=4, keys=6, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = (2, HEADS, queries, DIM), (2, HEADS, keys, DIM), (2, HEADS, keys, 5)
    taps = [(2, keys, 1, SIZE), (1, keys, HEADS, SIZE)]
    return [torch.randn(*s, generator=generator, dtype=dtype) for s in (*sizes, *taps)]


def run(kernel, inputs, **options):
    """Output, log_mass and the gradients."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    q, k, v, key_taps, value_taps = inputs
    out, mass = mc.vicinity(
        q, k, v, key_taps=key_taps, value_taps=value_taps, kernel=kernel, return_log_mass=True,
        **options,
    )  # fmt: skip
    loss = out.sin().sum() + torch.where(mass.isfinite(), mass, 0.0).sum()
    grads = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
    return [out, mass, *grads]


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("places", PLACES)
def test_every_backend_is_the_definition(places, boundary):
    for n, filter in enumerate(FILTERS):
        kernel = [mc.RBF(1.5), KERNELS["lookup"](), KERNELS["alibi"]() * mc.Exponential()][n % 3]
        call = {"places": PLACES[places], "boundary": boundary, "filter": filter}
        call["normalize"] = [None, 0.7][n % 2]
        want = run(kernel.double(), draw(), backend="reference", **call)
        for backend in ("auto", "chunked"):
            for got, x in zip(run(kernel, draw(), backend=backend, **call), want, strict=True):
                assert_close(got, x, f"{filter} in {backend}")


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_keys_in_any_order_are_the_whole_sequence(boundary):
    inputs, order = draw(6), torch.tensor([3, 0, 5, 1, 4, 2])
    kernel = KERNELS["lookup"]().double()
    want = run(kernel, inputs, boundary=boundary, backend="reference")
    q, k, v, key_taps, value_taps = inputs
    moved = [
        q[:, :, order],
        k[:, :, order],
        v[:, :, order],
        key_taps[:, order],
        value_taps[:, order],
    ]
    for backend in ("reference", "auto"):
        got = run(kernel, moved, boundary=boundary, places=(order, order), backend=backend)
        for name, x, y in zip(("out", "log_mass", "q", "k", "v"), got, want, strict=False):
            assert_close(x, y[:, :, order], name)
        for x, y in zip(got[5:], want[5:], strict=True):
            assert_close(x, y[:, order], "taps")


def test_a_static_cache_hides_what_is_not_written_yet():
    q, k, v, key_taps, value_taps = draw(1, 9, torch.float32)
    call = {"key_taps": key_taps[:, :6], "value_taps": value_taps[:, :6]}
    want = mc.vicinity(q, k[:, :, :6], v[:, :, :6], **call)
    k[:, :, 6:], v[:, :, 6:] = torch.nan, torch.nan
    got = mc.vicinity(q, k, v, key_taps=key_taps, value_taps=value_taps, places=(5, 0))
    assert torch.equal(got, want)


def test_a_key_that_is_not_there_contributes_zero():
    """A part of the keys: as if the others had no features, and were hidden."""
    q, k, v, _, taps = draw(1, 6)
    here = torch.tensor([0, 1, 3, 5])
    blank = v.clone()
    blank[:, :, [2, 4]] = 0.0
    seen = torch.zeros(1, 6, dtype=torch.bool)
    seen[:, here] = True
    want = mc.vicinity(q, k, blank, value_taps=taps, filter=mc.Mask(seen) & mc.Causal())
    got = mc.vicinity(
        q, k[:, :, here], v[:, :, here], value_taps=taps[:, here], filter=mc.Causal(),
        places=(torch.tensor([5]), here),
    )  # fmt: skip
    assert_close(got, want, "out")


def test_documents_are_not_neighbours():
    q, k, v, _, taps = draw(3, 6)
    ids, places = torch.tensor([0, 0, 0, 1, 1, 1]), torch.arange(6)
    want = mc.vicinity(q, k, v, value_taps=taps, filter=mc.Causal() & mc.Documents(ids))
    order = torch.tensor([4, 1, 0, 3, 5, 2])
    for backend in ("reference", "auto"):
        got = mc.vicinity(
            q, k[:, :, order], v[:, :, order], value_taps=taps[:, order], backend=backend,
            filter=mc.Causal() & mc.Documents(ids[order], ids[3:]),
            places=(places[3:], order),
        )  # fmt: skip
        assert_close(got, want, backend)


def test_misuse_is_named():
    q, k, v, _, taps = draw(2, 4)
    with pytest.raises(ValueError, match="two keys of a sequence stand at one place"):
        mc.vicinity(q, k, v, value_taps=taps, places=(3, torch.tensor([0, 1, 1, 2])))
    with pytest.raises(ValueError, match=r"value_taps must be \[2, 4, "):
        mc.vicinity(q, k, v, value_taps=taps[:, :3], places=(0, 0))
    for sizes in ((0, 4), (2, 0)):
        q, k, v, _, taps = draw(*sizes)
        places = torch.arange(sizes[0]) * 2, torch.arange(sizes[1]) * 3
        out = mc.vicinity(q, k, v, value_taps=taps, places=places)
        assert out.shape == (2, HEADS, sizes[0], 5)
        assert not out.any()
