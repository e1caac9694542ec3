"""Every kernel and filter that the tests run over: those of the registry, and compositions."""

from functools import partial

import torch
from torch import nn

import mercer as mc
from mercer.filters import FILTERS as ALL_FILTERS
from mercer.kernels import KERNELS as ALL_KERNELS
from mercer.kernels.entry import normal

HEADS, DIM = 2, 8

KERNELS = {
    name: partial(build, HEADS, DIM)
    for kernel in ALL_KERNELS
    for name, build in kernel.entry.examples.items()
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
        * mc.Lookup(normal(5, DIM))
        * mc.Buckets(normal(8, HEADS), max_distance=6)
        * mc.ALiBi(nn.Parameter(mc.ALiBi.standard(HEADS)))
    ),
    "nested": lambda: (
        (mc.RBF() + mc.Cosine(2.0)) * (mc.Exponential(on="position") + mc.Matern(1.5))
    ),
    "adaptive*alibi": lambda: (
        KERNELS["adaptive"]()
        * mc.ALiBi(nn.Parameter(mc.ALiBi.standard(HEADS)))
        * mc.Exponential(0.5)
    ),
    "transformer-xl": lambda: mc.Exponential() * mc.RelativeSinusoid(),
    "mixture": lambda: mc.Scaled(mc.RBF(), 0.3) + mc.Scaled(mc.Exponential(), [0.5, 2.0]),
}

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 3], [5] * 11])

FILTERS = {
    **{name: build for f in ALL_FILTERS for name, build in f.entry.examples.items()},
    "packed": lambda: mc.Causal() & mc.Documents(DOCUMENTS),
    "either": lambda: mc.Strided(4) | mc.Window(0, 2) & mc.Padding([11, 5]),
}
# Those that no fused kernel takes, and their classes.
UNFUSED = {"mask": "Mask", "heads": "Heads", "blocks": "Blocks"}
