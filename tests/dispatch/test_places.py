"""Places that are said: every filter and every kernel of i - j, against a part of a whole call."""

import math
from dataclasses import dataclass

import pytest
import torch
from catalogue import COMPOSED, DIM, DOCUMENTS, HEADS, KERNELS

import mercer as mc
from mercer.dispatch.problem import prepare
from mercer.filters.placed import Placed, hides_later, place
from mercer.filters.places import read_places
from mercer.kernels.entry import normal
from mercer.testing.cases import assert_close, double

CPU = torch.device("cpu")
# The places of the whole sequence, of which a call has a part.
T = 11
NUMBERS = {
    "usual": (7, 0, 4, 11),
    "later start": (7, 3, 4, 8),
    "static cache": (3, 0, 2, 11),
    "before all keys": (0, 6, 3, 5),
    "an earlier part": (8, 0, 3, 5),
    "one key between": (6, 1, 4, 8),
    "beside": (4, 4, 4, 4),
}
TENSORS = {
    "head and tail": ([[0, 1, 9, 10]], [[0, 1, 9, 10]]),
    "of others": ([[2, 3, 7, 8]], [[9, 10, 0, 1]]),
    "apart": ([[5, 2, 9], [0, 10, 3]], [[3, 8, 1, 0, 10, 2], [5, 6, 4, 9, 7, 0]]),
}
RELATIVE = {
    name: KERNELS[name]
    for name in (
        "lookup", "lookup-per-head", "lookup-causal", "relative-sinusoid", "alibi", "buckets",
        "buckets-one-way",
    )
} | {
    "joined": COMPOSED["lookup*buckets*alibi"],
    "weighed": lambda: mc.RBF() * mc.RelativeSinusoid(on="content", weight=normal(HEADS, DIM, 6)),
    "power": lambda: mc.Power(mc.Exponential() * KERNELS["alibi"](), 1.5),
    "sum": lambda: mc.RBF() * KERNELS["lookup"]() + mc.Scaled(mc.Exponential(), 0.3),
}  # fmt: skip
WHOLE_MASK = torch.arange(2 * T * T).view(2, 1, T, T) * 7 % 11 < 6


@dataclass(frozen=True)
class Where:
    """The places of a call, as given and one by one."""

    given: tuple
    q: torch.Tensor  # [B or 1, Q]
    k: torch.Tensor

    @classmethod
    def of(cls, name):
        if name in NUMBERS:
            q, k, num_queries, num_keys = NUMBERS[name]
            each = torch.arange(q, q + num_queries)[None], torch.arange(k, k + num_keys)[None]
            return cls((q, k), *each)
        q, k = map(torch.tensor, TENSORS[name])
        return cls((q, k), q, k)

    def part(self, whole):
        """The queries' rows and the keys' columns of [B or 1, H, T, T]."""
        batch = max(len(whole), len(self.q), len(self.k))
        whole = whole.expand(batch, -1, -1, -1)
        rows = self.q[:, None, :, None].expand(batch, whole.shape[1], -1, T)
        columns = self.k[:, None, None].expand(batch, whole.shape[1], self.q.shape[1], -1)
        return whole.gather(2, rows).gather(3, columns)

    def rows(self, x, places):
        """x [2, H, T, D] at these places."""
        index = places[:, None, :, None].expand(2, x.shape[1], -1, x.shape[-1])
        return x.gather(2, index)


def filters(where):
    """Each filter for a call at these places, and the whole mask that defines it."""
    first = where.q.amin(-1)
    memory = torch.cat([mc.Memory(2, int(n)).mask(T, T) for n in first])
    memory_and_start = mc.Memory(1, 4).mask(T, T)
    ids = DOCUMENTS.gather(1, where.k.expand(2, -1)), DOCUMENTS.gather(1, where.q.expand(2, -1))
    causal = mc.Causal().mask(T, T)
    plain = [
        mc.Full(), mc.Causal(), mc.Window(3, 1), mc.Window(2, 0), mc.Window(-1, 2), mc.Window(0, 5),
        mc.Strided(3), mc.Fixed(4, 2), mc.Padding([7, 0]), mc.Causal() & mc.Window(4, 4),
        mc.Strided(4) | mc.Window(0, 2) & mc.Padding([11, 5]),
    ]  # fmt: skip
    documents, mask = mc.Documents(*ids), mc.Mask(where.part(WHOLE_MASK))
    of_documents = mc.Documents(DOCUMENTS).mask(T, T)
    return [
        *((f, f.mask(T, T)) for f in plain),
        (mc.Memory(2), memory),
        (mc.Memory(1, 4), memory_and_start),
        (documents, of_documents),
        (documents & mc.Causal(), of_documents & causal),
        (mask, WHOLE_MASK),
        (mask & mc.Causal(), WHOLE_MASK & causal),
    ]


