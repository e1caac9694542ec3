"""Models compiled block by block: the same losses and gradients, and one graph for a kind of layer.

Captured by dynamo, split by AOT autograd or run as it is: what inductor makes of it is not ours.
"""

import copy

import hf_models
import pytest
import torch
from models import test_translator, test_vit
from models.test_models import draw, make

from mercer import systems

# torch itself makes one of its own while it traces it.
pytestmark = pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated")


@pytest.fixture(autouse=True)
def fresh():
    """Nothing compiled before, and a limit that a few kinds of layers are past."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=2):
        yield
    torch._dynamo.reset()


@pytest.fixture
def graphs():
    """As many entries as graphs were compiled by `count_into`."""
    return []


def count_into(graphs, rest=None):
    """A backend that keeps the graphs, and runs them as they are or gives them to another one."""

    def backend(graph, inputs):
        graphs.append(graph)
        return graph if rest is None else torch._dynamo.lookup_backend(rest)(graph, inputs)

    return backend


def learn(model, *args, **kwargs):
    """The loss and every gradient."""
    model.zero_grad()
    torch.manual_seed(0)
    loss = model(*args, **kwargs).loss
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


def assert_same(model, *args, backend="aot_eager", dynamic=False, **kwargs):
    """What the model learns is the same when it is compiled, in a first step and a second."""
    names = list(model.state_dict())
    want, want_grads = learn(model, *args, **kwargs)
    model.compile_parts(backend=backend, fullgraph=True, dynamic=dynamic)
    assert list(model.state_dict()) == names
    for _ in range(2):
        loss, grads = learn(model, *args, **kwargs)
        torch.testing.assert_close(loss, want, rtol=0, atol=1e-5)
        for got, wanted in zip(grads, want_grads, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", systems.SYSTEMS)
def test_a_language_model_learns_the_same(case):
    model, ids = make(case).train(), draw()
    assert_same(model, ids, labels=ids)


def test_the_adaptive_softmax_stays_as_it_is(graphs):
    model, ids = make("adaptive softmax").train(), draw()
    assert_same(model, ids, labels=ids, backend=count_into(graphs))
    assert len(graphs) == 1


def test_a_translator_learns_the_same():
    make, draw = test_translator.make, test_translator.draw
    model, source, target = make("tsai2019", dtype=torch.float32).train(), draw(), draw(2, 6)
    mask = torch.ones_like(source)
    mask[1, 5:] = 0
    target[1, 4:] = -100
    assert_same(model, source, attention_mask=mask, labels=target)


def test_a_vision_transformer_learns_the_same():
    model = test_vit.make("grid")
    assert_same(model, test_vit.draw(), labels=torch.tensor([1, 4]))


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("vaswani2017", {}),
        ("kundu2026", {"dropout": 0.1, "attention_dropout": 0.1}),
        ("leng2026", {}),
    ],
)
def test_equal_layers_are_compiled_once(case, options, graphs):
    model, ids = make(case, num_layers=10, **options).train(), draw()
    assert_same(model, ids, labels=ids, backend=count_into(graphs))
    assert len(graphs) == 2  # a block and the read-out


@pytest.mark.parametrize(
    ("case", "options", "kinds"),
    [
        # Short without value embeddings, short with them, long with them.
        ("nano", {"num_layers": 8, "windows": "SSSL"}, 3),
        # Token kernels in the first layer only.
        ("leng2026", {"num_layers": 4, "system_options": {"layers": 1}}, 2),
        # Dynamo alone would give up after two.
        ("wang2018", {"num_layers": 4, "filter": [f"Window({n}, 0)" for n in (1, 2, 3, 4)]}, 4),
    ],
)
def test_every_kind_of_layer_is_compiled_once(case, options, kinds, graphs):
    model, ids = make(case, **options).train(), draw()
    assert_same(model, ids, labels=ids, backend=count_into(graphs))
    assert len(graphs) == kinds + 1


def test_segments_after_the_second_share_a_graph(graphs):
    model, ids = make("dai2019", segment_length=4, memory_length=4).train(), draw(2, 24)
    assert_same(model, ids, labels=ids, backend=count_into(graphs), dynamic=None)
    # No memory, a memory, a memory after any number of places; and the read-out.
    assert len(graphs) == 4


def test_gradient_checkpointing_runs_compiled_blocks(graphs):
    model, ids = make("leng2026", dropout=0.1).train(), draw()
    hf_models.checkpoint(model)
    # From transformers 5.23 the checkpoint is a part of the graph. A graph that runs as it is draws
    # another dropout when it runs again; aot_eager, like inductor, does not.
    assert_same(model, ids, labels=ids, backend=count_into(graphs, "aot_eager"))
    assert len(graphs) == 2


def test_sentences_of_any_length_share_a_graph(graphs):
    make, draw = test_translator.make, test_translator.draw
    model = make("wang2018", dtype=torch.float32, backend="chunked").train()
    model.compile_parts(backend=count_into(graphs), dynamic=None)
    counts = []
    for length in (4, 6, 9):
        source, target = draw(2, length), draw(2, length + 2)
        model(source, attention_mask=torch.ones_like(source), labels=target).loss.backward()
        counts.append(len(graphs))
    # An encoder's block, a decoder's and the read-out, of one length and of any.
    assert counts == [3, 6, 6]


def test_a_copy_is_not_compiled(graphs):
    model, ids = make().train(), draw()
    model.compile_parts(backend=count_into(graphs))
    twin = copy.deepcopy(model)
    assert twin.read_out.__self__ is twin
    twin(ids, labels=ids).loss.backward()
    assert not graphs
    # Compiled again, it is compiled once.
    twin.compile_parts(backend=count_into(graphs))
    twin.compile_parts(backend=count_into(graphs))
    twin(ids, labels=ids)
    assert len(graphs) == 2
