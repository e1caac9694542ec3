"""Kernels: w(q, k), each with its definition and its lowering."""

from .base import MAX_TERMS as MAX_TERMS
from .base import Kernel as Kernel
from .base import Power as Power
from .base import Product as Product
from .base import Scaled as Scaled
from .base import Sum as Sum
from .bias import ALiBi as ALiBi
from .bias import Buckets as Buckets
from .bridge import Bridge as Bridge
from .distance import RBF as RBF
from .distance import AdaptiveRBF as AdaptiveRBF
from .distance import Distance as Distance
from .distance import Laplace as Laplace
from .distance import Matern as Matern
from .distance import RationalQuadratic as RationalQuadratic
from .dot import Cosine as Cosine
from .dot import Exponential as Exponential
from .dot import Linear as Linear
from .dot import Polynomial as Polynomial
from .entry import Entry
from .position import Lookup as Lookup
from .position import RelativeSinusoid as RelativeSinusoid
from .stationary import ARD as ARD
from .stationary import Periodic as Periodic
from .stationary import SpectralMixture as SpectralMixture

# Kernels that change another one. Their file does not know one for the examples.
CHANGED: tuple[type[Kernel], ...] = (Scaled, Power)
Scaled.entry = Entry(
    kind="keyed",
    examples={"scaled": lambda h, d: Scaled(RBF(), [0.5 + n for n in range(h)])},
)
Power.entry = Entry(
    kind="keyed",
    examples={"power": lambda h, d: Power(RBF(1.5) * Exponential(), 1.5)},
)

# Every kernel that the package declares: text, the bench, the tests and the docs follow from this.
KERNELS: tuple[type[Kernel], ...] = (
    Exponential, RBF, AdaptiveRBF, Bridge, Polynomial, Linear, RationalQuadratic, Laplace, Matern,
    Cosine, ALiBi, Lookup, RelativeSinusoid, Buckets, ARD, Periodic, SpectralMixture, Scaled, Power,
)  # fmt: skip
