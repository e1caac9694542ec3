"""Modules: attention from four parts, positions, caches, token kernels."""

from .attention import KernelAttention as KernelAttention
from .bandwidths import bandwidth_report as bandwidth_report
from .bandwidths import gaussian_report as gaussian_report
from .cache import Cache as Cache
from .cache import SegmentMemory as SegmentMemory
from .embeddings import Learned as Learned
from .embeddings import Sinusoid as Sinusoid
from .gaussian import GaussianAttention as GaussianAttention
from .grid import Grid2D as Grid2D
from .positions import ALiBi as ALiBi
from .positions import DirectSum as DirectSum
from .positions import LookupTable as LookupTable
from .positions import NoPosition as NoPosition
from .positions import Position as Position
from .positions import ProductKernel as ProductKernel
from .positions import RelativeBiases as RelativeBiases
from .positions import RelativeSinusoid as RelativeSinusoid
from .positions import Rotary as Rotary
from .tokens import Taps as Taps
from .tokens import TokenKernels as TokenKernels
from .weights import attention_weights as attention_weights
from .windows import layer_windows as layer_windows