PLACES = [*NUMBERS, *TENSORS]


@pytest.mark.parametrize("name", PLACES)
def test_a_filter_is_that_of_its_places(name):
    where = Where.of(name)
    num_queries, num_keys = where.q.shape[1], where.k.shape[1]
    places = read_places(where.given, 2, num_queries, num_keys, CPU)
    assert (places is None) == (name == "usual")
    for filter, whole in filters(where):
        want = where.part(whole).expand(2, -1, -1, -1)
        moved = filter if places is None else place(filter, places, CPU)
        moved.check(2, num_queries, num_keys)
        assert torch.equal(moved.mask(num_queries, num_keys).expand(2, -1, -1, -1), want), filter
        simple = moved.simplify(num_queries, num_keys)
        assert torch.equal(simple.mask(num_queries, num_keys).expand(2, -1, -1, -1), want), filter
        if places is not None and hides_later(filter):
            apart = where.q[:, :, None] - where.k[:, None]
            assert not bool((want[:, 0] & (apart < 0)).any()), filter
        check_blocks(moved, want, num_queries, num_keys)


def check_blocks(filter, mask, num_queries, num_keys):
    start = num_keys - num_queries
    for a in range(num_queries):
        for b in range(a, num_queries):
            for c in range(num_keys):
                for d in range(c, num_keys):
                    i, j = mc.filters.Span(a + start, b + start), mc.filters.Span(c, d)
                    covered = filter.covers(i, j, start)
                    block = mask[:, :, a : b + 1, c : d + 1]
                    if covered is not None:
                        assert bool(block.all() if covered else not block.any()), (filter, i, j)


def test_contiguous_places_have_a_form_that_every_backend_knows():
    later = read_places((8, 2), 1, 4, 4, CPU)  # 6 later than usual
    assert place(mc.Causal(), later, CPU) == mc.Window(-1, 6)
    assert place(mc.Window(8, 0), later, CPU) == mc.Window(2, 6)
    assert isinstance(place(mc.Window(5, 0), later, CPU), Placed)
    moved = read_places((8, 4), 1, 4, 8, CPU)  # as usual, but for the first key
    assert place(mc.Causal() & mc.Strided(3), moved, CPU) == mc.Causal() & mc.Strided(3)
    assert place(mc.Fixed(4), moved, CPU) == mc.Fixed(4)
    assert isinstance(place(mc.Fixed(3), moved, CPU), Placed)
    assert place(mc.Memory(3), moved, CPU) == mc.Memory(3)
    assert place(mc.Padding([9, 2]), moved, CPU) == mc.Padding([5, 0])


def call(kernel, where, filter, backend):
    """Output, log_mass and gradients of one random call at these places."""
    kernel = double(kernel)
    q, k, v = whole_inputs(kernel)
    q = mc.Features(**{n: where.rows(x, where.q) for n, x in q.items()})
    k = mc.Features(**{n: where.rows(x, where.k) for n, x in k.items()})
    v = where.rows(v, where.k)
    named = {f"q.{n}": x for n, x in q.items()} | {f"k.{n}": x for n, x in k.items()} | {"v": v}
    named = {n: x.detach().requires_grad_() for n, x in named.items()}
    q = mc.Features(**{n[2:]: x for n, x in named.items() if n.startswith("q.")})
    k = mc.Features(**{n[2:]: x for n, x in named.items() if n.startswith("k.")})
    out, mass = mc.smooth(
        kernel, q, k, named["v"], filter=filter, backend=backend, return_log_mass=True,
        places=where.given,
    )  # fmt: skip
    return results(named, kernel, out, mass)


def whole_inputs(kernel):
    generator = torch.Generator().manual_seed(0)
    names = sorted(kernel.query_parts | kernel.key_parts | {"content"})

    def draw(width):
        return torch.randn(2, HEADS, T, width, generator=generator, dtype=torch.float64)

    q, k = ({n: draw(DIM) for n in names} for _ in "qk")
    return mc.Features(**q), mc.Features(**k), draw(5)


