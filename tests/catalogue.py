"""Every kernel and filter that the tests run over; a new one joins by a line here."""

import torch
from torch import nn

import mercer as mc

HEADS, DIM = 2, 8


def _normal(*shape: int) -> nn.Parameter:
    generator = torch.Generator().manual_seed(7)
    return nn.Parameter(torch.randn(*shape, generator=generator))


def _adaptive() -> mc.AdaptiveRBF:
    kernel = mc.AdaptiveRBF(DIM, heads=HEADS)
    kernel.weight.data = _normal(HEADS, DIM).data
    return kernel


KERNELS = {
    "exponential": lambda: mc.Exponential(),
    "exponential-scale": lambda: mc.Exponential(0.7),
    "rbf": lambda: mc.RBF(),
    "rbf-fixed": lambda: mc.RBF(1.5, trainable=False),
    "rbf-per-head": lambda: mc.RBF([1.0, 2.5]),
    "adaptive": _adaptive,
    "polynomial": lambda: mc.Polynomial(2),
    "polynomial-4": lambda: mc.Polynomial(4),
    "linear": lambda: mc.Linear(signed=True),
    "laplace": lambda: mc.Laplace(2.0),
    "rational": lambda: mc.RationalQuadratic(alpha=0.5),
    "matern-1/2": lambda: mc.Matern(0.5, heads=HEADS),
    "matern-3/2": lambda: mc.Matern(1.5),
    "matern-5/2": lambda: mc.Matern(2.5, 3.0),
    "cosine": lambda: mc.Cosine(3.0),
    "lookup": lambda: mc.Lookup(_normal(5, DIM)),
    "lookup-per-head": lambda: mc.Lookup(_normal(HEADS, 7, DIM), scale=0.5),
    "relative-sinusoid": lambda: mc.RelativeSinusoid(),
    "alibi": lambda: mc.ALiBi(nn.Parameter(mc.ALiBi.standard(HEADS))),
    "buckets": lambda: mc.Buckets(_normal(8, HEADS), max_distance=6),
    "buckets-one-way": lambda: mc.Buckets(_normal(6, HEADS), max_distance=5, bidirectional=False),
}

COMPOSED = {
    "eq-9": lambda: mc.Exponential() * mc.Exponential(on="position"),
    "rbf*rbf": lambda: mc.RBF() * mc.RBF(2.0, on="position"),
    "rational*exponential": lambda: mc.RationalQuadratic() * mc.Exponential(),
    "polynomial*laplace": lambda: mc.Polynomial() * mc.Laplace(on="position"),
    "rbf+polynomial": lambda: mc.RBF() + mc.Polynomial(),
    "exponential+linear": lambda: mc.Exponential(2.0) + mc.Linear(signed=True) * mc.RBF(),
    "lookup*buckets*alibi": lambda: (
        mc.Exponential()
        * mc.Lookup(_normal(5, DIM))
        * mc.Buckets(_normal(8, HEADS), max_distance=6)
        * mc.ALiBi(nn.Parameter(mc.ALiBi.standard(HEADS)))
    ),
    "nested": lambda: (
        (mc.RBF() + mc.Cosine(2.0)) * (mc.Exponential(on="position") + mc.Matern(1.5))
    ),
    "adaptive*alibi": lambda: (
        _adaptive() * mc.ALiBi(nn.Parameter(mc.ALiBi.standard(HEADS))) * mc.Exponential(0.5)
    ),
    "transformer-xl": lambda: mc.Exponential() * mc.RelativeSinusoid(),
}

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 3], [5] * 11])

FILTERS = {
    "full": lambda: mc.Full(),
    "causal": lambda: mc.Causal(),
    "window": lambda: mc.Window(3, 1),
    "window-left": lambda: mc.Window(2, 0),
    "window-open": lambda: mc.Window(-1, 2),
    "memory": lambda: mc.Memory(2),
    "strided": lambda: mc.Strided(3),
    "fixed": lambda: mc.Fixed(4, 2),
    "padding": lambda: mc.Padding([7, 0]),
    "documents": lambda: mc.Documents(DOCUMENTS),
    "packed": lambda: mc.Causal() & mc.Documents(DOCUMENTS),
    "either": lambda: mc.Strided(4) | mc.Window(0, 2) & mc.Padding([11, 5]),
}
