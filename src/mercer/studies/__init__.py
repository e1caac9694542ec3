"""Studies: systems compared on one task, with one budget and several seeds."""

from .conduct import Outcome, check_compile, run
from .curves import draw_curves
from .ledger import Ledger, Record, Shard
from .load import NAMES, check_data, find, load, use_data
from .look import look_up
from .measure import Trained
from .paper import Claim, Paper
from .parallel import run_workers
from .plan import estimate, show_plan
from .publish import publish
from .report import as_data, conclude, describe_studies, introduce, list_studies, show
from .rough import roughen
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
    "Trained",
    "Variant",
    "as_data",
    "check_compile",
    "check_data",
    "choose",
    "conclude",
    "describe_studies",
    "draw",
    "draw_curves",
    "estimate",
    "find",
    "introduce",
    "list_studies",
    "load",
    "look_up",
    "publish",
    "roughen",
    "rows",
    "run",
    "run_workers",
    "show",
    "show_plan",
    "tune",
    "use_data",
]
