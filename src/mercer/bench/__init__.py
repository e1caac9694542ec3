"""`mercer bench`: how fast each kernel runs, beside softmax attention and other libraries.

A row is timed only if its result is right. Read `measure.py` first.
"""

from .catalogue import KERNELS as KERNELS
from .measure import Row as Row
from .peers import PEERS as PEERS
from .session import run as run
from .settings import DTYPES as DTYPES
from .settings import Settings as Settings
from .settings import read as read
