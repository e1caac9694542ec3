"""Each position inside KernelAttention against its formula, written out naively in float64."""

import math

import pytest
import torch

import mercer as mc
from mercer import nn as mn
from mercer.backends.chunked import backend as chunked
from mercer.backends.triton import sinusoids as scores
from mercer.dispatch.choose import BACKENDS
from mercer.dispatch.problem import prepare
from mercer.term import sinusoids

BATCH, LENGTH, WIDTH, HEADS = 2, 6, 24, 3
DIM = WIDTH // HEADS
TOLERANCE = 1e-10

STRINGS = {
    "none": mn.NoPosition,
    "direct-sum": mn.DirectSum,
    "lookup": mn.LookupTable,
    "relative-sinusoid": mn.RelativeSinusoid,
    "product": mn.ProductKernel,
    "rotary": mn.Rotary,
    "alibi": mn.ALiBi,
}
LEARNING = {
    "direct sum, learned": lambda: mn.DirectSum(mn.Learned(LENGTH)),
    "lookup": lambda: mn.LookupTable(2),
    "lookup per head": lambda: mn.LookupTable(2, per_head=True),
    "relative sinusoid": lambda: mn.RelativeSinusoid(),
    "product": lambda: mn.ProductKernel(),
    "product, learned": lambda: mn.ProductKernel(mn.Learned(LENGTH)),
    "product, RBF": lambda: mn.ProductKernel(kernel=mc.RBF(on="position")),
    "product, not symmetric": lambda: mn.ProductKernel(symmetric=False),
    "alibi, trainable": lambda: mn.ALiBi(trainable=True),
    "grid": lambda: mn.Grid2D(2, 3),
}


def make(position, **options):
    attention = mn.KernelAttention(WIDTH, HEADS, position=position, **options).double()
    # Some start at zero, where a wrong formula could hide.
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return attention


def draw(length=LENGTH, width=WIDTH):
    return torch.randn(BATCH, length, width, dtype=torch.float64)


def sinusoid(places, width, base=10000.0):
    """t_i[2p] = sin(i / base^(2p / P)), t_i[2p + 1] = cos of the same."""
    rows = []
    for i in places:
        angles = [i / base ** (2 * p / width) for p in range(width // 2)]
        rows.append([f(angle) for angle in angles for f in (math.sin, math.cos)])
    return torch.tensor(rows, dtype=torch.float64)


def in_heads(x, weight, heads=HEADS):
    """x W in heads, [B, H, T, D]."""
    return torch.einsum("btc,hdc->bhtd", x, weight.unflatten(0, (heads, -1)))


def dots(q, k):
    return torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.shape[-1])


def away(queries, keys):
    """i - j, with the last query beside the last key."""
    return [[i + keys - queries - j for j in range(keys)] for i in range(queries)]


def average(attention, log_weight, v, causal):
    """sum_j w_ij v_j / sum_j w_ij, then the output projection."""
    weight = log_weight.exp()
    if causal:
        queries, keys = weight.shape[-2:]
        weight = weight * (torch.tensor(away(queries, keys)) >= 0)
    share = weight / weight.sum(-1, keepdim=True)
    out = torch.einsum("bhij,bhjd->bihd", share, v).flatten(2)
    return out @ attention.out.weight.T


def content(attention, x, context=None):
    """<f_q W_q, f_k W_k> / sqrt(D) and f_k W_v, with the queries."""
    context = x if context is None else context
    q, k = in_heads(x, attention.query.weight), in_heads(context, attention.key.weight)
    return q, dots(q, k), in_heads(context, attention.value.weight)


def gradients(attention, out):
    steer = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    parameters = list(attention.parameters())
    grads = torch.autograd.grad((out * steer).sum(), parameters, allow_unused=True)
    pairs = zip(parameters, grads, strict=True)
    return [torch.zeros_like(p) if g is None else g for p, g in pairs]


def taking(attention, inputs, filter):
    """The backends that run this call, by asking each."""
    q, k, v, _ = attention.parts(*inputs)
    tasks = prepare(attention.joined_kernel, q, k, v, filter, 0.0, False, "auto").tasks()
    return [name for name, b in BACKENDS.items() if all(b.refuses(task) is None for task in tasks)]


def agrees(attention, formula, *inputs):
    """Outputs and the gradients of all parameters, on every backend, all and causal."""
    for causal, filter in ((False, mc.Full()), (True, mc.Causal())):
        want = formula(attention, *inputs, causal)
        want_grads = gradients(attention, want)
        for backend in ("auto", "reference", *taking(attention, inputs, filter)):
            attention.backend = backend
            got = attention(*inputs, filter=filter)
            close(got, want)
            for got_grad, want_grad in zip(gradients(attention, got), want_grads, strict=True):
                close(got_grad, want_grad)


def close(got, want):
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)


