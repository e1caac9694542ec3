"""Attacks on the core: what is mutated, hidden, assigned or written as text must not be ignored.

A new case is one line of a table.
"""

import copy
import io

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


# Key 20 is visible to some rows, and its products overflow.
@pytest.mark.parametrize("filter", [mc.Window(3, 3), mc.Causal() & mc.Window(4, 0)], ids=repr)
@pytest.mark.parametrize("kernel", [mc.Exponential(), mc.RBF(30.0)], ids=repr)
@pytest.mark.parametrize("backend", ["auto", "chunked", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_huge_key_changes_no_row_that_does_not_see_it(filter, kernel, backend, dtype):
    q, k, v = inputs(1, width=64, dtype=dtype)
    want = mc.smooth(kernel, q, k, v, filter=filter, backend=backend)
    k[:, :, 20] = 1e38
    got = mc.smooth(kernel, q, k, v, filter=filter, backend=backend)
    blind = ~filter.mask(KEYS, KEYS)[0, 0, :, 20]
    assert close(got[:, :, blind], want[:, :, blind], dtype)
    with pytest.raises(ValueError, match="'sdpa' cannot run this: a product may overflow"):
        mc.smooth(kernel, q, k, v, filter=filter, backend="sdpa")
    # Without a mask nothing is added to the products.
    assert mc.explain(kernel, q, k, v, filter=mc.Causal()).backend == "sdpa"
    # What is not finite is no large number.
    k[:, :, 20] = torch.nan
    assert mc.explain(kernel, q, k, v, filter=filter).refusals.get("sdpa") is None


@pytest.mark.parametrize("kernel", [mc.Exponential(), mc.RBF(30.0)], ids=repr)
@torch.no_grad()
def test_a_huge_key_that_its_head_hides_is_no_reason(kernel):
    q, k, v = inputs(1, width=64)
    mask = torch.ones(1, k.shape[1], KEYS, KEYS, dtype=torch.bool)
    k[:, 0, 20], mask[:, 0, :, 20] = 1e38, False
    said = mc.explain(kernel, q, k, v, filter=mc.Mask(mask))
    assert "sdpa" not in said.refusals
    k[:, 1, 20] = 1e38
    said = mc.explain(kernel, q, k, v, filter=mc.Mask(mask))
    assert "a product may overflow" in said.refusals["sdpa"]


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


LAYERS = {
    "no position": lambda: mc.nn.KernelAttention(16, 2),
    "a factor": lambda: mc.nn.KernelAttention(16, 2, position="product"),
    "two factors": lambda: mc.nn.KernelAttention(
        16, 2, kernel=mc.RBF() * mc.Cosine(), position="lookup"
    ),
    "a system": lambda: mc.systems.build("dai2019", 16, 2),
}


@pytest.mark.parametrize("name", LAYERS)
def test_an_assigned_kernel_is_the_one_that_runs_and_learns(name):
    layer, x = LAYERS[name](), draw(2, 6, 16)
    before = layer(x)
    layer.kernel = kernel = mc.Laplace()
    out = layer(x)
    out.sum().backward()
    assert not torch.allclose(out, before)
    assert kernel.log_bandwidth.grad is not None
    assert "exp(-|q - k| / s)" in repr(layer.joined_kernel)
    other = copy.deepcopy(layer)
    assert torch.equal(other(x), out)
    other.kernel = mc.Cosine()
    assert not torch.allclose(other(x), out)
    assert torch.equal(layer(x), out)


def test_an_assigned_kernel_is_compiled():
    # A compiled graph can make no module, so the kernels are joined before.
    layer, x = LAYERS["a factor"](), draw(2, 6, 16)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for kernel in (mc.Laplace(), mc.Cosine()):
        layer.kernel = kernel
        assert torch.allclose(compiled(x), layer(x), atol=1e-6)


def test_a_factor_inside_a_layer_may_be_replaced():
    layer, x = LAYERS["two factors"](), draw(2, 6, 16)
    for replace in (
        lambda kernel: layer.kernel.kernels.__setitem__(0, kernel),
        lambda kernel: setattr(layer.position, "kernel", kernel),
    ):
        kernel = mc.Laplace()
        replace(kernel)
        layer(x).sum().backward()
        assert kernel.log_bandwidth.grad is not None


# What cannot be assigned to a layer: the layer, the attribute, its value, the message.
ASSIGNED = {
    "position": ("a factor", "position", mc.nn.Rotary(), "make a new layer with position"),
    "joined kernel": ("a factor", "joined_kernel", mc.RBF(), "assign kernel"),
    "no kernel": ("a factor", "kernel", None, "kernel must be a Kernel, got NoneType"),
    "a name": ("a factor", "kernel", "rbf", "kernel must be a Kernel, got str"),
    "gaussian": ("gaussian", "kernel", mc.Laplace(), "take a KernelAttention"),
    "gaussian position": ("gaussian", "position", mc.nn.Rotary(), "take a KernelAttention"),
    "gaussian joined": ("gaussian", "joined_kernel", mc.RBF(), "take a KernelAttention"),
}


@pytest.mark.parametrize("name", ASSIGNED)
def test_what_would_be_ignored_cannot_be_assigned(name):
    which, attribute, value, message = ASSIGNED[name]
    layer = mc.nn.GaussianAttention(16, 2) if which == "gaussian" else LAYERS[which]()
    with pytest.raises(ValueError, match=message):
        setattr(layer, attribute, value)


def test_gaussian_attention_says_what_it_is_now():
    layer = mc.nn.GaussianAttention(16, 2, adaptive=True)
    assert not layer.valid
    layer.adaptive = False
    assert layer.valid
    assert layer.symmetric


def test_a_replaced_kernel_is_counted():
    from mercer.models import KernelLM, KernelLMConfig
    from mercer.models.count import count

    sizes = {"vocab_size": 11, "d_model": 16, "num_layers": 1, "num_heads": 2, "context_length": 8}
    model = KernelLM(KernelLMConfig(**sizes, kernel="RBF()"))
    model.blocks[0].attention.kernel = mc.RBF() + mc.Cosine()
    other = KernelLM(KernelLMConfig(**sizes, kernel="RBF() + Cosine()"))
    assert count(model, 8).flops_per_token == count(other, 8).flops_per_token


# Ids for three value embeddings: the ids and the message.
WRONG_IDS = {
    "too large": ([[0, 3]], "from 0 to 2 for the value embeddings, but reach from 0 to 3"),
    "negative": ([[-1, 2]], "from 0 to 2 for the value embeddings, but reach from -1 to 2"),
    "not whole": ([[0.0, 1.0]], "must be whole numbers, got torch.float32"),
    "another length": ([[0, 1, 2]], r"must be \[1, 2\], as the keys are, got \[1, 3\]"),
}


@pytest.mark.parametrize("name", WRONG_IDS)
def test_ids_outside_the_value_embeddings_are_refused(name):
    ids, message = WRONG_IDS[name]
    layer = mc.nn.KernelAttention(16, 2, value_vocab=3)
    with pytest.raises(ValueError, match=message):
        layer(draw(1, 2, 16), token_ids=torch.tensor(ids))
    assert layer(draw(1, 2, 16), token_ids=torch.tensor([[0, 2]])).shape == (1, 2, 16)


def saved(x):
    file = io.BytesIO()
    torch.save(x, file)
    return file.getvalue()


GOOD = saved(torch.ones(5, 6))
UNREAD, NUMBERS = "cannot be read", "holds no dense table of real, finite numbers"
# What a file of published token kernels may hold instead: its bytes, the end of the message.
PUBLISHED = {
    "text": (b"hello world\nthis is text", UNREAD),
    "text of a call": (b"cos\nsystem\n(S'true'\ntR.", UNREAD),
    "empty": (b"", UNREAD),
    "cut": (GOOD[: len(GOOD) // 2], UNREAD),
    "another byte": (GOOD.replace(b"storage", b"stXrage"), UNREAD),
    "zeros": (b"\0" * 100, UNREAD),
    "a zip of nothing": (b"PK\3\4" + b"\0" * 50, UNREAD),
    "nested": (b"(" * 100_000, UNREAD),
    "a module": (saved(torch.nn.Linear(2, 2)), UNREAD),
    "none": (saved(None), "holds NoneType"),
    "a list": (saved([torch.ones(5, 6)]), "holds list"),
    "a vector": (saved(torch.ones(6)), r"holds \[6\]"),
    "no tokens": (saved(torch.ones(0, 6)), r"holds \[0, 6\]"),
    "no taps": (saved(torch.ones(5, 0)), r"holds \[5, 0\]"),
    "even taps": (saved(torch.ones(5, 4)), r"holds \[5, 4\]"),
    "complex": (saved(torch.ones(5, 6, dtype=torch.cfloat)), NUMBERS),
    "nan": (saved(torch.full((5, 6), torch.nan)), NUMBERS),
    "infinity": (saved(torch.full((5, 6), -torch.inf)), NUMBERS),
    "beyond float32": (saved(torch.full((5, 6), 1e300, dtype=torch.float64)), NUMBERS),
    "sparse": (saved(torch.eye(6).to_sparse()), NUMBERS),
    "no data": (saved(torch.ones(5, 6, device="meta")), NUMBERS),
    "a claim of 24 GB": (saved(torch.ones(1, 1).expand(10**9, 6)), NUMBERS),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_another_file_than_published_weights_is_refused_in_one_sentence(name, tmp_path):
    content, message = PUBLISHED[name]
    (tmp_path / "kernels.pt").write_bytes(content)
    with pytest.raises(ValueError, match=f"kernels.pt {message}") as refused:
        mc.nn.TokenKernels.load_published(tmp_path / "kernels.pt")
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 250 + len(str(tmp_path))


def test_a_missing_file_of_published_weights_is_said_to_be_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.pt"):
        mc.nn.TokenKernels.load_published(tmp_path / "absent.pt")


# Texts that must be refused in one short sentence: what is read, the text, a part of the message.
TEXTS = {
    "heads": ("kernel", "RBF(heads=2000000000)", "beyond the largest whole number, 16777216"),
    "fewer heads": ("kernel", "RBF(heads=16000000)", "heads must be at most 1048576"),
    "features": ("kernel", "AdaptiveRBF(2000000000)", "beyond the largest whole number"),
    "heads * features": ("kernel", "AdaptiveRBF(9999, heads=9999)", "dim must be at most 104"),
    "places": ("position", "DirectSum(Learned(9999999999))", "beyond the largest whole number"),
    "distances": ("position", "LookupTable(9999999999)", "beyond the largest whole number"),
    "digits": ("kernel", f"Exponential({'9' * 1900})", "beyond the largest whole number"),
    "digits of a degree": ("kernel", f"Polynomial({'8' * 1900})", "beyond the largest"),
    "digits of a window": ("filter", f"Window({'9' * 1900}, 0)", "beyond the largest"),
    "in a list": ("kernel", f"ALiBi([1, {'9' * 1900}])", "beyond the largest"),
    "a sum of numbers": ("position", f"ProductKernel({'1+' * 900}1)", "at most 100 levels deep"),
    "a sum of kernels": ("kernel", "RBF()" + "+RBF()" * 300, "at most 100 levels deep"),
    "calls in calls": (
        "position", f"ProductKernel(kernel={'RBF(' * 150}{')' * 150})", "at most 100 levels",
    ),
    "sums in sums": ("kernel", f"{'(RBF()+' * 150}RBF(){')' * 150}", "at most 100 levels"),
    "parentheses": ("kernel", f"{'(' * 900}RBF(){')' * 900}", "is not one: too many nested"),
    "signs": ("kernel", f"RBF({'-' * 1500}1)", "at most 100 levels deep"),
    "lists in lists": ("kernel", f"RBF({'[' * 150}1{']' * 150})", "at most 100 levels deep"),
    "a power": ("kernel", "RBF(9**9**9)", "is not a number, a string, a list"),
    "a product": ("kernel", "RBF([1.0] * 999999999)", "is not a number, a string, a list"),
    "a list of lists": ("kernel", "RBF([[1.0]])", "is not a number, a string, a list"),
    "a dict": ("kernel", "RBF(on={})", "is not a number, a string, a list"),
    "bytes": ("kernel", "RBF(b'a')", "is not a number, a string, a list"),
    "complex": ("kernel", "RBF(1j)", "is not a number, a string, a list"),
    "infinite": ("kernel", "Exponential(1e999)", "scale must be a finite number, got inf"),
    "nothing": ("kernel", "RBF([])", r"one number or one per head, got \[\]"),
    "half a head": ("kernel", "RBF(heads=2.5)", "heads must be a whole number, got 2.5"),
    "no kernel": ("position", "ProductKernel(kernel=5)", "kernel must be a Kernel, got int"),
    "no embedding": ("position", "DirectSum(RBF())", "embedding must be Sinusoid or Learned"),
    "half a place": ("position", "DirectSum(Learned(2.5))", "max_length must be a whole number"),
    "half a distance": ("position", "LookupTable(1.5)", "max_distance must be a whole number"),
    "half a row": ("position", "Grid2D(1.5, 2)", "height must be a whole number, got 1.5"),
    "no base": ("position", "Rotary(0)", "base must be a positive finite number, got 0"),
    "a word as base": ("position", "Rotary('a')", "base must be a positive finite number, got 'a'"),
    "a null": ("kernel", "RBF()\0", "null bytes"),
    "a surrogate": ("kernel", "RBF(\ud800)", "is not one"),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_a_hostile_text_is_refused_in_one_short_sentence(name):
    what, text, message = TEXTS[name]
    with pytest.raises(ValueError, match=message) as refused:
        getattr(mc.parse, what)(text)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("name", ["heads", "sums in sums"])
def test_a_config_with_a_hostile_text_is_refused(name):
    from mercer.models import KernelLMConfig

    _, text, message = TEXTS[name]
    sizes = {"vocab_size": 11, "d_model": 16, "num_layers": 1, "num_heads": 2}
    with pytest.raises(ValueError, match=message):
        KernelLMConfig.from_dict({**sizes, "kernel": text})


def test_a_long_sum_is_still_read():
    assert len(list(mc.parse.kernel("RBF()" + "+RBF()" * (mc.kernels.MAX_TERMS - 1)))) == 64


# Plain attributes of kernels: the kernel, the attribute, its new value, the kernel made with it.
CHANGED = {
    "alpha": (mc.RationalQuadratic(), "alpha", 5, lambda: mc.RationalQuadratic(alpha=5)),
    "nu": (mc.Matern(), "nu", 0.5, lambda: mc.Matern(0.5)),
    "degree": (mc.Polynomial(), "degree", 4, lambda: mc.Polynomial(4)),
    "scale": (mc.Exponential(), "scale", 2.0, lambda: mc.Exponential(2.0)),
    "scale of angles": (mc.Cosine(), "scale", 2.0, lambda: mc.Cosine(2.0)),
}


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_attribute_changes_the_result(name, backend):
    kernel, attribute, value, other = CHANGED[name]
    kernel, x = copy.deepcopy(kernel), inputs()
    before = mc.smooth(kernel, *x, backend=backend)
    setattr(kernel, attribute, value)
    assert getattr(kernel, attribute) == value
    assert repr(kernel) == repr(other())
    out = mc.smooth(kernel, *x, backend=backend)
    assert torch.equal(out, mc.smooth(other(), *x, backend=backend))
    assert not torch.allclose(out, before)


@pytest.mark.parametrize("position", [mc.nn.Rotary(), mc.nn.RelativeSinusoid()], ids=["turn", "xl"])
def test_a_changed_base_changes_the_result(position):
    layer, x = mc.nn.KernelAttention(16, 2, position=position), draw(1, 6, 16)
    before = layer(x)
    layer.position.base = 10.0
    assert not torch.allclose(layer(x), before)
    with pytest.raises(ValueError, match="base must be a positive finite number"):
        type(position)(base=0.0)


# Attributes of kernels that are checked when they are assigned.
@pytest.mark.parametrize(
    ("kernel", "attribute", "value"),
    [
        (mc.RationalQuadratic(), "alpha", 0.0),
        (mc.RationalQuadratic(), "alpha", torch.nan),
        (mc.Matern(), "nu", 2.0),
    ],
)
def test_a_wrong_attribute_is_refused(kernel, attribute, value):
    with pytest.raises(ValueError, match=f"{attribute} must be"):
        setattr(kernel, attribute, value)


# Kernels whose defaults depend on the number of features.
@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (mc.Exponential(), "the default scale .* needs features"),
        (mc.Lookup(torch.zeros(3, 0)), "the default scale .* needs features"),
        (mc.RBF(), "the default bandwidth needs features"),
        (mc.Matern(), "the default bandwidth needs features"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_default_of_no_features_is_refused(kernel, message, backend):
    with pytest.raises(ValueError, match=message):
        mc.smooth(kernel, *inputs(width=0), backend=backend)


# Distances whose square is beyond float16, in the reference.
@pytest.mark.parametrize(
    "kernel",
    [
        mc.RBF(100.0), mc.Laplace(100.0), mc.Matern(1.5, 100.0), mc.Matern(2.5, 100.0),
        mc.RationalQuadratic(100.0), mc.Matern(1.5), mc.RBF(), mc.AdaptiveRBF(64, 100.0),
    ],
    ids=repr,
)  # fmt: skip
def test_the_reference_measures_large_distances_in_float16(kernel):
    q, k, v = inputs(1, width=64, dtype=torch.float16)
    q, k = 60 * q, 60 * k
    got = mc.smooth(kernel, q, k, v, backend="reference")
    want = mc.smooth(copy.deepcopy(kernel).double(), q.double(), k.double(), v.double())
    assert close(got, want, torch.float16)
