"""The set filter: which keys a query sees."""

from .base import And as And
from .base import Causal as Causal
from .base import Filter as Filter
from .base import Full as Full
from .base import Or as Or
from .base import Span as Span
from .data import Documents as Documents
from .data import Padding as Padding
from .patterns import Earlier as Earlier
from .patterns import Fixed as Fixed
from .patterns import Memory as Memory
from .patterns import Strided as Strided
from .patterns import Window as Window
