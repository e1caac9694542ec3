"""A report as one HTML file, which asks for nothing: no request, no font, no script from outside.

The data is JSON, deflated and in base64, with as many decimals of token kernels as fit. Tokens are
text in it and become text nodes of the page, so that nothing in them is read as HTML. A
Content-Security-Policy allows the page's own script and style, by their hashes, and forbids
everything else.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import tempfile
import zlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from ..report import Report
from ..style import Distances
from .encode import encode
from .tree import encode_distances

SCRIPTS = (
    "core.js", "tables.js", "charts.js", "heads.js", "rows.js", "tokens.js", "training.js",
    "compare.js", "main.js",
)  # fmt: skip
# The most characters of data for a model, where fewer decimals of token kernels can help.
MOST = 1_400_000


def make_page(reports: Sequence[Report], distances: Distances | None = None) -> str:
    """The HTML of the page; several reports are views beside each other."""
    if not reports:
        raise ValueError("a page needs one report or more")
    for decimals in (6, 4, 3, 2):
        data = _pack(reports, distances, decimals)
        if len(data) <= MOST * len(reports):
            break
    style, script = _asset("page.css"), "\n".join(map(_asset, SCRIPTS))
    title = " and ".join(report.title for report in reports[:3])
    title += "" if len(reports) <= 3 else f" and {len(reports) - 3} more"
    parts = {
        "TITLE": html.escape(_printable(title)),
        "POLICY": (
            f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
            "img-src data:; base-uri 'none'; form-action 'none'"
        ),
        "STYLE": style,
        "SCRIPT": script,
        "DATA": data,
    }
    pieces = _asset("page.html").split("%%")
    assert len(pieces) % 2
    return "".join(parts[piece] if n % 2 else piece for n, piece in enumerate(pieces))


def write_page(
    reports: Sequence[Report], path: str | os.PathLike[str], distances: Distances | None = None
) -> Path:
    """Write the page to `path`, which is replaced in one step."""
    path = Path(path)
    text = make_page(reports, distances)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # As for a file that is created by open.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
    return path


def _pack(reports: Sequence[Report], distances: Distances | None, decimals: int) -> str:
    values = {
        "models": [encode(report, decimals) for report in reports],
        "distances": None if distances is None else encode_distances(distances),
    }
    text = json.dumps(values, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # Half of a surrogate pair is no character of UTF-8.
    return base64.b64encode(zlib.compress(text.encode("utf-8", "replace"), 9)).decode()


def _asset(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "\ufffd" for c in text)
