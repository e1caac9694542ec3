"""Attention as a kernel smoother: feature space, kernel, value function, set filter."""

# First: the others import torch, which takes seconds.
from . import interrupt as interrupt

# isort: split
from . import inspect as inspect
from . import nn as nn
from . import systems as systems
from .explain import Explanation as Explanation
from .explain import explain as explain
from .filters import Blocks as Blocks
from .filters import Causal as Causal
from .filters import Documents as Documents
from .filters import Filter as Filter
from .filters import Fixed as Fixed
from .filters import Full as Full
from .filters import Heads as Heads
from .filters import Mask as Mask
from .filters import Memory as Memory
from .filters import Padding as Padding
from .filters import Strided as Strided
from .filters import Window as Window
from .kernels import ARD as ARD
from .kernels import RBF as RBF
from .kernels import AdaptiveRBF as AdaptiveRBF
from .kernels import ALiBi as ALiBi
from .kernels import Bridge as Bridge
from .kernels import Buckets as Buckets
from .kernels import Cosine as Cosine
from .kernels import Distance as Distance
from .kernels import Exponential as Exponential
from .kernels import Kernel as Kernel
from .kernels import Laplace as Laplace
from .kernels import Linear as Linear
from .kernels import Lookup as Lookup
from .kernels import Matern as Matern
from .kernels import Periodic as Periodic
from .kernels import Polynomial as Polynomial
from .kernels import Power as Power
from .kernels import Product as Product
from .kernels import RationalQuadratic as RationalQuadratic
from .kernels import RelativeSinusoid as RelativeSinusoid
from .kernels import Scaled as Scaled
from .kernels import SpectralMixture as SpectralMixture
from .kernels import Sum as Sum
from .smoother import smooth as smooth
from .term.factors import Factor as Factor
from .term.features import Features as Features
from .term.links import Link as Link
from .term.term import Term as Term
from .tokenwise.vicinity import vicinity as vicinity

__version__ = "0.1.0"