def test_no_position_is_the_kernel_of_content():
    def formula(a, x, causal):
        _, log, v = content(a, x)
        return average(a, log, v, causal)

    agrees(make(mn.NoPosition()), formula, draw())


def test_no_position_is_permutation_equivariant():
    attention, x, order = make(mn.NoPosition()), draw(), torch.tensor([3, 0, 5, 1, 4, 2])
    close(attention(x[:, order]), attention(x)[:, order])


@pytest.mark.parametrize("value", ["content", "content+position"], ids=["Eq. 8", "Eq. 7"])
@pytest.mark.parametrize("learned", [False, True], ids=["sinusoid", "learned"])
def test_direct_sum_is_equation_4(learned, value):
    embedding = mn.Learned(LENGTH + 2) if learned else mn.Sinusoid()

    def formula(a, x, causal):
        t = a.position.embedding.weight[:LENGTH] if learned else sinusoid(range(LENGTH), WIDTH)
        q, k = in_heads(x + t, a.query.weight), in_heads(x + t, a.key.weight)
        v = in_heads(x + t if value == "content+position" else x, a.value.weight)
        return average(a, dots(q, k), v, causal)

    agrees(make(mn.DirectSum(embedding), value=value), formula, draw())


def test_the_sinusoid_has_a_base():
    attention = make(mn.DirectSum(mn.Sinusoid(base=50.0)))

    def formula(a, x, causal):
        t = sinusoid(range(LENGTH), WIDTH, base=50.0)
        q, k = in_heads(x + t, a.query.weight), in_heads(x + t, a.key.weight)
        return average(a, dots(q, k), in_heads(x, a.value.weight), causal)

    agrees(attention, formula, draw())


def lookup_scores(attention, q, queries, keys):
    """<q_i, a_clip(i - j)> / sqrt(D), one pair at a time."""
    table = attention.position.kernel.table
    table = table if table.dim() == 3 else table.expand(HEADS, *table.shape)
    clip = (table.shape[1] - 1) // 2
    columns = []
    for i in range(queries):
        for j in range(keys):
            distance = max(-clip, min(clip, away(queries, keys)[i][j]))
            columns.append((q[:, :, i] * table[:, distance + clip]).sum(-1) / math.sqrt(DIM))
    return torch.stack(columns, -1).unflatten(-1, (queries, keys))


@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per head"])
@pytest.mark.parametrize("max_distance", [0, 2, 9], ids=["clip 0", "clip 2", "clip beyond T"])
def test_lookup_table_is_equation_6(max_distance, per_head):
    attention = make(mn.LookupTable(max_distance, per_head=per_head))
    rows = (2 * max_distance + 1, DIM)
    assert attention.position.kernel.table.shape == ((HEADS, *rows) if per_head else rows)

    def formula(a, x, causal):
        q, log, v = content(a, x)
        return average(a, log + lookup_scores(a, q, LENGTH, LENGTH), v, causal)

    agrees(attention, formula, draw())


def transformer_xl_scores(attention, q, k, queries, keys):
    """((q_i + u) . k_j + (q_i + v) . W_R R_{i-j}) / sqrt(D), as Transformer-XL writes it."""
    position = attention.position
    u = position.content_bias if position.biases else torch.zeros(HEADS, 1, DIM).double()
    v = position.position_bias if position.biases else torch.zeros(HEADS, 1, DIM).double()
    width = WIDTH if position.width == "model" else DIM
    rows = [sinusoid(row, width) for row in away(queries, keys)]
    r = torch.einsum("hdp,ijp->hijd", position.weight, torch.stack(rows))
    score = torch.einsum("bhid,bhjd->bhij", q + u, k)
    return (score + torch.einsum("bhid,hijd->bhij", q + v, r)) / math.sqrt(DIM)


