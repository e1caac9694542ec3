import pytest
import torch
from catalogue import DOCUMENTS, FILTERS

import mercer as mc
from mercer.filters import CausalAcross, Columns, Diagonals
from mercer.testing import check_filter

K = 11

# The definitions of the design, for one query at place i and one key at place j.
RULES = {
    "full": lambda b, i, j, start: True,
    "causal": lambda b, i, j, start: j <= i,
    "window": lambda b, i, j, start: i - 3 <= j <= i + 1,
    "window-left": lambda b, i, j, start: i - 2 <= j <= i,
    "window-open": lambda b, i, j, start: j <= i + 2,
    "memory": lambda b, i, j, start: start - 2 <= j <= i,
    "strided": lambda b, i, j, start: j <= i and (i - j < 3 or (i - j) % 3 == 0),
    "fixed": lambda b, i, j, start: j <= i and (i // 4 == j // 4 or j % 4 >= 2),
    "blocks": lambda b, i, j, start: j <= i and j >= i // 4 * 4 - 2,
    "padding": lambda b, i, j, start: j < [7, 0][b],
    "documents": lambda b, i, j, start: bool(DOCUMENTS[b, i] == DOCUMENTS[b, j]),
    "heads": lambda b, i, j, start: i - 3 <= j <= i,
    "mask": lambda b, i, j, start: (121 * b + 11 * i + j) * 7 % 11 < 6,
    "packed": lambda b, i, j, start: j <= i and bool(DOCUMENTS[b, i] == DOCUMENTS[b, j]),
    "either": lambda b, i, j, start: (
        (j <= i and (i - j < 4 or (i - j) % 4 == 0)) or (i <= j <= i + 2 and j < [11, 5][b])
    ),
}


# Of the heads that see something else than the first.
LATER_HEADS = {"heads": [lambda b, i, j, start: j <= i]}


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("num_queries", [K, 4, 1])
def test_a_filter_follows_its_definition(name, num_queries):
    rules = [RULES[name], *LATER_HEADS.get(name, [])]
    mask = FILTERS[name]().mask(num_queries, K).expand(2, len(rules), num_queries, K)
    start = K - num_queries
    for b in range(2):
        for h, rule in enumerate(rules):
            for n in range(num_queries):
                for j in range(K):
                    want = rule(b, n + start, j, start)
                    assert bool(mask[b, h, n, j]) == want, (b, h, n, j)


@pytest.mark.parametrize("name", FILTERS)
def test_all_forms_of_a_filter_agree(name):
    check_filter(FILTERS[name](), lengths=(1, 7, K))


@pytest.mark.parametrize("name", FILTERS)
def test_the_block_mask_of_flex_attention_agrees(name):
    """From the same definition; its blocks of 128 hide nothing that is visible."""
    from torch.nn.attention.flex_attention import create_mask

    filter = FILTERS[name]()
    block_mask = filter.block_mask(4, K)
    dense = create_mask(filter.mask_mod(4, K), filter.batch, filter.heads, 4, K, device="cpu")
    assert torch.equal(dense, filter.mask(4, K))
    assert bool(block_mask.to_dense().any()) == bool(dense.any())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_runs_a_block_mask():
    from torch.nn.attention.flex_attention import flex_attention

    filter = mc.Causal() & mc.Documents(DOCUMENTS)
    q, k, v = (torch.randn(2, 1, K, 16) for _ in range(3))
    got = flex_attention(q, k, v, block_mask=filter.block_mask(K, K))
    want = mc.smooth(mc.Exponential(), q, k, v, filter=filter, backend="reference")
    assert (got - want).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("filter", "queries", "keys", "kind"),
    [
        (mc.Causal(), 1, 9, "Full"),
        (mc.Causal(), 9, 9, "Causal"),
        (mc.Window(-1, -1), 9, 9, "Full"),
        (mc.Window(-1, 0), 9, 9, "Causal"),
        (mc.Window(8, 0), 9, 9, "Causal"),
        (mc.Window(7, 0), 9, 9, "Window"),
        (mc.Memory(3), 4, 7, "Causal"),
        (mc.Memory(2), 4, 7, "Memory"),
        (mc.Blocks(3, 6), 9, 9, "Causal"),
        (mc.Blocks(3, 5), 9, 9, "Blocks"),
        (mc.Blocks(3, 1), 3, 9, "Memory"),
        (mc.Blocks(3, 1), 4, 9, "Blocks"),
        (mc.Heads([mc.Causal(), mc.Window(8, 0)]), 9, 9, "Causal"),
        (mc.Heads([mc.Causal(), mc.Window(7, 0)]), 9, 9, "Heads"),
        (CausalAcross(), 5, 9, "Causal"),
        (CausalAcross(), 7, 5, "Window"),
        (mc.Padding([9, 9]) & mc.Causal(), 9, 9, "Causal"),
        (mc.Causal() & mc.Window(2, 2), 9, 9, "And"),
    ],
    ids=repr,
)
def test_filters_are_simplified_where_lengths_allow(filter, queries, keys, kind):
    simple = filter.simplify(queries, keys)
    assert type(simple).__name__ == kind
    assert torch.equal(
        simple.mask(queries, keys).expand(2, 2, -1, -1),
        filter.mask(queries, keys).expand(2, 2, -1, -1),
    )


