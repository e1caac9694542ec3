"""The pass over keys by groups of warps, run from its source by threads.

test_hopper.py has the same on a GPU, where warps, layouts and the compiler have their part.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from gluon_on_cpu import Descriptor, Pointer, module

from mercer.backends.runtime import launch
from mercer.backends.triton.hopper import eligible

BATCH, HEADS, LENGTH, DIM = 2, 2, 150, 16
LOG2E = math.log2(math.e)
CAUSAL = (1, -1, -1, -1, 0, 0, 0, 0, 0, 0)
WINDOW = (1, 69, -1, -1, 0, 0, 0, 0, 0, 0)
PADDING = (1, -1, -1, -1, 0, 0, 0, 1, 0, 0)
# So long that no block of queries meets both of its ends; and the same with an end after the key.
LONG, AHEAD = (1, 200, -1, -1, 0, 0, 0, 0, 0, 0), (0, 180, 20, -1, 0, 0, 0, 1, 0, 0)
# A distance whose gradients come from one pass, with its norms as columns of products.
COLUMNS = {"SUMMED": True, "SIDES": True, "NORM0": True, "HAS_COL0": True, "WANT0": True}

CASES = {
    "plain": {},
    "full": {"filter": (0, *CAUSAL[1:])},
    "window": {"filter": WINDOW},
    "padding": {"filter": PADDING},
    "long-window": {"filter": LONG, "length": 420},
    "long-window-of-whole-blocks": {"filter": LONG, "length": 384, "HELD": True},
    "long-window-ahead": {"filter": AHEAD, "length": 420},
    "masked-throughout": {"filter": WINDOW, "SIMPLE": False},
    "distance": {"NORM0": True, "HAS_COL0": True, "MODE0": 1, "WANT0": True},
    "scale-by-keys": {"NORM0": True, "HAS_COL0": True, "MODE0": 1, "WANT0": True, "BY_KEYS": True},
    "scale-by-keys-of-a-product": {"STORE": True, "MODE0": 1, "WANT0": True, "BY_KEYS": True},
    "number-per-key": {"HAS_COL0": True, "SAVE_COL0": True},
    "scale-per-query": {"NORM0": True, "HAS_COL0": True, "MODE0": 2, "filter": WINDOW},
    "two-slots": {"E1": DIM},
    "first-slot": {"E1": DIM, "PART": 1, "filter": WINDOW},
    "stored": {"STORE": True, "NORM0": True, "HAS_COL0": True, "MODE0": 1},
    "stored-window": {"STORE": True, "filter": WINDOW},
    "band": {"STORE": True, "BANDED": True},
    "summed": {"SUMMED": True, "NORM0": True, "HAS_COL0": True, "MODE0": 1, "WANT0": True},
    "summed-columns": {**COLUMNS, "MODE0": 1},
    "summed-scales": {**COLUMNS, "MODE0": 2, "HELD": True, "filter": WINDOW},
    "summed-scales-padding": {**COLUMNS, "MODE0": 2, "filter": PADDING},
    "summed-window": {"SUMMED": True, "filter": WINDOW, "HELD": True},
    "summed-window-columns": {"SUMMED": True, "SIDES": True, "filter": WINDOW, "HELD": True},
    "summed-padding": {"SUMMED": True, "filter": PADDING, "MODE0": 1, "WANT0": True},
}


class Call:
    """Inputs and expected gradients; log_mass and delta are arbitrary."""

    def __init__(self, filter=CAUSAL, length=LENGTH, **flags):
        self.filter, self.length = filter, length
        self.flags = {
            "E0": DIM, "E1": 0, "V": DIM, "MODE0": 0, "LOG0": (0, 0.0, 0.0, 0.0, 1.0),
            "HAS_COL0": False, "SIMPLE": True, "NORM0": False, "WANT0": False, "SAVE_COL0": False,
            "PART": 0, "STORE": False, "SUMMED": False, "BANDED": False, "HELD": False,
            "SIDES": False,
            "BY_KEYS": flags.get("SUMMED", False), **flags,
        }  # fmt: skip
        draw = torch.Generator().manual_seed(0)
        rows = (BATCH, HEADS, length)

        def normal(*shape):
            return torch.randn(shape, generator=draw)

        self.q, self.k, self.q1, self.k1, self.v, self.grad, self.own = (
            normal(*rows, DIM) / 2 for _ in range(7)
        )
        self.lse2, self.delta, self.col = normal(*rows) + 4, normal(*rows), normal(*rows)
        if self.flags["NORM0"]:
            self.col = -self.k.square().sum(-1) / 2
        self.head, self.scale = torch.tensor([0.3, 0.6]), normal(*rows).exp() / 4
        self.band = normal(*rows, length)
        self.lengths = torch.tensor([length, length // 3])
        # The largest |dO| and |delta| of each block of queries, and |k| and |v| of each of keys.
        self.bounds = normal(BATCH, HEADS, 2, -(-length // 64)).abs() + 5.0
        self.most = normal(BATCH, HEADS, 2, -(-length // 64)).abs() + 2.0

    def seen(self):
        i, j = torch.arange(self.length)[:, None], torch.arange(self.length)
        causal, left, right, *_, padded, _, _ = self.filter
        seen = (i - j >= 0) if causal else torch.ones(self.length, self.length, dtype=torch.bool)
        if left >= 0:
            seen = seen & (i - j <= left)
        if right >= 0:
            seen = seen & (j - i <= right)
        seen = seen.expand(BATCH, 1, -1, -1)
        return seen & (j < self.lengths[:, None, None, None]) if padded else seen

    def want(self):
        f = self.flags
        t = self.q @ self.k.mT
        if f["E1"]:
            t = t + self.q1 @ self.k1.mT
        if f["HAS_COL0"]:
            t = t + self.col[:, :, None]
        head = torch.full((2,), 0.5) if f["MODE0"] == 0 else self.head
        head = head[:, None, None] if f["MODE0"] < 2 else torch.ones(1, 1, 1)
        each = self.scale[..., None] if f["MODE0"] == 2 else torch.ones(1)
        e = t * each * head * LOG2E - self.lse2[..., None]
        if f["BANDED"]:
            e = e + self.band
        p = torch.where(self.seen(), e.exp2(), 0.0)
        dp = self.grad @ self.v.mT
        found = p * (dp - self.delta[..., None])
        u = found * each
        sums = u.sum(-2)
        want = {"dv": p.mT @ self.grad, "dk": u.mT @ self.q * head}
        if f["NORM0"]:
            want["dk"] -= (sums[..., None] * head) * self.k
        if f["E1"] and f["PART"] != 1:
            want["dk1"] = u.mT @ self.q1 * head
        if f["SAVE_COL0"]:
            want["dcol"] = sums * head[..., 0]
        if f["WANT0"] and f["MODE0"] == 2:
            want["shares"] = found @ (self.col - self.reference())[..., None]
        elif f["WANT0"]:
            want["dscale"] = (self.col - self.col[:, :, :1]) * sums if f["HAS_COL0"] else 0.0
        if f["WANT0"] and f["BY_KEYS"] and f["MODE0"] < 2:
            want["dscale"] = want["dscale"] + (self.k * (u.mT @ self.q)).sum(-1)
        if f["SUMMED"]:
            want["dq"] = found @ self.k
        if f["STORE"]:
            want["pairs"] = found if f["BANDED"] else found.mT
        return want

    def reference(self):
        """The first key's number, or half of the least that a seen key may have."""
        least = -self.most[:, :, 0].amax(-1, keepdim=True).square() / 2
        return torch.where(self.col[:, :, :1] < least, least / 2, self.col[:, :, :1])

    def run(self, programs, *, longest, stages, buffers, seed, counters=None):
        f, length = self.flags, self.length
        got = {name: torch.full_like(self.q, math.nan) for name in ("dk", "dk1", "dv")}
        got["dcol"] = torch.full_like(self.lse2, math.nan)
        dscale = torch.full((BATCH, HEADS, 2 * length), math.nan)
        room = -(-length // 128) * 128
        got["pairs"] = torch.full((BATCH, HEADS, room, room), math.nan)
        stored = got["pairs"] if f["BANDED"] else got["pairs"].view(1, -1, room, room)
        pairs = Descriptor(stored, 64, 64)
        queries = -(-length // 64)
        sums = torch.zeros(BATCH, HEADS, DIM, queries * 64, dtype=torch.int32)
        last = BATCH * HEADS if longest else 1
        shares = torch.zeros(BATCH, HEADS, queries * 64, dtype=torch.int32)
        if f["SUMMED"]:
            pairs = Descriptor(sums, DIM, 64)
        scale = self.scale if f["MODE0"] == 2 else self.head
        if counters is None:
            counters = torch.zeros(BATCH * HEADS + 1, dtype=torch.int32)
        given = {
            "Q0": Descriptor(self.q), "K0": Descriptor(self.k), "Q1": Descriptor(self.q1),
            "K1": Descriptor(self.k1), "V_": Descriptor(self.v),
            "TILES": Descriptor(self.band, 64, 64), "GRAD": Descriptor(self.grad),
            "S0": Pointer(scale), "C0": Pointer(self.col), "LENGTHS": Pointer(self.lengths),
            "IDS": None, "LSE2": Pointer(self.lse2), "DELTA": Pointer(self.delta),
            "BOUNDS": Pointer(self.bounds), "MOST": Pointer(self.most), "PAIRS": pairs,
            "DK0": Descriptor(got["dk"]),
            "DK1": Descriptor(got["dk1"]), "DV": Descriptor(got["dv"]),
            "DC0": Pointer(got["dcol"]), "DS0": Pointer(dscale), "scb0": HEADS * length,
            "sch0": length, "gc0": 1, "ss0": 1, "num_heads": HEADS, "group0": 1, "group1": 1,
            "group_v": 1, "num_queries": length, "num_keys": length, "number0": 0.5,
            "blocks": -(-length // 128), "parts": BATCH * HEADS, "FILTER": (self.filter,),
            "last": last, "COUNTERS": Pointer(counters),
            "SHARES": Pointer(shares),
            "STAGES": stages, "BUFFERS": buffers, **f,
        }  # fmt: skip
        for stride in ("sqb0", "sqb1", "skb0", "skb1", "svb", "stb"):
            given[stride] = 1
        # Numbers are tensors in Triton, and so are what is made of them.
        tensors = ("num_queries", "num_keys", "num_heads", "blocks", "parts", "last")
        given |= {name: torch.tensor(given[name]) for name in tensors}

        def start(program):
            kernels = module("hopper.kernels.backward_keys", programs, seed + 100 * program)
            kernels.run("backward_keys", given, program)

        # All at once: who draws which ticket is not the same each time.
        with ThreadPoolExecutor(programs) as pool:
            list(pool.map(start, range(programs)))
        # Every program has drawn one ticket more than there are blocks for it.
        tickets = given["parts"] * given["blocks"]
        assert counters[int(f["PART"] == 2)] == tickets + programs
        got["dscale"] = dscale[..., length:]
        (dout, delta), (k, v) = self.bounds.unbind(2), self.most.amax(-1, keepdim=True).unbind(2)
        # 30 bits for what is less than the next power of two.
        most = k * (dout * v + delta)
        unit, other = (2.0 ** (x.log2().floor() - 29) for x in (most, most * k))
        got["dq"] = (sums * unit.repeat_interleave(64, -1)[:, :, None]).mT[:, :, :length]
        got["shares"] = (shares * other.repeat_interleave(64, -1))[..., :length, None]
        if f["STORE"] and not f["BANDED"]:
            # From the first block of queries that sees a program's keys on.
            stored, got["pairs"] = got["pairs"], torch.full_like(got["pairs"], math.nan)
            for low in range(0, room, 128):
                start = self.filter[0] * low
                rows = slice(low, low + 128)
                got["pairs"][..., rows, start:] = stored[..., rows, : room - start]
        return got


@pytest.mark.parametrize("programs", [1, 3, 8])
@pytest.mark.parametrize("name", CASES)
def test_it_gives_the_sums_of_every_block(name, programs):
    call = Call(**CASES[name])
    way = {"longest": programs != 3, "stages": 2 + programs % 2, "buffers": 1 + (programs == 1)}
    got = call.run(programs, **way, seed=programs)
    for what, want in call.want().items():
        found = got[what]
        if what == "pairs":
            # What is beyond, or wholly hidden, may be anything.
            found = found[..., : call.length, : call.length]
            found = torch.where(want == 0.0, 0.0, found)
        assert torch.allclose(found, want, rtol=1e-4, atol=1e-4), what


def test_a_key_with_an_infinite_norm_has_no_weight():
    call = Call(**COLUMNS, MODE0=1)
    call.col[0, 0, 70] = -math.inf
    want, got = call.want(), call.run(3, longest=True, stages=2, buffers=2, seed=1)
    for what in ("dk", "dv", "dq"):
        assert torch.allclose(got[what], want[what], rtol=1e-4, atol=1e-4), what
    assert got["dscale"].isfinite().all()


@pytest.mark.parametrize("mode", [1, 2])
def test_hidden_keys_that_are_not_finite_leave_gradients_alone(mode):
    call = Call(filter=PADDING, **COLUMNS, MODE0=mode)
    want = call.want()
    hidden = slice(LENGTH // 3, None)
    call.k[1, :, hidden], call.v[1, :, hidden], call.col[1, :, hidden] = (math.nan,) * 3
    got = call.run(3, longest=True, stages=2, buffers=2, seed=1)
    for what, x in want.items():
        assert torch.allclose(got[what], x, rtol=1e-4, atol=1e-4), what


def test_constants_of_eligible_equal_those_of_the_kernels():
    """eligible.py repeats them, because it must not import Triton."""
    kernels, summed, stored = (
        module(f"hopper.kernels.{name}", 1, 0)
        for name in ("backward_keys", "dq_fixed_point", "dq_from_scores")
    )
    assert kernels.BLOCK == kernels.OWN == summed.PLACES == eligible.GROUP
    assert eligible.TO_QUERIES[0] == stored.TOGETHER


def test_a_second_pass_draws_tickets_of_its_own():
    counters = torch.zeros(BATCH * HEADS + 1, dtype=torch.int32)
    for part, what in ((1, "dk"), (2, "dk1")):
        call = Call(E1=DIM, PART=part)
        got = call.run(3, longest=True, stages=2, buffers=1, seed=part, counters=counters)
        assert torch.allclose(got[what], call.want()[what], rtol=1e-4, atol=1e-4)


KINDS = {
    "summed": {"SUMMED": True},
    "summed-columns": {"SUMMED": True, "SIDES": True},
    "summed-scales": {**COLUMNS, "MODE0": 2},
}


@cache
def by_many(kind):
    """The result with one program per block of keys."""
    call = Call(filter=WINDOW, HELD=True, length=300, **KINDS[kind])
    return call, call.run(12, longest=True, stages=3, buffers=1, seed=9)


@pytest.mark.parametrize(("seed", "buffers"), [(0, 1), (1, 2), (2, 2), (3, 1)])
@pytest.mark.parametrize("longest", [False, True], ids=["head-by-head", "longest-first"])
def test_bits_do_not_depend_on_the_order_of_threads(longest, buffers, seed):
    for kind in KINDS:
        call, want = by_many(kind)
        got = call.run(2 + seed, longest=longest, stages=2, buffers=buffers, seed=seed)
        assert all(torch.equal(got[name], want[name]) for name in ("dk", "dv", "dq", "shares"))


def around(name, tensors, numbers, flags, blocks):
    """One of the kernels before and after sums, for all blocks of all heads."""
    kernels = module("hopper.kernels.dq_fixed_point", 1, 0)
    given = {n: Pointer(x) for n, x in tensors.items()} | flags
    given |= {n: torch.tensor(x) for n, x in numbers.items()}
    kernels.place.rows = BATCH * HEADS
    for row in range(BATCH * HEADS):
        for block in range(blocks):
            kernels.run(name, given, block, row)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_sums_fit_and_come_back_as_gradients(norms, padded):
    call = Call(filter=(1, 69, -1, -1, 0, 0, 0, int(padded), 0, 0), NORM0=norms, HAS_COL0=norms)
    queries, blocks = 130, -(-LENGTH // 64)
    shape = (BATCH, HEADS, queries)
    grad, out = (x[:, :, :queries].contiguous() for x in (call.grad, call.own))
    lse, moved = torch.randn(shape), torch.randn(shape)
    lse[0, 0, 7] = -math.inf
    k, v = call.k.clone(), call.v.clone()
    # Seen by nobody: hidden by the padding, or by the window from all 130 queries.
    hidden = torch.zeros(BATCH, 1, LENGTH, dtype=torch.bool)
    hidden[1] = padded and torch.arange(LENGTH) >= LENGTH // 3
    k[hidden.expand(-1, HEADS, -1)] = 1e18
    v[hidden.expand(-1, HEADS, -1)] = math.nan
    made = {
        "DELTA": torch.full(shape, math.nan), "LSE2": torch.full(shape, math.nan),
        "BOUNDS": torch.full((BATCH, HEADS, 2, 3), math.nan),
        "MOST": torch.full((BATCH, HEADS, 2, blocks), math.nan),
        "SUMS": torch.full((BATCH, HEADS, DIM, 192), 77, dtype=torch.int32),
        "SHARES": torch.full((BATCH, HEADS, 192), 77, dtype=torch.int32),
        "COUNTERS": torch.full((BATCH * HEADS + 1,), 77, dtype=torch.int32),
    }  # fmt: skip
    numbers = {
        "num_heads": HEADS, "num_queries": queries, "num_keys": LENGTH, "group0": 1, "group_v": 1,
        "gc0": 1, "e0": DIM, "dv": DIM, "skb0": HEADS * LENGTH * DIM, "skh0": LENGTH * DIM,
        "skt0": DIM, "svb": HEADS * LENGTH * DIM, "svh": LENGTH * DIM, "svt": DIM,
        "scb0": HEADS * LENGTH, "sch0": LENGTH, "ss0": 1, "number0": 0.5,
    }  # fmt: skip
    given = {
        "K0": k, "V_": v, "C0": call.col, "LENGTHS": call.lengths, "GRAD": grad, "GRAD_LSE": moved,
        "OUT": out, "LOW": out, "LSE": lse,
    }  # fmt: skip
    flags = {"HAS_LSE": True, "TOKENS": False, "E0": DIM}
    filter = {"V": DIM, "FILTER": (call.filter,), "HAS_LOW": False, "NORMS": norms, "EACH": True}
    around("before_sums", given | made, numbers, flags | filter, 3 + blocks)
    delta = (grad * out).sum(-1) - moved
    assert torch.allclose(made["DELTA"], delta, atol=1e-5)
    assert torch.equal(made["LSE2"], torch.where(lse == -math.inf, math.inf, lse * LOG2E))
    assert not made["SUMS"].any()
    assert not made["SHARES"].any()
    assert not made["COUNTERS"].any()
    largest = torch.where(hidden, 0.0, call.k.norm(dim=-1)).amax(-1)
    assert torch.allclose(made["MOST"][:, :, 0].amax(-1), largest)
    value = torch.where(hidden, 0.0, call.v.norm(dim=-1)).amax(-1)
    assert torch.allclose(made["MOST"][:, :, 1].amax(-1), value)

    # The last queries see all but the first keys; weights that add up to 1.
    scores = torch.randn(BATCH, HEADS, queries, LENGTH).masked_fill(hidden[:, :, None], -math.inf)
    p = scores.softmax(-1)
    keys, values = (torch.where(hidden[..., None], 0.0, x) for x in (call.k, call.v))
    dq = (p * (grad @ values.mT - delta[..., None])) @ keys
    dout, pull = (
        torch.stack([part.amax(-1) for part in x.split(64, -1)], -1)
        for x in (grad.norm(dim=-1), delta.abs())
    )
    most = largest[..., None] * (dout * value[..., None] + pull)
    unit = 2.0 ** (most.log2().floor() - 29).repeat_interleave(64, -1)
    whole = (dq / unit[..., :queries, None]).round()
    assert whole.abs().amax() < 2**30
    made["SUMS"][..., :queries] = whole.mT.int()
    found = torch.full_like(dq, math.nan)
    shares = torch.full((BATCH, HEADS, queries + LENGTH), math.nan)
    shares[..., queries:] = torch.randn(BATCH, HEADS, LENGTH)
    dscale = torch.full((HEADS,), math.nan)
    given |= {"S0": call.head, "DQ0": found, "DS0": shares, "DSCALE": dscale}
    rest = {
        "MODE0": 1,
        "LOG0": (0, 0.0, 0.0, 0.0, 1.0),
        "HAS_COL0": norms,
        "ROOM": 4,
        "EACH": False,
    }
    around("after_sums", given | made, numbers, flags | rest, 4)
    assert torch.allclose(found, dq * call.head[:, None, None], rtol=1e-5, atol=1e-6)
    want = shares[..., queries:].sum((0, 2))
    if norms:
        want += (call.col[:, :, :1] * torch.where(lse == -math.inf, 0.0, moved)).sum((0, 2))
    assert torch.allclose(dscale, want, rtol=1e-4, atol=1e-4)
    if not norms:
        return
    # A scale of each query; the first key, which nobody sees, may be as large as it likes.
    call.col[:, :, 0] = -1e30
    scale, q = torch.rand(shape) + 0.5, torch.randn(BATCH, HEADS, queries, DIM)
    made["SHARES"] = torch.randint(-(2**29), 2**29, (BATCH, HEADS, 192), dtype=torch.int32)
    found.fill_(math.nan)
    shares.fill_(math.nan)
    numbers |= {"sqb0": HEADS * queries * DIM, "sqh0": queries * DIM, "sqt0": DIM}
    around(
        "after_sums",
        given | made | {"S0": scale, "Q0": q},
        numbers,
        flags | rest | {"EACH": True, "MODE0": 2},
        3,
    )
    assert torch.allclose(found, dq * scale[..., None], rtol=1e-5, atol=1e-6)
    unit = 2.0 ** ((most * largest[..., None]).log2().floor() - 29).repeat_interleave(64, -1)
    want = (q * dq).sum(-1) + (made["SHARES"] * unit)[..., :queries]
    half = -largest[..., None].square() / 4
    want += half * torch.where(lse == -math.inf, 0.0, moved)
    assert torch.allclose(shares[..., :queries], want, rtol=1e-4, atol=1e-3)


PROGRAMS = 3
NEAR = {"STILL": True, "SPREAD": True, "MODE0": 1}
FORWARDS = {
    "plain": {},
    "window": {"filter": WINDOW, "HAS_LOW": True},
    "masked-throughout": {"filter": WINDOW, "SIMPLE": False},
    "long-window": {"filter": LONG, "length": 330},
    "long-window-of-a-distance": {**NEAR, "filter": LONG, "length": 394},
    "padding": {"filter": PADDING},
    "number-per-key": {"SPREAD": True, "filter": WINDOW},
    "distance": {**NEAR, "filter": WINDOW},
    "scale-per-query": {**NEAR, "MODE0": 2},
    "far-keys": {**NEAR, "far": True},
    "hidden-values": {"filter": PADDING, "hidden": True},
    "hidden-values-of-a-distance": {**NEAR, "filter": PADDING, "hidden": True},
}


def run_forward(given, blocks):
    """By programs that take two blocks of queries in turn."""
    pairs, parts = torch.tensor(-(-blocks // 4)), torch.tensor(BATCH * HEADS)
    for program in range(PROGRAMS):
        kernels = module("hopper.kernels.forward_128", PROGRAMS, program)
        kernels.run("forward", given | {"pairs": pairs, "parts": parts}, program)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", FORWARDS)
def test_the_forward_gives_what_softmax_does(name, stages):
    flags = {"MODE0": 0, "SIMPLE": True, "SPREAD": False, "STILL": False, "HAS_LOW": False}
    flags |= FORWARDS[name]
    filter, far, hidden = (
        flags.pop(n, x) for n, x in (("filter", CAUSAL), ("far", 0), ("hidden", 0))
    )
    length = flags.pop("length", LENGTH)
    call, place = Call(filter=filter, length=length), 10
    queries = length - place
    q, v = call.q[:, :, place:].contiguous(), call.v.clone()
    if far:
        # All weights of these vanish beside that of no distance.
        q[:, :, 20:30] += 40.0
    if flags["STILL"]:
        call.col = -call.k.square().sum(-1) / 2
    scale = call.scale[:, :, place:].contiguous() if flags["MODE0"] == 2 else call.head
    each = {0: torch.tensor(0.5), 1: call.head[:, None, None]}.get(flags["MODE0"], scale[..., None])
    scores = q @ call.k.mT + (call.col[:, :, None] if flags["SPREAD"] else 0.0)
    seen = call.seen()[:, :, place:]
    scores = (scores * each).masked_fill(~seen, -math.inf)
    want, mass = scores.softmax(-1) @ v, scores.logsumexp(-1)
    if hidden:
        v[1, :, length // 3 :] = math.nan
    columns = torch.zeros(*call.col.shape, 16)
    columns[..., 0], columns[..., 3] = call.col, float(flags["MODE0"] == 2)
    out, low = torch.full_like(q, math.nan), torch.full_like(q, 7, dtype=torch.int8)
    lse, blocks = torch.full(q.shape[:3], math.nan), -(-queries // 64)
    given = {
        "Q0": Descriptor(q), "K0": Descriptor(call.k), "K1": Descriptor(columns),
        "V_": Descriptor(v), "S0": Pointer(scale), "LENGTHS": Pointer(call.lengths),
        "OUT": Descriptor(out), "LOW": Descriptor(low), "LSE": Pointer(lse), "ss0": 1,
        "num_heads": HEADS, "group0": 1, "group1": 1, "group_v": 1, "number0": 0.5,
        "num_queries": torch.tensor(queries), "num_keys": torch.tensor(length), "FILTER": (filter,),
        "E0": DIM, "V": DIM, "LOG0": (0, 0.0, 0.0, 0.0, 1.0), "STAGES": stages, **flags,
    }  # fmt: skip
    given |= dict.fromkeys(("sqb0", "skb0", "skb1", "svb"), 1)
    run_forward(given, blocks)
    assert torch.allclose(out, want, rtol=1e-4, atol=1e-5)
    assert torch.allclose(lse, mass, rtol=1e-5, atol=1e-4)
    if flags["HAS_LOW"]:
        # As if outputs had been rounded.
        kernels = module("kernels.primitives", 1, 0)
        assert torch.equal(low, kernels._taken(out, torch.bfloat16).to(torch.int8))
        got = kernels._given_back(out.bfloat16(), low, torch.bfloat16)
        assert torch.allclose(got, out, rtol=2**-15, atol=0.0)


def of_all_sizes():
    """Some are below or above the range of half precision."""
    torch.manual_seed(0)
    x = torch.randn(4000) * 10.0 ** torch.randint(-9, 5, (4000,))
    far = torch.tensor(
        [0.0, -0.0, 1e-30, -1e-42, 65519.0, 65520.0, 1e6, -1e30, math.inf, -math.inf]
    )
    return torch.cat([x, far, torch.tensor([3.4e38, math.nan])])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_rounding_error_of_the_output_is_kept(dtype):
    kernels, x = module("kernels.primitives", 1, 0), of_all_sizes()
    rounded = x.to(dtype)
    taken = kernels._taken(x, dtype)
    assert torch.equal(taken, taken.to(torch.int8))
    got, near = kernels._given_back(rounded, taken, dtype), rounded.isfinite()
    # Eight bits more than half precision has; as near as that is, where that has few of its own.
    few = torch.finfo(dtype).smallest_normal
    error, before = (got - x).abs(), (rounded.float() - x).abs()
    exact = near & (x.abs() >= few)
    assert (error <= x.abs() * torch.finfo(dtype).eps / 250)[exact].all()
    assert (error <= before)[near].all()
    # What is not finite stays what it was.
    assert torch.equal(got[~near].isnan(), rounded[~near].isnan())
    assert not got[~near].isfinite().any()


def test_rows_that_see_a_value_not_finite_are_not_finite():
    call = Call(filter=PADDING)
    call.v[0, 1, 70, 3] = math.inf
    out, lse = torch.full_like(call.q, 7.0), torch.full_like(call.lse2, 7.0)
    given = {
        "Q0": Descriptor(call.q), "K0": Descriptor(call.k), "V_": Descriptor(call.v),
        "LENGTHS": Pointer(call.lengths), "OUT": Descriptor(out), "LSE": Pointer(lse),
        "num_heads": HEADS, "group0": 1, "group1": 1, "group_v": 1, "number0": 0.5,
        "num_queries": torch.tensor(LENGTH), "num_keys": torch.tensor(LENGTH), "MODE0": 0,
        "FILTER": (PADDING,), "SIMPLE": True, "E0": DIM, "V": DIM, "STAGES": 3,
        **dict.fromkeys(("sqb0", "skb0", "skb1", "svb"), 1),
    }  # fmt: skip
    run_forward(given, 3)
    assert out[0, 1, 70:].isnan().all()
    assert out[0, 1, :70].isfinite().all()
    assert out[0, 0].isfinite().all()


@pytest.mark.parametrize(
    ("pairs", "parts", "programs"),
    [
        (1, 4, 3),
        (4, 3, 5),
        (8, 80, 132),
        (32, 32, 132),
        (3, 7, 42),
        (16, 1, 32),
        (1, 1, 2),
        (5, 2, 7),
    ],
)
def test_every_block_of_queries_has_its_turn_once(pairs, parts, programs):
    kernels, found, work = module("hopper.kernels.forward_128", programs, 0), [], []
    kernels.place.row = 0
    for program in range(programs):
        kernels.place.id, turn, steps = program, torch.tensor(0), 0
        while True:
            block, b, h, some = kernels._tile(turn, torch.tensor(pairs), torch.tensor(parts), 2)
            if not some:
                break
            found.append((int(b) * 2 + int(h), int(block)))
            turn, steps = turn + 1, steps + int(block) + 1
        work.append(steps)
    assert sorted(found) == [(part, block) for part in range(parts) for block in range(2 * pairs)]
    # By a causal filter nobody has much more to do than all have on average.
    assert max(work) <= sum(work) / programs + 2 * pairs


def test_l1_gets_the_rest_of_shared_memory(monkeypatch):
    asked, compiled = [], SimpleNamespace(metadata=SimpleNamespace(shared=183976), function=5)
    sizes = SimpleNamespace(shared_memory_per_multiprocessor=228 * 1024)
    driver = SimpleNamespace(cuFuncSetAttribute=lambda *given: asked.append(given[1:]))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: sizes)
    monkeypatch.setattr(launch.ctypes, "CDLL", lambda _: driver)
    launch._reserve_l1(compiled, torch.device("cuda"))
    assert asked == [(9, 80)]

    def nowhere(name):
        raise OSError(name)

    monkeypatch.setattr(launch.ctypes, "CDLL", nowhere)
    launch._reserve_l1(compiled, torch.device("cuda"))
    assert len(asked) == 1