@pytest.mark.parametrize("biases", [True, False], ids=["biases", "no biases"])
@pytest.mark.parametrize("width", ["head", "model"])
def test_relative_sinusoid_is_equation_5(biases, width):
    attention = make(mn.RelativeSinusoid(biases=biases, width=width))

    def formula(a, x, causal):
        q, k = in_heads(x, a.query.weight), in_heads(x, a.key.weight)
        log = transformer_xl_scores(a, q, k, LENGTH, LENGTH)
        return average(a, log, in_heads(x, a.value.weight), causal)

    agrees(attention, formula, draw())


@pytest.mark.parametrize("filter", [mc.Causal(), mc.Full(), mc.Window(3, 1)], ids=str)
def test_many_sinusoids_may_be_scores_of_distances(filter, monkeypatch):
    """What a GPU does with more sinusoids than a fused kernel takes features."""
    attention = make(mn.RelativeSinusoid(), filter=filter)
    x = draw().requires_grad_()
    steer = torch.randn_like(x)
    wanted = [x, *attention.parameters()]

    def run():
        out = attention(x)
        return [out, *torch.autograd.grad(out, wanted, steer)]

    def tasks():
        q, k, v, seen = attention.parts(x)
        return prepare(attention.joined_kernel, q, k, v, seen, 0.0, False, "auto").tasks()

    def biased(width):
        return [bool(scores.with_table(task, width).term.biases) for task in tasks()]

    want = run()
    assert biased(WIDTH) == [False]
    assert biased(WIDTH - 1) == [True]
    # Where there are too many, they stay features.
    for limit in ("MAX_KEYS", "MAX_SCORES"):
        with monkeypatch.context() as patch:
            patch.setattr(scores, limit, LENGTH - 1)
            assert biased(WIDTH - 1) == [False]
    plain = chunked.run

    def with_tables(tasks):
        return plain([scores.with_table(task, WIDTH - 1) for task in tasks])

    monkeypatch.setattr(chunked, "run", with_tables)
    attention.backend = "chunked"
    for a, b in zip(run(), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tied", [True, False], ids=["W_F", "W_q and W_k"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["W_T", "two W_T"])
def test_product_kernel_is_equation_9(tied, symmetric):
    attention = make(mn.ProductKernel(symmetric=symmetric), symmetric=tied)

    def formula(a, x, causal):
        t = sinusoid(range(LENGTH), WIDTH)[None]
        w_k = a.query.weight if tied else a.key.weight
        q, k = in_heads(x, a.query.weight), in_heads(x, w_k)
        t_k = a.position.query.weight if symmetric else a.position.key.weight
        log = dots(q, k) + dots(in_heads(t, a.position.query.weight), in_heads(t, t_k))
        return average(a, log, in_heads(x, a.value.weight), causal)

    agrees(attention, formula, draw())


def test_product_kernel_takes_another_kernel_of_positions():
    attention = make(mn.ProductKernel(mn.Learned(9), kernel=mc.RBF(1.5, on="position")))

    def formula(a, x, causal):
        _, log, v = content(a, x)
        t = in_heads(a.position.embedding.weight[None, :LENGTH], a.position.query.weight)
        apart = (t[:, :, :, None] - t[:, :, None]).square().sum(-1)
        s = a.position.kernel.log_bandwidth.exp()
        return average(a, log - apart / (2 * s**2), v, causal)

    agrees(attention, formula, draw())


def test_product_kernel_refuses_a_kernel_of_content():
    with pytest.raises(ValueError, match=r"kernel must be on part 'position', .*content"):
        mn.ProductKernel(kernel=mc.Exponential())


def turned(x, base=10000.0):
    """Features (p, p + D/2) of place i turned by the angle i / base^(2p / D)."""
    half = x.shape[-1] // 2
    out = torch.zeros_like(x)
    for i in range(x.shape[2]):
        for p in range(half):
            angle = i / base ** (p / half)
            a, b = x[:, :, i, p], x[:, :, i, p + half]
            out[:, :, i, p] = a * math.cos(angle) - b * math.sin(angle)
            out[:, :, i, p + half] = a * math.sin(angle) + b * math.cos(angle)
    return out


@pytest.mark.parametrize("base", [10000.0, 30.0])
def test_rotary_turns_queries_and_keys(base):
    def formula(a, x, causal):
        q, k = in_heads(x, a.query.weight), in_heads(x, a.key.weight)
        v = in_heads(x, a.value.weight)
        return average(a, dots(turned(q, base), turned(k, base)), v, causal)

    agrees(make(mn.Rotary(base)), formula, draw())


def test_rotary_keeps_norms_and_dot_products_depend_on_the_distance_alone():
    rotary = make(mn.Rotary()).position
    q, k = torch.randn(2, 1, 1, 1, DIM, dtype=torch.float64).expand(2, 1, 1, 20, DIM)
    places = torch.arange(20)
    q_turned, k_turned = rotary.turn(q, places), rotary.turn(k, places)
    close(q_turned.norm(dim=-1), q.norm(dim=-1))
    products = q_turned[0, 0] @ k_turned[0, 0].T
    for shift in range(1, 10):
        close(products[shift:, shift:], products[:-shift, :-shift])
    assert products[0].std() > 1e-3


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (4, [2**-2, 2**-4, 2**-6, 2**-8]),
        (3, [2**-4, 2**-8, 2**-2]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
    ],
)
def test_alibi_starts_with_the_slopes_of_the_paper(heads, slopes):
    attention = mn.KernelAttention(WIDTH, heads, position=mn.ALiBi())
    assert attention.position.kernel.slopes.tolist() == slopes
    assert not any("slopes" in name for name, _ in attention.named_parameters())


