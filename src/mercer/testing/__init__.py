"""Checks that every kernel and filter must pass, yours included: one call runs them all.

    mercer.testing.check_kernel(MyKernel())
    mercer.testing.check_filter(MyFilter())

Two questions, never mixed. Is the lowering right? In float64, each backend against the reference,
to 1e-10, outputs and every gradient. Is the backend accurate? In lower precision, its error against
float64 is at most twice that of the reference in the same dtype, plus rounding.
"""

from .cases import Shape as Shape
from .cases import inputs as inputs
from .filters import check_filter as check_filter
from .kernels import check_accuracy as check_accuracy
from .kernels import check_causality as check_causality
from .kernels import check_gradients as check_gradients
from .kernels import check_kernel as check_kernel
from .kernels import check_lowering as check_lowering
from .kernels import check_properties as check_properties
