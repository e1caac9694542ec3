"""Models whose sequences are split among processes, against one process, in float64."""

import pytest
import torch
from parallel.workers import run

pytest.importorskip("transformers")

T = 32
SYSTEMS = {
    "rotary": {"position": "rotary", "num_kv_heads": 1},
    "alibi": {"kernel": "RBF(heads=2)", "position": "alibi", "filter": "Window(9, 0)"},
    "learned": {"input_position": "learned", "kernel": "Laplace()"},
    "lookup": {"system": "shaw2018"},
    "relative": {"system": "dai2019", "cutoffs": [8, 20], "tie_word_embeddings": False},
    "sum": {"system": "tsai2019"},
    "gaussian": {"system": "kundu2026", "system_options": {"rotary": True, "adaptive": True}},
    "token kernels": {"system": "leng2026"},
    "value embeddings": {"value_embeddings": True},
}


def built(fields):
    from mercer.models import KernelLM, presets

    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "d_model": 16, "num_heads": 2, "num_layers": 2, "d_ff": 16}
    model = KernelLM(presets.lm("tiny", **sizes, context_length=T, **fields)).double()
    with torch.no_grad():
        for x in model.parameters():
            x.add_(torch.randn(x.shape, generator=torch.Generator().manual_seed(x.numel())) * 0.05)
    return model.train()


def check(fields, exchange, mask=None):
    from mercer.parallel import Split

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    split = Split(mesh, T, exchange=exchange)
    ids = torch.randint(40, (2, T), generator=torch.Generator().manual_seed(1))
    labels = ids.masked_fill(ids == 7, -100)
    whole, own = built(fields), built(fields)
    want = whole(ids, labels=labels, attention_mask=mask)
    want.loss.backward()
    got = own(ids, labels=labels, attention_mask=mask, split=split)
    got.loss.backward()
    split.reduce_gradients(own)
    loss = got.loss.detach().clone()
    torch.distributed.all_reduce(loss)
    # Losses are computed in float32.
    far = abs(loss.item() - want.loss.item()) > 4 * torch.finfo(torch.float32).eps * loss.item()
    found = [float(far)]
    if want.logits is not None:
        found.append(float((got.logits - split.cut(want.logits)).detach().abs().amax()))
    for x, y in zip(own.parameters(), whole.parameters(), strict=True):
        found.append(float((x.grad - (0 if y.grad is None else y.grad)).abs().amax()))
    return max(found)


def work():
    found = {}
    for n, (name, fields) in enumerate(SYSTEMS.items()):
        found[name] = check(fields, ("gather", "ring")[n % 2])
    mask = torch.ones(2, T)
    mask[0, :5] = 0
    found["padding"] = check({"position": "rotary"}, "gather", mask)
    return found


def everything():
    return work(), wrong()


@pytest.fixture(scope="module")
def answers():
    return run(everything, 2)


def test_a_split_model_is_the_whole_one(answers):
    for found, _ in answers:
        assert {name: error for name, error in found.items() if error > 1e-10} == {}


def wrong():
    from mercer.parallel import Split

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    ids, said = torch.zeros(1, T, dtype=torch.long), []
    model, segments = built({}), built({"segment_length": 16, "memory_length": 16})
    calls = [
        lambda: model(ids, split=Split(mesh, 16)),
        lambda: model(ids, split=Split(mesh, T), use_cache=True),
        lambda: model(ids, split=Split(mesh, T), output_attentions=True),
        lambda: segments(ids, split=Split(mesh, T)),
        lambda: Split(mesh, T).reduce_gradients(3),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"split|reduce_gradients") as error:
            call()
        said.append(str(error.value))
    return said


def test_misuse_is_named(answers):
    for _, said in answers:
        assert "the split sequence has 16 tokens in dimension 1" in said[0]
        assert "takes no cache, no memory and no output_attentions" in said[1]
        assert "takes no cache, no memory and no output_attentions" in said[2]
        assert "this model reads segments of 16 tokens one after the other" in said[3]
        assert said[4] == "reduce_gradients takes a module with parameters, got int"
