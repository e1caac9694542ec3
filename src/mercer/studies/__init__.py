"""Studies: systems compared on one task, with one budget and several seeds."""

from .conduct import Outcome, look_up, run
from .curves import draw_curves
from .ledger import Ledger, Record, Shard
from .load import NAMES, find, load
from .paper import Claim, Paper
from .report import conclude, introduce, list_studies, show
from .study import PARTS, Job, Metric, Study, Variant
from .table import Row, draw, rows
from .tune import choose, tune

__all__ = [
    "NAMES",
    "PARTS",
    "Claim",
    "Job",
    "Ledger",
    "Metric",
    "Outcome",
    "Paper",
    "Record",
    "Row",
    "Shard",
    "Study",
    "Variant",
    "choose",
    "conclude",
    "draw",
    "draw_curves",
    "find",
    "introduce",
    "list_studies",
    "load",
    "look_up",
    "rows",
    "run",
    "show",
    "tune",
]
