"""The Multimodal Transformer beside a re-creation of its authors' model."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mercer import models

WIDTHS, LENGTHS = (20, 7, 5), (6, 11, 9)


class Encoder(nn.Module):
    def __init__(self, width, heads, layers):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({
                "self_attn": nn.MultiheadAttention(width, heads, batch_first=True),
                "fc1": nn.Linear(width, 4 * width), "fc2": nn.Linear(4 * width, width),
                "norm0": nn.LayerNorm(width), "norm1": nn.LayerNorm(width),
            })
            for _ in range(layers)
        )  # fmt: skip
        self.layer_norm = nn.LayerNorm(width)

    def embed(self, x):
        width = x.shape[-1]
        table = [
            [
                f(i / 10000 ** (2 * p / width))
                for p in range(width // 2)
                for f in (math.sin, math.cos)
            ]
            for i in range(x.shape[1])
        ]
        return math.sqrt(width) * x + torch.tensor(table, dtype=x.dtype)

    def forward(self, x, other=None):
        x, other = self.embed(x), None if other is None else self.embed(other)
        for layer in self.layers:
            query = layer["norm0"](x)
            key = query if other is None else layer["norm0"](other)
            ones = torch.ones(query.shape[1], key.shape[1])
            future = ones.triu(1 + abs(key.shape[1] - query.shape[1])).bool()
            x = x + layer["self_attn"](query, key, key, attn_mask=future, need_weights=False)[0]
            x = x + layer["fc2"](F.relu(layer["fc1"](layer["norm1"](x))))
        return self.layer_norm(x)


class MULTModel(nn.Module):
    """In evaluation; with Vaswani's sinusoids."""

    def __init__(self, widths, width, heads, layers, outputs):
        super().__init__()
        for name, size in zip("lav", widths, strict=True):
            setattr(self, f"proj_{name}", nn.Conv1d(size, width, kernel_size=1, bias=False))
        for one, first, second in ("lav", "alv", "vla"):
            setattr(self, f"trans_{one}_with_{first}", Encoder(width, heads, layers))
            setattr(self, f"trans_{one}_with_{second}", Encoder(width, heads, layers))
            setattr(self, f"trans_{one}_mem", Encoder(2 * width, heads, max(layers, 3)))
        self.proj1, self.proj2 = (nn.Linear(6 * width, 6 * width) for _ in range(2))
        self.out_layer = nn.Linear(6 * width, outputs)

    def forward(self, x_l, x_a, x_v):
        x = {"l": self.proj_l(x_l.mT).mT, "a": self.proj_a(x_a.mT).mT, "v": self.proj_v(x_v.mT).mT}
        last = []
        for one, first, second in ("lav", "alv", "vla"):
            h = [getattr(self, f"trans_{one}_with_{n}")(x[one], x[n]) for n in (first, second)]
            last.append(getattr(self, f"trans_{one}_mem")(torch.cat(h, 2))[:, -1])
        last = torch.cat(last, 1)
        return self.out_layer(self.proj2(F.relu(self.proj1(last))) + last)


def stream_state(encoder, prefix):
    found = {f"{prefix}norm.{n}": x for n, x in encoder.layer_norm.state_dict().items()}
    names = {
        "norm0": "attention_norm", "norm1": "feed_forward_norm", "fc1": "feed_forward.up",
        "fc2": "feed_forward.down",
    }  # fmt: skip
    for n, layer in enumerate(encoder.layers):
        own = f"{prefix}layers.{n}."
        for theirs, ours in names.items():
            found |= {f"{own}{ours}.{m}": x for m, x in layer[theirs].state_dict().items()}
        attention = layer["self_attn"]
        for part in ("weight", "bias"):
            three = getattr(attention, f"in_proj_{part}").chunk(3)
            for name, x in zip(("query", "key", "value"), three, strict=True):
                found[f"{own}attention.{name}.{part}"] = x
            found[f"{own}attention.out.{part}"] = getattr(attention.out_proj, part)
    return found


def state_of(theirs):
    found = {}
    for m, (one, first, second) in enumerate(("lav", "alv", "vla")):
        found[f"project.{m}.weight"] = getattr(theirs, f"proj_{one}").weight[..., 0]
        for n, other in enumerate((first, second)):
            encoder = getattr(theirs, f"trans_{one}_with_{other}")
            found |= stream_state(encoder, f"across.{m}.{n}.")
        found |= stream_state(getattr(theirs, f"trans_{one}_mem"), f"within.{m}.")
    for ours, name in (("up", "proj1"), ("down", "proj2"), ("head", "out_layer")):
        found |= {f"{ours}.{n}": x for n, x in getattr(theirs, name).state_dict().items()}
    return found


def inputs():
    return [torch.randn(2, t, w).double() for t, w in zip(LENGTHS, WIDTHS, strict=True)]


def test_it_is_the_model_of_its_authors():
    theirs = MULTModel(WIDTHS, 12, 3, 2, 4).double().eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(std=0.4)
    ours = models.MultimodalTransformer(WIDTHS, 4, d_model=12, num_heads=3, num_layers=2)
    ours.double().eval().load_state_dict(state_of(theirs))
    x = inputs()
    want = theirs(*x)
    assert want.std() > 0.3
    torch.testing.assert_close(ours(*x), want, rtol=0, atol=1e-9)


def test_it_has_the_parameters_of_its_authors_model():
    """For CMU-MOSEI: words of 300 features, audio of 74, faces of 35."""
    with torch.device("meta"):
        theirs = MULTModel((300, 74, 35), 30, 5, 5, 1)
        ours = models.MultimodalTransformer((300, 74, 35), 1)
    numbers = [sum(p.numel() for p in model.parameters()) for model in (theirs, ours)]
    assert numbers == [1_073_731, 1_073_731]


@pytest.mark.parametrize("kernel", [None, "RBF(heads=3)", "Exponential() + Polynomial(2)"])
def test_it_trains_with_any_kernel(kernel):
    model = models.MultimodalTransformer(
        WIDTHS, 4, d_model=12, num_heads=3, num_layers=1, kernel=kernel
    ).double()
    model(*inputs()).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_two_modalities_and_misuse():
    model = models.MultimodalTransformer([6, 4], 2, d_model=6, num_heads=3, num_layers=1)
    assert model(torch.randn(3, 5, 6), torch.randn(3, 8, 4)).shape == (3, 2)
    with pytest.raises(ValueError, match=r"modalities of \[6, 4\] features, got \[6, 5\]"):
        model(torch.randn(3, 5, 6), torch.randn(3, 8, 5))
    with pytest.raises(ValueError, match="two modalities or more, got"):
        models.MultimodalTransformer([6], 2)