def results(named, kernel, out, mass):
    generator = torch.Generator().manual_seed(1)
    steer = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    loss = (out * steer).sum() + torch.where(mass.isfinite(), mass, 0.0).sum()
    named = named | dict(kernel.named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    found = {"out": out.detach(), "log_mass": mass.detach()}
    for (name, x), grad in zip(named.items(), grads, strict=True):
        found[f"gradient of {name}"] = torch.zeros_like(x) if grad is None else grad
    return found


def want(kernel, where, whole_mask):
    """The same from the weights of the whole sequence, of which rows and columns are taken."""
    kernel = double(kernel)
    q, k, v = whole_inputs(kernel)
    named = {f"q.{n}": x for n, x in q.items()} | {f"k.{n}": x for n, x in k.items()} | {"v": v}
    for x in named.values():
        x.requires_grad_()
    log = where.part(kernel.log_weight(q, k).expand(2, HEADS, T, T))
    visible = where.part(whole_mask)
    blind = ~visible.any(-1, keepdim=True)
    log = log.masked_fill(~visible, -math.inf).masked_fill(blind, 0.0)
    mass = log.logsumexp(-1, keepdim=True)
    out = (log - mass).exp().masked_fill(blind, 0.0) @ where.rows(v, where.k)
    found = results(named, kernel, out, mass.masked_fill(blind, -math.inf)[..., 0])
    for name in named:
        places = where.q if name.startswith("q") else where.k
        found[f"gradient of {name}"] = where.rows(found[f"gradient of {name}"], places)
    return found


def compare(got, wanted):
    assert got.keys() == wanted.keys()
    for name, x in wanted.items():
        assert_close(got[name], x, name)


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("kernel", RELATIVE)
def test_a_kernel_of_distances_is_that_of_its_places(kernel, name):
    where = Where.of(name)
    for filter, whole in ((mc.Full(), mc.Full()), (mc.Causal(), mc.Causal())):
        wanted = want(RELATIVE[kernel](), where, whole.mask(T, T))
        for backend in ("reference", "chunked", "auto"):
            compare(call(RELATIVE[kernel](), where, filter, backend), wanted)


@pytest.mark.parametrize("name", PLACES)
def test_every_filter_in_every_backend(name):
    where = Where.of(name)
    for n, (filter, whole) in enumerate(filters(where)):
        kernel = [mc.RBF(1.5), mc.Polynomial(), RELATIVE["joined"]()][n % 3]
        wanted = None
        for backend in ("reference", "chunked", "sdpa"):
            if backend == "sdpa" and not isinstance(kernel, mc.RBF):
                with pytest.raises(ValueError, match="backend 'sdpa' cannot run this"):
                    call(kernel, where, filter, backend)
                continue
            got = call(kernel, where, filter, backend)
            wanted = got if wanted is None else wanted
            compare(got, wanted)
        if kernel.positive and not isinstance(kernel, mc.Polynomial):
            compare(wanted, want(kernel, where, whole.expand(2, 1, T, T)))


def draws(queries=3, keys=5, dtype=torch.float32):
    sizes = (queries, keys, keys)
    return [torch.randn(2, HEADS, n, DIM, dtype=dtype) for n in sizes]


def test_flex_attention_reads_places(monkeypatch):
    from mercer.backends.flex import compiled

    monkeypatch.setattr(compiled, "COMPILER", "aot_eager")
    if compiled.unavailable("cpu"):
        pytest.skip(compiled.unavailable("cpu"))
    q, k, v = draws(3, 6)
    apart = tuple(map(torch.tensor, TENSORS["apart"]))
    slope = mc.RBF() * mc.ALiBi(mc.ALiBi.standard(HEADS))
    for kernel, places in ((RELATIVE["lookup"](), apart), (slope, (8, 1))):
        call = {"filter": mc.Window(4, 6) | mc.Fixed(4), "places": places}
        with torch.no_grad():
            got = mc.smooth(kernel, q, k, v, backend="flex", **call)
            wanted = mc.smooth(kernel, q, k, v, backend="reference", **call)
        assert (got - wanted).abs().max() < 1e-5


def test_a_compiled_graph_reads_places():
    q, k, v = draws()
    places = torch.tensor([[4, 9, 1]]), torch.tensor([[0, 7, 2, 9, 3]])

    kernel = RELATIVE["lookup"]() * mc.RBF()

    def run(q, k, v, *places):
        documents = mc.Documents(torch.arange(5)[None] // 3, torch.arange(3)[None] // 2)
        filter = mc.Causal() & mc.Fixed(4) | documents & mc.Padding(torch.tensor([9, 4]))
        return mc.smooth(kernel, q, k, v, filter=filter, places=places)

    graph = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert torch.allclose(graph(q, k, v, *places), run(q, k, v, *places))
    assert torch.allclose(graph(q, k, v, 6, 0), run(q, k, v, 6, 0))
    assert torch.allclose(graph(q, k, v, 1, 0), run(q, k, v, 1, 0))


def test_the_usual_places_change_nothing():
    """The same backend, features without places, and the filter as it came."""
    q, k, v = draws()
    for places, left_out in (((2, 0), 0), ((9, 7), 0), ((1, 0), 1)):
        problem = prepare(mc.RBF(), q, k, v, mc.Causal(), 0.0, False, "auto", places)
        assert problem.q.places is problem.k.places is None
        assert problem.filter == mc.Causal()
        assert problem.k.length == 5 - left_out
        got = mc.smooth(mc.RBF(), q, k, v, filter=mc.Causal(), places=places)
        kept = 5 - left_out
        usual = mc.smooth(mc.RBF(), q, k[:, :, :kept], v[:, :, :kept], filter=mc.Causal())
        assert torch.equal(got, usual)


def test_a_static_cache_hides_what_is_not_written_yet():
    q, k, v = draws(1, 64)
    k[:, :, 10:], v[:, :, 10:] = math.nan, math.nan
    kernel = mc.RBF() * mc.ALiBi(mc.ALiBi.standard(HEADS))
    got = mc.smooth(kernel, q, k, v, filter=mc.Causal(), places=(9, 0))
    wanted = mc.smooth(kernel, q, k[:, :, :10], v[:, :, :10], filter=mc.Causal())
    assert torch.equal(got, wanted)
    by_tensor = torch.tensor([[9]]), torch.arange(64)[None]
    got = mc.smooth(kernel, q, k, v, filter=mc.Causal(), places=by_tensor)
    assert (got - wanted).abs().max() < 1e-5


def test_parts_of_the_keys_join_by_their_masses():
    """A ring: earlier keys, then the own ones."""
    from mercer.term.mix import Smoothed, mix

    q, k, v = draws(4, 12, torch.float64)
    kernel, filter = RELATIVE["joined"]().double() * mc.RBF(), mc.Causal() & mc.Window(9, 0)
    parts = []
    for first in (0, 4, 8):
        part = slice(first, first + 4)
        found = mc.smooth(
            kernel, q, k[:, :, part], v[:, :, part], filter=filter, return_log_mass=True,
            places=(8, first),
        )  # fmt: skip
        parts.append(Smoothed(*found))
    got = mix(parts)
    wanted = mc.smooth(kernel, q, k, v, filter=filter, return_log_mass=True)
    assert_close(got.out, wanted[0], "out")
    assert_close(got.log_mass, wanted[1], "log_mass")


def test_explain_says_the_places_and_who_refuses_them():
    q, k, v = draws()
    said = mc.explain(RELATIVE["lookup"](), q, k, v, filter=mc.Strided(3), places=(9, 0))
    assert "places    queries from 9, keys from 0" in str(said)
    assert said.backend == "chunked"
    assert "relative table" in said.refusals["sdpa"]
    tensors = torch.tensor([[4, 9, 1]]), torch.tensor([[0, 7, 2, 9, 3]])
    said = mc.explain(mc.RBF(), q, k, v, filter=mc.Causal(), places=tensors)
    assert "places    of each query and key" in str(said)
    said = mc.explain(mc.Polynomial(), q, k, v, filter=mc.Strided(3), places=(9, 0))
    assert "Strided(stride=3) of places that are said" in said.refusals["linear"]


def test_a_users_own_filter_reads_places():
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Even(mc.Filter):
        def sees(self, b, i, j, start):
            return (j % 2 == 0) & (i >= start)

    q, k, v = draws()
    for places in ((4, 1), (torch.arange(4, 7)[None], torch.arange(1, 6)[None])):
        wanted = mc.smooth(mc.RBF(), q, k[:, :, 1::2], v[:, :, 1::2])
        got = mc.smooth(mc.RBF(), q, k, v, filter=Even(), places=places)
        assert (got - wanted).abs().max() < 1e-5


def test_a_users_own_kernel_of_distances_must_know_places():
    class Near(mc.Kernel):
        relative = True

        def log_weight(self, q, k):
            raise AssertionError("not reached")

    q, k, v = draws()
    for kernel in (Near(), Near() * mc.RBF(), mc.Scaled(Near(), 2.0)):
        with pytest.raises(ValueError, match="does not know places that are said"):
            mc.smooth(kernel, q, k, v, places=(9, 0))


@pytest.mark.parametrize(
    ("places", "said"),
    [
        (3, "must be a pair"),
        ((1, 2, 3), "must be a pair"),
        ((0.5, 0), "of the queries must be a whole number or a tensor"),
        ((True, 0), "of the queries must be a whole number or a tensor"),
        ((0, 2**62), "of the keys must be below"),
        ((torch.zeros(1, 4).long(), 0), r"of the queries must be whole numbers \[2, 3\]"),
        ((0, torch.zeros(3, 5).long()), r"of the keys must be whole numbers \[2, 5\]"),
        ((torch.zeros(1, 3), 0), r"of the queries must be whole numbers \[2, 3\], got torch.float"),
    ],
)
def test_wrong_places_are_named(places, said):
    with pytest.raises(ValueError, match=said):
        mc.smooth(mc.RBF(), *draws(), places=places)


def test_documents_and_masks_must_say_which_entry_belongs_to_a_query():
    q, k, v = draws()
    ids, apart = torch.arange(5)[None], (torch.arange(3)[None], torch.arange(5)[None])
    with pytest.raises(ValueError, match=r"give Documents\(ids, queries=…\)"):
        mc.smooth(mc.RBF(), q, k, v, filter=mc.Documents(ids), places=apart)
    with pytest.raises(ValueError, match=r"give Documents\(ids, queries=…\)"):
        mc.smooth(mc.RBF(), q, k, v, filter=mc.Documents(ids), places=(9, 0))
    with pytest.raises(ValueError, match="give a mask"):
        mc.smooth(mc.RBF(), q, k, v, filter=mc.Mask(torch.ones(5, 5).bool()), places=(9, 0))
    with pytest.raises(ValueError, match="ids for 2 queries, but there are 3"):
        mc.smooth(mc.RBF(), q, k, v, filter=mc.Documents(ids, ids[:, :2]), places=(9, 0))
    # Within the keys, a query has the id of the key at its place.
    got = mc.smooth(mc.RBF(), q, k, v, filter=mc.Documents(ids), places=(1, 0))
    assert (got - v[:, :, 1:4]).abs().max() < 1e-6
    packed = torch.tensor([[0, 1, 0, 1, 2]])
    own = mc.smooth(mc.RBF(), k, k, v, filter=mc.Documents([[0, 0, 1, 1, 1]]), places=(packed,) * 2)
    wanted = mc.smooth(mc.RBF(), k, k, v, filter=mc.Documents([[0, 0, 1, 1, 1]]))
    assert torch.allclose(own, wanted)


def test_documents_have_ids_for_queries_without_places_too():
    q, k, v = draws(2, 4, torch.float64)
    filter = mc.Documents([[0, 0, 1, 1]], queries=[[1, 0]])
    for backend in ("reference", "chunked", "sdpa"):
        got = mc.smooth(mc.RBF(), q, k, v, filter=filter, backend=backend)
        late = mc.smooth(mc.RBF(), q[:, :, :1], k[:, :, 2:], v[:, :, 2:])
        early = mc.smooth(mc.RBF(), q[:, :, 1:], k[:, :, :2], v[:, :, :2])
        assert_close(got, torch.cat([late, early], 2), backend)


def test_nan_stays_in_the_rows_that_see_it():
    q, k, v = draws(3, 4, torch.float64)
    k[0, :, 1] = math.nan
    places = torch.tensor([[5, 1, 8]]), torch.tensor([[0, 4, 9, 1]])
    for backend in ("reference", "chunked", "sdpa"):
        out = mc.smooth(mc.RBF(), q, k, v, filter=mc.Causal(), places=places, backend=backend)
        assert out[0].isnan().all(-1).tolist() == [[True, False, True]] * HEADS
        assert bool(out[1].isfinite().all())


@pytest.mark.parametrize("backend", ["reference", "chunked", "sdpa"])
def test_places_before_0_are_places(backend):
    """Only differences count, and multiples of a stride; both strides here divide 12."""
    q, k, v = draws(3, 5, torch.float64)
    kernel = mc.RBF() if backend == "sdpa" else RELATIVE["joined"]().double()
    q_places, k_places = torch.tensor([[4, 9, 1]]), torch.tensor([[0, 7, 2, 9, 3]])
    filter = mc.Causal() & (mc.Fixed(4, 2) | mc.Strided(3)) | mc.Window(0, 2) & mc.Memory(2)
    for there, before in (
        ((q_places, k_places), (q_places - 12, k_places - 12)),
        ((9, 6), (-3, -6)),
        ((4, k_places), (-8, k_places - 12)),
    ):
        wanted, got = (
            mc.smooth(kernel, q, k, v, filter=filter, backend=backend, places=places)
            for places in (there, before)
        )
        assert_close(got, wanted, str(before))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_places_are_compared_in_64_bits(dtype):
    q, k, v = draws()
    wide = torch.tensor([[4, 9, 100]]), torch.tensor([[0, 70, 2, 9, 120]])
    narrow = tuple(x.to(dtype) for x in wide)
    filter = mc.Window(90, 30)
    wanted = mc.smooth(mc.RBF(), q, k, v, filter=filter, places=wide)
    assert torch.equal(mc.smooth(mc.RBF(), q, k, v, filter=filter, places=narrow), wanted)


@pytest.mark.parametrize("kernel", ["lookup", "alibi", "relative-sinusoid", "joined"])
def test_a_place_may_be_said_twice(kernel):
    """Two keys at one place: both have the weights of that place."""
    q, k, v = draws(2, 3, torch.float64)
    module = double(RELATIVE[kernel]())
    parts = sorted(module.query_parts | module.key_parts | {"content"})
    q, k = (mc.Features(**dict.fromkeys(parts, x)) for x in (q, k))
    here = torch.tensor([[5, 5]]), torch.tensor([[4, 2, 4]])
    each = [
        mc.smooth(
            module, q, k.rows(n, n + 1), v[:, :, n : n + 1], return_log_mass=True,
            places=(here[0], here[1][:, n : n + 1]),
        )[1]
        for n in range(3)
    ]  # fmt: skip
    for backend in ("reference", "chunked"):
        _, mass = mc.smooth(
            module, q, k, v, places=here, backend=backend, return_log_mass=True, filter=mc.Causal()
        )
        assert_close(mass, torch.stack(each).logsumexp(0), backend)


@pytest.mark.parametrize("sizes", [(0, 5), (3, 0), (0, 0)])
def test_calls_without_queries_or_keys(sizes):
    q, k, v = draws(*sizes)
    queries, keys = sizes
    tensors = torch.arange(queries)[None] * 3, torch.arange(keys)[None] * 2
    kernel = mc.RBF() * mc.ALiBi(mc.ALiBi.standard(HEADS))
    for places in ((7, 2), tensors):
        for filter in (mc.Causal(), mc.Memory(2), mc.Fixed(3), mc.Full()):
            for backend in ("reference", "chunked"):
                out, mass = mc.smooth(
                    kernel, q, k, v, filter=filter, places=places, backend=backend,
                    return_log_mass=True,
                )  # fmt: skip
                assert out.shape == (2, HEADS, queries, DIM)
                assert not out.any()
                assert bool(mass.isneginf().all())


def test_one_state_serves_consecutive_places():
    """The backend in linear time: the last keys of a call, or a reason."""
    q, k, v = draws(3, 5, torch.float64)
    for places in ((7, 5), (6, 5)):
        call = {"filter": mc.Causal(), "places": places}
        got = mc.smooth(mc.Polynomial(), q, k, v, backend="linear", **call)
        assert_close(got, mc.smooth(mc.Polynomial(), q, k, v, backend="reference", **call), "out")
    apart = torch.tensor([[4, 9, 1]]), torch.tensor([[0, 7, 2, 9, 3]])
    with pytest.raises(ValueError, match="one state cannot serve"):
        mc.smooth(mc.Polynomial(), q, k, v, backend="linear", filter=mc.Causal(), places=apart)
