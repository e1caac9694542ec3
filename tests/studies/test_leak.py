"""The published boundary, rebuilt as a control: what it computes, and that it sees the future."""

import math

import pytest
import torch

import mercer as mc
from mercer.models import KernelLM, presets
from mercer.studies.leak import LeakyAttention, leak, published_boundary
from mercer.term.features import Features


def by_hand(q, k, v, logits):
    """The published layer, query by query: hidden taps get the logit 0."""
    batch, heads, length, width = v.shape
    p = logits.shape[-1] // 2
    out = torch.zeros_like(v)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, (batch, heads, length))).tolist():
        total = 0.0
        for j in range(i + 1):
            row = logits[b, j, 0].clone()
            for d in range(-p, p + 1):
                if abs(d) > i - j:
                    row[p + d] = 0
            row = row.softmax(0)
            seen = [(p + d, j + d) for d in range(-p, p + 1) if 0 <= j + d < length]
            value = sum(row[tap] * v[b, h, place] for tap, place in seen)
            weight = (q[b, h, i] @ k[b, h, j] / math.sqrt(width)).exp()
            out[b, h, i] += weight * value
            total += weight
        out[b, h, i] /= total
    return out


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("length", [1, 2, 7])
def test_the_leak_is_that_of_the_published_layer(size, length):
    torch.manual_seed(size)
    q, k, v = (torch.randn(2, 2, length, 4, dtype=torch.float64) for _ in range(3))
    logits = torch.randn(2, length, 1, size, dtype=torch.float64)
    found = leak(mc.Exponential(), Features(content=q), Features(content=k), v, logits)
    torch.testing.assert_close(found, by_hand(q, k, v, logits), rtol=1e-12, atol=1e-12)


def test_a_model_with_the_leak_sees_the_future_and_ours_does_not():
    torch.manual_seed(0)
    config = presets.lm(
        "tiny", vocab_size=50, system="leng2026",
        system_options={"layers": 1, "temperature": 0.4, "base": "vaswani2017"},
    )  # fmt: skip
    model = KernelLM(config).eval()
    torch.nn.init.normal_(model.token_kernels.weight)
    ids = torch.randint(0, 50, (1, 12))
    other = ids.clone()
    other[0, 8:] = (other[0, 8:] + 7) % 50

    def change():
        with torch.no_grad():
            a, b = (model(input_ids=x).logits for x in (ids, other))
        return (a - b)[0, :8].abs().amax(-1)

    assert not change().any()
    published_boundary(model)
    assert sum(isinstance(m, LeakyAttention) for m in model.modules()) == 1
    found = change()
    # Query 7 reads its right neighbour; earlier queries have theirs before the change.
    assert found[7] > 1e-4
    assert not found[:7].any()


def test_only_values_with_a_softmax_have_the_leak():
    config = presets.lm(
        "tiny", vocab_size=50, system="leng2026", system_options={"layers": 1, "on": "k"}
    )
    model = KernelLM(config)
    published_boundary(model)
    with pytest.raises(ValueError, match="rebuilt for values with a softmax"):
        model(input_ids=torch.randint(0, 50, (1, 4)))
