"""The set filter: which keys a query sees."""

from .base import And as And
from .base import Causal as Causal
from .base import Filter as Filter
from .base import Full as Full
from .base import Or as Or
from .base import Span as Span
from .data import Documents as Documents
from .data import Padding as Padding
from .heads import Heads as Heads
from .heads import sparse as sparse
from .mask import Mask as Mask
from .patterns import Blocks as Blocks
from .patterns import CausalAcross as CausalAcross
from .patterns import Columns as Columns
from .patterns import Diagonals as Diagonals
from .patterns import Earlier as Earlier
from .patterns import Fixed as Fixed
from .patterns import Memory as Memory
from .patterns import Strided as Strided
from .patterns import Window as Window

# Every filter that the package declares: text, the bench, the tests and the docs follow from this.
FILTERS: tuple[type[Filter], ...] = (
    Full, Causal, Window, Memory, Strided, Fixed, Blocks, Padding, Documents, Mask, Heads,
)  # fmt: skip
