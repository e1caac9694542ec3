"""The systems of the papers, each against its defining formula written out naively."""

import math

import pytest
import torch

import mercer as mc
from mercer import nn as mn
from mercer import systems
from mercer.dispatch.choose import BACKENDS
from mercer.dispatch.problem import prepare

BATCH, LENGTH, WIDTH, HEADS = 2, 8, 16, 2
DIM = WIDTH // HEADS
TOLERANCE = 1e-10


def draw(length=LENGTH):
    return torch.randn(BATCH, length, WIDTH, dtype=torch.float64)


def sinusoid(places, width=WIDTH):
    rows = []
    for i in places:
        angles = [i / 10000 ** (2 * p / width) for p in range(width // 2)]
        rows.append([f(angle) for angle in angles for f in (math.sin, math.cos)])
    return torch.tensor(rows, dtype=torch.float64)


def in_heads(x, weight):
    return torch.einsum("btc,hdc->bhtd", x, weight.unflatten(0, (HEADS, -1)))


def inner(q, k):
    return torch.einsum("bhid,bhjd->bhij", q, k)


def average(a, log_weight, v, visible):
    """Definition 1: the mean of the visible values by their weights, and W_o."""
    queries, keys = log_weight.shape[-2:]
    # One rule for all heads, or one for each.
    rules = visible if isinstance(visible, list) else [visible]
    seen = torch.tensor(
        [[[rule(i, j) for j in range(keys)] for i in range(queries)] for rule in rules]
    )
    weight = log_weight.exp() * seen
    share = weight / weight.sum(-1, keepdim=True)
    return torch.einsum("bhij,bhjd->bihd", share, v).flatten(2) @ a.out.weight.T


IDS = torch.tensor([[0, 1, 2, 1, 3, 0, 4, 2], [4, 4, 1, 0, 2, 3, 3, 1]])


def leng2026(a, x):
    """vaswani2017 with v~_j = sum_d softmax(u / 0.4)[d] v_{j+d}, u the kernel of token j."""
    f = x + sinusoid(range(LENGTH))
    q, k, v = (in_heads(f, linear.weight) for linear in (a.query, a.key, a.value))
    kernel = (a.tokens.weight[IDS][:, :, 0, 0, 0] / 0.4).softmax(-1)  # [B, T, 3]
    mixed = torch.zeros_like(v)
    for j in range(LENGTH):
        for d in (-1, 0, 1):
            if 0 <= j + d < LENGTH:
                mixed[:, :, j] += kernel[:, j, d + 1, None, None] * v[:, :, j + d]
    return average(a, inner(q, k) / math.sqrt(DIM), mixed, everything)


def everything(i, j):
    return True


def causal(i, j):
    return j <= i


def direct_sum(a, x, t, visible, context=None, s=None):
    """k_exp(f_q + t_q, f_k + t_k) and (f_k + t_k) W_v: Eq. 4 and Eq. 7."""
    f_k = (x if context is None else context) + (t if s is None else s)
    q, k = in_heads(x + t, a.query.weight), in_heads(f_k, a.key.weight)
    return average(a, inner(q, k) / math.sqrt(DIM), in_heads(f_k, a.value.weight), visible)


def plain(a, x, scale, extra=None, visible=everything):
    """k_exp(f_q, f_k), times a factor, and f_k W_v: Eq. 3 and Eq. 8."""
    q, k = in_heads(x, a.query.weight), in_heads(x, a.key.weight)
    log = inner(q, k) * scale + (0.0 if extra is None else extra(a, q))
    return average(a, log, in_heads(x, a.value.weight), visible)


def lookup(a, q):
    """<q_i, a_clip(i - j, -c, c)> / sqrt(D), with c = 3."""
    table = a.position.kernel.table
    table = table if table.dim() == 3 else table.expand(HEADS, *table.shape)
    assert table.shape == (HEADS, 7, DIM)
    log = torch.zeros(BATCH, HEADS, LENGTH, LENGTH, dtype=torch.float64)
    for i in range(LENGTH):
        for j in range(LENGTH):
            row = table[:, max(-3, min(3, i - j)) + 3]
            log[:, :, i, j] = (q[:, :, i] * row).sum(-1) / math.sqrt(DIM)
    return log


def past_lookup(a, q):
    """The same by a table of the distances from 0 to 3 alone; all others are hidden."""
    table = a.position.kernel.table
    assert table.shape == (HEADS, 4, DIM)
    log = torch.zeros(BATCH, HEADS, LENGTH, LENGTH, dtype=torch.float64)
    for i in range(LENGTH):
        for j in range(i + 1):
            log[:, :, i, j] = (q[:, :, i] * table[:, min(3, i - j)]).sum(-1) / math.sqrt(DIM)
    return log


def dai2019(a, x):
    """((q + u) . k_j + (q + v) . W_R R_{i-j}) / sqrt(D), causal."""
    position = a.position
    r = torch.stack([sinusoid([i - j for j in range(LENGTH)]) for i in range(LENGTH)])
    r = torch.einsum("hdp,ijp->hijd", position.weight, r)
    q, k = in_heads(x, a.query.weight), in_heads(x, a.key.weight)
    log = inner(q + position.content_bias, k)
    log = log + torch.einsum("bhid,hijd->bhij", q + position.position_bias, r)
    return average(a, log / math.sqrt(DIM), in_heads(x, a.value.weight), causal)


def fixed(i, j):
    return j <= i and (i // 4 == j // 4 or j % 4 >= 2)


def strided(i, j):
    return j <= i and (i - j < 3 or (i - j) % 3 == 0)


# Sparse Transformer, section 4.3: A^(1) and A^(2) of the strided pattern, each by one head; of the
# fixed one, the same block and distinct places in a block, as its authors preferred.
STRIDED = [
    lambda i, j: max(0, i - 2) <= j <= i,
    lambda i, j: j <= i and (i - j) % 3 == 0,
]
FIXED = [
    lambda i, j: j <= i and (i // 4 == j // 4 or j % 4 in (2, 3)),
    lambda i, j: j <= i and (i // 4 == j // 4 or j % 4 in (0, 1)),
]


def parmar2018(a, x):
    """Query blocks of 3, each with its memory block: its own pixels and the 2 before them.

    Pixels row by row on a grid of 2 x 4; half of the embedding is the row, half the column.
    """
    rows = sinusoid([i // 4 for i in range(LENGTH)], WIDTH // 2)
    columns = sinusoid([i % 4 for i in range(LENGTH)], WIDTH // 2)
    f = x + torch.cat([rows, columns], -1)
    out = []
    for first in range(0, LENGTH, 3):
        block = range(first, min(first + 3, LENGTH))
        memory = range(max(first - 2, 0), block.stop)
        q = in_heads(f[:, block.start : block.stop], a.query.weight)
        k, v = (in_heads(f[:, memory.start : memory.stop], w.weight) for w in (a.key, a.value))
        later = torch.tensor([[j > i for j in memory] for i in block])
        share = (inner(q, k) / math.sqrt(DIM)).masked_fill(later, -math.inf).softmax(-1)
        out.append((share @ v).transpose(1, 2).flatten(2) @ a.out.weight.T)
    return torch.cat(out, 1)


def tsai2019(a, x):
    """exp(<f_q W_F, f_k W_F> / sqrt(D)) exp(<t_q W_T, t_k W_T> / sqrt(D)) and f_k W_v: Eq. 9."""
    f = in_heads(x, a.query.weight)
    t = in_heads(sinusoid(range(LENGTH))[None], a.position.query.weight)
    log = (inner(f, f) + inner(t, t)) / math.sqrt(DIM)
    return average(a, log, in_heads(x, a.value.weight), everything)


def kundu2026(a, x):
    """exp(-|f_q - f_k|^2 / 2 s_h^2) and f_k themselves, causal: no projection but W_o."""
    f = torch.stack(x.split(DIM, -1), 1)
    apart = (f[:, :, :, None] - f[:, :, None]).square().sum(-1)
    return average(a, -apart / (2 * a.log_bandwidth.exp()[:, None, None] ** 2), f, causal)


# What is chosen small enough to show at this length, and the formula.
SYSTEMS = {
    "vaswani2017": (
        {},
        lambda a, x: direct_sum(a, x, sinusoid(range(LENGTH)), everything),
    ),
    "shaw2018": ({"max_distance": 3}, lambda a, x: plain(a, x, DIM**-0.5, lookup)),
    "huang2018": (
        {"max_distance": 3},
        lambda a, x: plain(a, x, DIM**-0.5, past_lookup, causal),
    ),
    "dai2019": ({}, dai2019),
    "child2019": (
        {"stride": 3, "max_length": LENGTH},
        lambda a, x: direct_sum(a, x, a.position.embedding.weight, STRIDED),
    ),
    "parmar2018": ({"height": 2, "width": 4, "block": 3, "memory": 2}, parmar2018),
    "lee2018": ({}, lambda a, x: plain(a, x, WIDTH**-0.5)),
    "wang2018": ({}, lambda a, x: plain(a, x, 1.0)),
    "tsai2019multimodal": (
        {},
        lambda a, x: direct_sum(a, x, sinusoid(range(LENGTH)), causal),
    ),
    "tsai2019": ({}, tsai2019),
    "kundu2026": ({}, kundu2026),
    "leng2026": ({"vocab_size": 5}, leng2026),
}
PARTS = ("feature space", "kernel", "value", "filter")


def build(name, **options):
    attention = systems.build(name, WIDTH, HEADS, **(SYSTEMS[name][0] | options)).double()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return attention


def call(a, x):
    return a(x, token_ids=IDS) if getattr(a, "tokens", None) is not None else a(x)


def close(got, want):
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)


def taking(a, x):
    """The backends that run this call, by asking each."""
    q, k, v, filter = a.parts(x)
    tasks = prepare(a.joined_kernel, q, k, v, filter, 0.0, False, "auto").tasks()
    return [name for name, b in BACKENDS.items() if all(b.refuses(task) is None for task in tasks)]


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_is_its_formula(name):
    a, x = build(name), draw()
    close(call(a, x), SYSTEMS[name][1](a, x))


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_gives_the_same_on_every_backend(name):
    a, x = build(name, backend="reference"), draw()
    want = call(a, x)
    grads = torch.autograd.grad(want.square().sum(), list(a.parameters()))
    names = taking(a, x)
    assert "chunked" in names
    assert ("sdpa" in names) == (name not in ("shaw2018", "huang2018"))
    for backend in (*names, "auto"):
        a.backend = backend
        got = call(a, x)
        close(got, want)
        for g, w in zip(
            torch.autograd.grad(got.square().sum(), list(a.parameters())), grads, strict=True
        ):
            close(g, w)


def test_every_system_is_tested_here():
    assert set(SYSTEMS) == set(systems.SYSTEMS)


@pytest.mark.parametrize("name", ["vaswani2017", "shaw2018", "tsai2019"])
def test_a_decoder_is_the_system_with_a_causal_filter(name):
    decoder, encoder, x = build(name, filter=mc.Causal()), build(name), draw()
    encoder.load_state_dict(decoder.state_dict())
    for length in range(1, LENGTH + 1):
        close(decoder(x)[:, length - 1], encoder(x[:, :length])[:, -1])


def test_every_row_of_huang2018_learns_and_equals_the_whole_table():
    """The original has rows for earlier keys alone; for later ones no causal layer has a use."""
    a, whole, x = build("huang2018"), build("huang2018", causal=False), draw()
    rows = a.position.kernel.table
    assert torch.autograd.grad(a(x).square().sum(), rows)[0].ne(0).any(-1).all()
    state = a.state_dict() | {"position.kernel.table": torch.nn.functional.pad(rows, (0, 0, 3, 0))}
    whole.load_state_dict(state)
    close(whole(x), a(x))
    both = systems.build("huang2018", WIDTH, HEADS, filter=mc.Full()).position.kernel.table
    assert both.shape == (HEADS, 1025, DIM)
    # A later key, where a filter shows it, has the weight 1.
    close(whole(x, filter=mc.Full()), a(x, filter=mc.Full()))


@pytest.mark.parametrize("merged", [False, True])
def test_child2019_has_two_patterns_that_may_be_merged(merged):
    t = {"pattern": "fixed", "stride": 4, "summary": 2}
    for options, visible in (({}, strided if merged else STRIDED), (t, fixed if merged else FIXED)):
        a, x = build("child2019", merged=merged, **options), draw()
        close(a(x), direct_sum(a, x, a.position.embedding.weight, visible))
    four = systems.build("child2019", WIDTH, 4, pattern="fixed", stride=6, summary=2)
    seen = four.filter.mask(12, 12)[0, :, 11]
    assert [row.nonzero().flatten().tolist() for row in seen] == [
        [4, 5, 6, 7, 8, 9, 10, 11], [2, 3, 6, 7, 8, 9, 10, 11], [0, 1, 6, 7, 8, 9, 10, 11],
        [4, 5, 6, 7, 8, 9, 10, 11],
    ]  # fmt: skip
    assert systems.build("child2019", WIDTH, 1).filter == mc.Strided(32)


def test_dai2019_sees_as_much_memory_as_it_is_given():
    a, x, memory = build("dai2019", memory=2), draw(), mn.SegmentMemory(5)
    a(x[:, :6], cache=memory)
    close(a(x[:, 6:], cache=memory), a(x[:, 4:], filter=mc.Causal())[:, 2:])


@pytest.mark.parametrize("keys", [5, 11])
def test_tsai2019multimodal_attends_from_one_modality_to_another(keys):
    """The future is hidden as the authors' code does it: what is above diagonal 1 + |K - Q|."""
    a, language, vision = build("tsai2019multimodal"), draw(), draw(keys)
    t, s = sinusoid(range(LENGTH)), sinusoid(range(keys))

    def seen(i, j):
        return j <= i + abs(keys - LENGTH)

    close(a(language, vision), direct_sum(a, language, t, seen, vision, s))


class MultiheadAttentionBlock(torch.nn.Module):
    """That of the Set Transformer's authors, without norms: the scores are divided by sqrt(width),
    and the queries are added to the result."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.fc_q, self.fc_k, self.fc_v, self.fc_o = (
            torch.nn.Linear(width, width) for _ in range(4)
        )

    def forward(self, x, y):
        q, k, v = self.fc_q(x), self.fc_k(y), self.fc_v(y)
        size = q.shape[-1] // self.heads
        q, k, v = (torch.cat(z.split(size, 2), 0) for z in (q, k, v))
        share = torch.softmax(q.bmm(k.transpose(1, 2)) / math.sqrt(size * self.heads), 2)
        o = torch.cat((q + share.bmm(v)).split(len(x), 0), 2)
        return o + torch.relu(self.fc_o(o))


def test_lee2018_is_the_attention_of_the_set_transformers_blocks():
    theirs = MultiheadAttentionBlock(WIDTH, HEADS).double()
    a = systems.build("lee2018", WIDTH, HEADS, bias=True).double()
    assert sum(p.numel() for p in a.parameters()) == sum(p.numel() for p in theirs.parameters())
    names = {"query": theirs.fc_q, "key": theirs.fc_k, "value": theirs.fc_v, "out": theirs.fc_o}
    for name, linear in names.items():
        getattr(a, name).load_state_dict(linear.state_dict())
    x, y, last = draw(3), draw(), a.out
    # Their block has a sum where a layer has its output projection.
    a.out = torch.nn.Identity()
    o = a.query(x) + a(x, y)
    close(o + torch.relu(last(o)), theirs(x, y))


def test_systems_have_the_parameters_of_their_originals():
    """Four matrices; positions are sinusoids, but for the Sparse Transformer's learned ones."""
    for name in ("lee2018", "parmar2018", "tsai2019multimodal"):
        found = sum(p.numel() for p in systems.build(name, WIDTH, HEADS).parameters())
        assert found == 4 * WIDTH**2, name
    sparse = systems.build("child2019", WIDTH, HEADS, max_length=50)
    assert sum(p.numel() for p in sparse.parameters()) == 4 * WIDTH**2 + 50 * WIDTH


def test_default_sizes():
    assert systems.build("shaw2018", WIDTH, HEADS).position.kernel.table.shape == (33, DIM)
    assert systems.build("huang2018", WIDTH, HEADS).position.kernel.table.shape == (2, 513, DIM)
    assert systems.build("dai2019", WIDTH, HEADS).filter == mc.Memory(150)
    assert systems.build("child2019", WIDTH, HEADS, merged=True).filter == mc.Strided(32)
    assert systems.build("parmar2018", WIDTH, HEADS).filter == mc.Blocks(256, 256)
    assert systems.build("lee2018", WIDTH, HEADS).kernel.scale == WIDTH**-0.5


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vaswani2017", {"filter": mc.Window(2, 0)}),
        ("shaw2018", {"value": "content+position"}),
        ("huang2018", {"filter": mc.Window(2, 0)}),
        ("dai2019", {"kernel": mc.RBF(2.0)}),
        ("child2019", {"filter": mc.Causal()}),
        ("parmar2018", {"position": mn.NoPosition(), "value": "content"}),
        ("lee2018", {"kernel": mc.Polynomial(2)}),
        ("wang2018", {"kernel": mc.Exponential()}),
        ("tsai2019multimodal", {"position": mn.ProductKernel()}),
        ("tsai2019", {"position": mn.Rotary()}),
        ("kundu2026", {"filter": mc.Full()}),
    ],
    ids=lambda part: part if isinstance(part, str) else "-".join(part),
)
def test_options_override_parts(name, options):
    own, other, x = build(name), build(name, **options), draw()
    with torch.no_grad():
        shared = dict(own.named_parameters())
        for key, parameter in other.named_parameters():
            if key in shared:
                parameter.copy_(shared[key])
    assert (own(x) - other(x)).abs().max() > 1e-4
    for key, value in options.items():
        here = other.value_function if key == "value" else getattr(other, key)
        assert here == value if key in ("value", "filter") else type(here) is type(value)


def test_options_reach_the_module():
    a = systems.build("vaswani2017", WIDTH, 4, num_kv_heads=2, bias=True, dropout=0.1)
    assert (a.num_kv_heads, a.dropout) == (2, 0.1)
    assert a.out.bias.shape == (WIDTH,)


def test_tsai2019_untied_is_no_longer_valid():
    assert systems.build("tsai2019", WIDTH, HEADS).valid
    assert not systems.build("tsai2019", WIDTH, HEADS, symmetric=False).valid


def test_tsai2019_saves_a_third_of_the_matrices_of_dai2019():
    def matrices(name):
        named = systems.build(name, WIDTH, HEADS).named_parameters()
        kept = {n: p for n, p in named if n not in ("value.weight", "out.weight")}
        return sum(p.numel() for n, p in kept.items() if n.endswith("weight"))

    assert 3 * matrices("tsai2019") == 2 * matrices("dai2019") == 6 * WIDTH**2


@pytest.mark.parametrize("base", ["shaw2018", "dai2019", "child2019", "tsai2019"])
def test_leng2026_adds_token_kernels_to_any_base(base):
    """At the start of free taps it is the base; what it is given reaches the base."""
    tokens = mn.TokenKernels(5, temperature=None)
    a = systems.build("leng2026", WIDTH, HEADS, base=base, tokens=tokens, bias=True).double()
    options = {"merged": True} if base == "child2019" else {}
    other = systems.build(base, WIDTH, HEADS, bias=True, **options).double()
    other.load_state_dict({n: p for n, p in a.state_dict().items() if n != "tokens.weight"})
    x = draw()
    close(call(a, x), other(x))
    torch.nn.init.normal_(tokens.weight)
    assert (call(a, x) - other(x)).abs().max() > 1e-3


def test_leng2026_has_the_vocabulary_of_gpt2_by_default():
    a = systems.build("leng2026", WIDTH, HEADS)
    assert a.tokens.weight.shape == (50257, 1, 1, 1, 3)
    assert "values by 3 taps a token" in str(systems.example(a, 1, 4))
    for base in ("leng2026", "kundu2026"):
        with pytest.raises(ValueError, match=f"must be another system .*not '{base}'"):
            systems.build("leng2026", WIDTH, HEADS, base=base)
    with pytest.raises(ValueError, match="no system 'gpt2'"):
        systems.build("leng2026", WIDTH, HEADS, base="gpt2")


def test_an_unknown_system_raises_with_the_names():
    with pytest.raises(ValueError, match="no system 'vaswani2018'; did you mean 'vaswani2017'"):
        systems.build("vaswani2018", WIDTH, HEADS)
    with pytest.raises(ValueError, match="no system 'bert'") as raised:
        systems.build("bert", WIDTH, HEADS)
    assert all(name in str(raised.value) for name in systems.SYSTEMS)


def test_an_unknown_pattern_raises():
    with pytest.raises(ValueError, match=r"pattern must be 'strided' or 'fixed'.*'random'"):
        systems.build("child2019", WIDTH, HEADS, pattern="random")


@pytest.fixture(scope="module")
def table():
    return systems.table()


def test_the_table_states_the_four_parts_of_each_system(table):
    assert len(table) == len(systems.SYSTEMS)
    assert [row["system"] for row in table] == list(systems.SYSTEMS)
    assert all(row[part] for row in table for part in PARTS)
    by_name = {row["system"]: tuple(row[part] for part in PARTS) for row in table}
    assert by_name["vaswani2017"] == (
        "F x T",
        "k_exp(f_q + t_q, f_k + t_k)",
        "(f_k + t_k) W_v",
        "all; causal in the decoder",
    )
    spaces = [by_name[name][0] for name in ("parmar2018", "lee2018", "wang2018")]
    assert spaces == ["F x H x W", "F", "F"]


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_table_says_of_the_values_what_the_system_does(name, table):
    (row,) = (row for row in table if row["system"] == name)
    a = build(name)
    if not hasattr(a, "value"):
        assert row["value"] == "f_k"
        return
    uses_position = a.value_function == "content+position"
    assert row["value"].startswith("(f_k + ") == uses_position
    assert (row["value"] == "f_k W_v") != uses_position


def test_of_the_table_only_kernels_of_the_inputs_themselves_are_valid(table):
    for column in ("symmetric", "valid"):
        valid = {row["system"] for row in table if row[column] == "yes"}
        assert valid == {"tsai2019", "kundu2026"}
        assert {row[column] for row in table} == {"yes", "no"}


def test_the_table_says_what_a_system_lowers_to(table):
    lowered = {row["system"]: row["lowers to"] for row in table}
    assert lowered["vaswani2017"] == "a dot product of 64"
    assert lowered["tsai2019"] == "a dot product of 128"
    assert "table" in lowered["shaw2018"]


def test_the_table_prints_its_columns_and_rows(table):
    lines = str(table).splitlines()
    assert len(lines) == len(systems.SYSTEMS) + 1
    assert all(part in lines[0] for part in (*PARTS, "system", "valid"))
    assert [line.split()[0] for line in lines[1:]] == list(systems.SYSTEMS)