@pytest.mark.parametrize(
    ("filter", "sees"),
    [
        (Diagonals(3), lambda i, j: j <= i and (i - j) % 3 == 0),
        (Columns(5, 1, 2), lambda i, j: j <= i and j % 5 in (1, 2)),
        (Columns(4, 3, 1), lambda i, j: j <= i and j % 4 == 3),
        (CausalAcross(), lambda i, j: j <= i),
    ],
    ids=["diagonals", "columns", "column", "across"],
)
def test_parts_of_sparse_patterns(filter, sees):
    mask = filter.mask(K, K)[0, 0]
    assert mask.tolist() == [[sees(i, j) for j in range(K)] for i in range(K)]
    check_filter(filter, lengths=(1, 7, K, 16))


def test_the_future_across_sequences():
    """As MulT has it: triu(1 + |K - Q|) is hidden, rows and columns counted from the first."""
    for queries, keys in ((5, 9), (9, 5), (7, 5), (4, 4), (1, 3), (3, 1)):
        hidden = torch.ones(queries, keys).triu(1 + abs(keys - queries)).bool()
        assert torch.equal(CausalAcross().mask(queries, keys)[0, 0], ~hidden)


def test_heads_are_checked():
    with pytest.raises(ValueError, match="needs a filter for each head, got none"):
        mc.Heads([])
    with pytest.raises(ValueError, match="each the same for all heads"):
        mc.Heads([mc.Heads([mc.Causal()])])
    q = torch.randn(1, 3, 4, 2)
    with pytest.raises(ValueError, match="was made for 2 heads, but the queries have 3"):
        mc.smooth(mc.RBF(), q, q, q, filter=mc.Heads([mc.Causal(), mc.Full()]))
    with pytest.raises(ValueError, match="length must be a whole number >= 1, got 0"):
        mc.Blocks(0)
    with pytest.raises(ValueError, match="memory must be a whole number >= 0, got -1"):
        mc.Blocks(3, -1)


def test_sdpa_gets_its_causal_flag_only_where_it_means_the_same():
    assert mc.Causal().sdpa(5, 5) == {"is_causal": True, "attn_mask": None}
    assert mc.Causal().sdpa(1, 5) == {"is_causal": False, "attn_mask": None}
    short = mc.Causal().sdpa(3, 5)
    assert not short["is_causal"]
    assert torch.equal(short["attn_mask"], mc.Causal().mask(3, 5))
    assert mc.Padding([3, 2]).sdpa(5, 5)["attn_mask"].shape == (2, 1, 1, 5)


def test_joined_filters_flatten_and_read_well():
    filter = mc.Causal() & mc.Window(3, 0) & (mc.Full() | mc.Strided(2))
    assert len(filter.filters) == 3
    assert repr(filter) == ("Causal() & Window(left=3, right=0) & (Full() | Strided(stride=2))")
    assert filter.causal
    assert not (mc.Causal() | mc.Full()).causal


def test_a_users_own_filter_runs_everywhere():
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Even(mc.Filter):
        """Even keys only."""

        offset: int = 0

        def sees(self, b, i, j, start):
            return (j + self.offset) % 2 == 0

    check_filter(Even())
    q, k, v = (torch.randn(2, 2, 9, 4, dtype=torch.float64) for _ in range(3))
    outs = [
        mc.smooth(mc.RBF().double(), q, k, v, filter=Even(1) & mc.Causal(), backend=b)
        for b in ("reference", "chunked", "sdpa")
    ]
    assert (outs[0][:, :, 0] == 0).all()
    assert (outs[0] - outs[1]).abs().max() < 1e-12
    assert (outs[0] - outs[2]).abs().max() < 1e-12


def test_a_users_filter_named_like_ours_changes_nothing_of_ours():
    from dataclasses import dataclass

    q = torch.randn(1, 1, 9, 4)
    before = mc.smooth(mc.RBF(), q, q, q, filter=mc.Causal(), backend="chunked")

    @dataclass(frozen=True)
    class Causal(mc.Filter):
        """Everything, whatever its name says."""

        def sees(self, b, i, j, start):
            return j >= 0

    after = mc.smooth(mc.RBF(), q, q, q, filter=mc.Causal(), backend="chunked")
    assert torch.equal(before, after)
    theirs = mc.smooth(mc.RBF(), q, q, q, filter=Causal(), backend="chunked")
    assert (theirs - mc.smooth(mc.RBF(), q, q, q, backend="chunked")).abs().max() < 1e-6


@pytest.mark.parametrize(
    "filter",
    [
        mc.Causal(),
        mc.Causal() & mc.Window(3, 0) | mc.Fixed(stride=4),
        mc.Causal() & mc.Padding(torch.tensor([3])),
    ],
    ids=str,
)
def test_a_compiled_call_may_write_a_filter(filter):
    """Why a backend does not run is a text with the filter in it."""

    def length(x):
        return x + len(f"{filter!r}")

    torch.compiler.reset()
    compiled = torch.compile(length, backend="eager", fullgraph=True)
    assert compiled(torch.zeros(())) > 0