@pytest.mark.parametrize("trainable", [False, True], ids=["fixed", "trainable"])
def test_alibi_takes_slope_times_distance_from_the_logit(trainable):
    def formula(a, x, causal):
        _, log, v = content(a, x)
        far = torch.tensor(away(LENGTH, LENGTH)).abs()
        slopes = a.position.kernel.slopes
        return average(a, log - slopes[:, None, None] * far, v, causal)

    agrees(make(mn.ALiBi(trainable=trainable)), formula, draw())


def axes(height, width, prefix):
    """The embeddings of rows and of columns, row by row; nothing before the grid."""
    cells = [(r, c) for r in range(height) for c in range(width)]
    nothing = torch.zeros(prefix, WIDTH // 2, dtype=torch.float64)
    rows = torch.cat([nothing, sinusoid([r for r, _ in cells], WIDTH // 2)])
    return rows, torch.cat([nothing, sinusoid([c for _, c in cells], WIDTH // 2)])


@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("value", ["content", "content+position"])
def test_grid_product_multiplies_a_kernel_of_height_and_one_of_width(prefix, value):
    attention = make(mn.Grid2D(2, 3, prefix=prefix), value=value)

    def formula(a, x, causal):
        h, w = axes(2, 3, prefix)
        rows = in_heads(h[None], a.position.rows.weight)
        columns = in_heads(w[None], a.position.columns.weight)
        _, log, _ = content(a, x)
        read = x + torch.cat([h, w], -1) if value == "content+position" else x
        v = in_heads(read, a.value.weight)
        return average(a, log + dots(rows, rows) + dots(columns, columns), v, causal)

    agrees(attention, formula, draw(6 + prefix))


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("value", ["content", "content+position"])
def test_grid_sum_adds_height_and_width_to_the_features(prefix, value):
    attention = make(mn.Grid2D(2, 3, prefix=prefix, combine="sum"), value=value)

    def formula(a, x, causal):
        t = torch.cat(axes(2, 3, prefix), -1)
        q, k = in_heads(x + t, a.query.weight), in_heads(x + t, a.key.weight)
        v = in_heads(x + t if value == "content+position" else x, a.value.weight)
        return average(a, dots(q, k), v, causal)

    agrees(attention, formula, draw(6 + prefix))


@pytest.mark.parametrize("queries", [2, 8], ids=["Q < K", "Q > K"])
def test_relative_positions_of_cross_attention_count_from_the_last_query_and_key(queries):
    keys = 5

    def lookup(a, x, context, causal):
        q, log, v = content(a, x, context)
        return average(a, log + lookup_scores(a, q, queries, keys), v, False)

    def transformer_xl(a, x, context, causal):
        q, k = in_heads(x, a.query.weight), in_heads(context, a.key.weight)
        log = transformer_xl_scores(a, q, k, queries, keys)
        return average(a, log, in_heads(context, a.value.weight), False)

    def alibi(a, x, context, causal):
        _, log, v = content(a, x, context)
        far = torch.tensor(away(queries, keys)).abs()
        return average(a, log - a.position.kernel.slopes[:, None, None] * far, v, False)

    x, context = draw(queries), draw(keys)
    for position, formula in (
        (mn.LookupTable(2), lookup),
        (mn.RelativeSinusoid(), transformer_xl),
        (mn.ALiBi(), alibi),
    ):
        attention = make(position)
        close(attention(x, context), formula(attention, x, context, False))


def test_positions_of_cross_attention_count_from_the_first_query_and_key():
    x, context = draw(3), draw(5)
    t, s = sinusoid(range(3), WIDTH), sinusoid(range(5), WIDTH)
    a = make(mn.DirectSum())
    q, k = in_heads(x + t, a.query.weight), in_heads(context + s, a.key.weight)
    v = in_heads(context, a.value.weight)
    close(a(x, context), average(a, dots(q, k), v, False))

    a = make(mn.ProductKernel(symmetric=False))
    _, log, v = content(a, x, context)
    times = in_heads(t[None], a.position.query.weight), in_heads(s[None], a.position.key.weight)
    close(a(x, context), average(a, log + dots(*times), v, False))


@pytest.mark.parametrize(
    "position",
    [
        mn.DirectSum(mn.Learned(5)),
        mn.ProductKernel(mn.Learned(5)),
        mn.Grid2D(1, 3, prefix=2),
        mn.Grid2D(1, 3, prefix=2, combine="sum"),
    ],
    ids=["learned sum", "learned product", "grid product", "grid sum"],
)
def test_a_place_beyond_the_last_raises(position):
    attention = make(position)
    assert attention(draw(5)).shape == (BATCH, 5, WIDTH)
    with pytest.raises(ValueError, match=r"(5|2 \+ 3) places, got place 5"):
        attention(draw(6))


@pytest.mark.parametrize("template", LEARNING.values(), ids=LEARNING)
def test_a_template_given_to_two_modules_shares_no_parameters(template):
    template = template()
    before = sum(p.numel() for p in template.parameters())
    one, two = make(template), make(template)
    assert any(True for _ in one.position.parameters())
    places = {p.data_ptr() for p in (*two.parameters(), *template.parameters())}
    assert not any(p.data_ptr() in places for p in one.parameters())
    assert sum(p.numel() for p in template.parameters()) == before


@pytest.mark.parametrize("name", STRINGS)
def test_a_position_can_be_named(name):
    named, given = make(name), make(STRINGS[name]())
    given.load_state_dict(named.state_dict())
    x = draw()
    assert torch.equal(named(x), given(x))
    assert type(named.position) is STRINGS[name]


def test_no_position_has_no_embedding_for_the_values():
    with pytest.raises(ValueError, match=r"NoPosition has no embedding.*value='content'"):
        mn.KernelAttention(WIDTH, HEADS, value="content+position")


@pytest.mark.parametrize("name", sorted(STRINGS.keys() - {"none", "direct-sum"}))
def test_every_other_position_has_a_sinusoid_for_the_values(name):
    attention, x = make(name, value="content+position"), draw()
    state, t = attention.state_dict(), sinusoid(range(LENGTH), WIDTH)
    plain = make(name)
    plain.load_state_dict(state)
    q, k, v, _ = plain.parts(x)
    v = v + in_heads(t[None], plain.value.weight)
    out = mc.smooth(plain.joined_kernel, q, k, v, backend="reference")
    close(attention(x), out.transpose(1, 2).flatten(2) @ plain.out.weight.T)


def test_symmetric_ties_the_projections_of_queries_and_keys():
    tied = mn.KernelAttention(WIDTH, HEADS, symmetric=True)
    assert set(tied.state_dict()) == {"query.weight", "value.weight", "out.weight"}
    free = mn.KernelAttention(WIDTH, HEADS)
    assert set(free.state_dict()) - set(tied.state_dict()) == {"key.weight"}


def test_equation_9_has_two_thirds_of_the_kernel_matrices_of_equation_5():
    """W_F and W_T against W_Q, W_K and W_R, each d_model x d_model."""

    def matrices(attention):
        weights = dict(attention.named_parameters())
        del weights["value.weight"], weights["out.weight"]
        return {name: p.numel() for name, p in weights.items() if not name.endswith("bias")}

    ours = matrices(mn.KernelAttention(WIDTH, HEADS, symmetric=True, position=mn.ProductKernel()))
    theirs = matrices(mn.KernelAttention(WIDTH, HEADS, position=mn.RelativeSinusoid()))
    assert ours == {"query.weight": WIDTH**2, "position.query.weight": WIDTH**2}
    assert set(theirs) == {"query.weight", "key.weight", "position.kernel.weight"}
    assert 3 * sum(ours.values()) == 2 * sum(theirs.values())


def test_width_head_has_as_many_sinusoids_as_a_head_has_features():
    position = make(mn.RelativeSinusoid(width="head")).position
    assert position.weight.shape == (HEADS, DIM, DIM)


@pytest.mark.parametrize("position", ["lookup", "alibi"])
def test_an_odd_width_is_fine_where_no_sinusoid_is_used(position):
    """Only (f + t) W_v would need the embedding, and its values are f W_v."""
    attention = mn.KernelAttention(15, 3, position=position).double()
    assert attention(draw(4, 15)).shape == (BATCH, 4, 15)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: mn.KernelAttention(15, 3, position="direct-sum"), r"even width.* 15"),
        (lambda: mn.KernelAttention(16, 2, head_dim=5, position="rotary"), r"even head.* 5"),
        (
            lambda: mn.KernelAttention(
                16, 2, head_dim=5, position=mn.RelativeSinusoid(width="head")
            ),
            r"even width.* 5",
        ),
        (lambda: mn.KernelAttention(18, 3, position=mn.Grid2D(2, 2)), r"d_model.* 4.* 18"),
        (lambda: mn.Learned(0), r"max_length must be at least 1, got 0"),
        (lambda: mn.LookupTable(-1), r"max_distance must be at least 0, got -1"),
        (lambda: mn.RelativeSinusoid(width="all"), r"width must be 'head' or 'model'.*'all'"),
        (lambda: mn.Grid2D(0, 3), r"height and width must be at least 1.* 0, 3"),
        (lambda: mn.Grid2D(2, 3, prefix=-1), r"prefix at least 0.* -1"),
        (lambda: mn.Grid2D(2, 3, combine="max"), r"combine must be 'product' or 'sum'.*'max'"),
    ],
    ids=[
        "sinusoid", "rotary", "relative sinusoid", "grid", "learned", "lookup", "width",
        "height", "prefix", "combine",
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_raise(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_sinusoids_in_a_compiled_graph_are_one_operator():
    places = torch.arange(-3, 4)
    torch.library.opcheck(sinusoids.form_sinusoid, (places, 8, 1e4, torch.float32))
    like = torch.zeros(1)
    torch.library.opcheck(sinusoids.copy_sinusoids, (-2, 5, 8, 1e4, like, True))

    def double(places):
        return 2 * sinusoids.sinusoid(places, 8, 1e4, torch.float64)

    compiled = torch.compile(double, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(places), double(places))


def test_a_run_of_sinusoids_is_kept_and_copied_for_compilers():
    like = torch.zeros(1, dtype=torch.float64)
    kept = sinusoids.run_of_sinusoids(-2, 5, 8, 1e4, like)
    want = sinusoids.sinusoid(torch.arange(-2, 5), 8, 1e4, torch.float64)
    assert torch.equal(kept, want)
    assert sinusoids.run_of_sinusoids(-2, 5, 8, 1e4, like) is kept
    run = torch.compile(
        lambda x: sinusoids.run_of_sinusoids(-2, 5, 8, 1e4, x).mul_(0.0), backend="aot_eager"
    )
    assert run(like).eq(0.0).all()
    assert torch.equal(sinusoids.run_of_sinusoids(-2, 5, 8, 1e4, like), want)
