"""The results in a folder: which count, what is odd about them, and the files made of them."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from .curves import draw_curves
from .ledger import TUNING, Ledger, Record
from .paper import beside
from .study import Study, digest
from .table import Row, as_markdown, rows
from .tune import say_chosen

# What the analysis of a study wrote last.
ANALYSIS = "analysis.md"


def look(study: Study, ledger: Ledger) -> tuple[dict[str, Record], list[str]]:
    """The results in a folder, and notes on them; ValueError for another budget."""
    records, torn = ledger.scan()
    notes = [f"{place} cannot be read and is ignored; its job runs again" for place in torn]
    old: dict[str, str] = {}
    for record in records.values():
        changed = study.differences(record)
        if budget := [text for name, text in changed.items() if name not in study.free]:
            raise ValueError(
                f"{ledger.folder} holds results of another budget: {'; '.join(budget)}. "
                "The two cannot be compared: give this study another folder by --output, "
                "or remove the old folder"
            )
        if changed:
            old[record.variant] = "; ".join(changed.values())
    notes += [f"older results of {name!r} are left out: {why}" for name, why in old.items()]
    own = [record for record in records.values() if study.owns(record)]
    if stuck := {record.variant for record in own if record.status.endswith("(unigram)")}:
        notes.append(
            f"no better than the frequencies of tokens, so not converged: {_join(stuck)} "
            "(the rule is in docs/training.md)"
        )
    return records, notes + warn_of_mixture(own)


def warn_of_mixture(records: Sequence[Record]) -> list[str]:
    """Notes on versions and data that differ between results."""
    notes = []
    for name in ("mercer", "python", "torch"):
        versions = {str(r.environment.get("versions", {}).get(name)) for r in records}
        if len(versions - {"None"}) > 1:
            notes.append(f"results come from several versions of {name}: {_join(versions)}")
    compiled = sum("compiled" in r.environment for r in records)
    if 0 < compiled < len(records):
        notes.append(
            f"{compiled} of {len(records)} results are of compiled models, so do not compare speeds"
        )
    versions_of: dict[str, Counter[str]] = defaultdict(Counter)
    for r in records:
        if data := r.environment.get("data"):
            # What decides how the same data is read, besides its files.
            read = [r.settings.get(name) for name in ("data", "data_options", "tokenizer")]
            versions_of[json.dumps(read, default=str)][str(data)] += 1
    for said, found in versions_of.items():
        if len(found) > 1:
            counts = ", ".join(f"{name} in {n}" for name, n in sorted(found.items()))
            notes.append(
                f"results on {json.loads(said)[0]} are of {len(found)} versions of the data, so "
                f"they cannot be compared: {counts} of the results"
            )
            break
    # Such as the embedded text, which depends on the version of Python.
    for name, what in (("eval_tokens", "tokens"), ("eval_items", "items")):
        sizes = {str(r.metrics[name]) for r in records if r.metrics.get(name)}
        if len(sizes) > 1:
            notes.append(f"results were measured on different texts, of {_join(sizes)} {what}")
            break
    return notes


def _join(texts: set[str]) -> str:
    return ", ".join(sorted(texts))


def look_up(
    study: Study, folder: Path, seeds: Sequence[int] | None = None
) -> tuple[list[Row], list[str], list[Path]]:
    """Merge the results in a folder: rows, notes, and the files written."""
    ledger = Ledger(folder)
    records, notes = look(study, ledger)
    found = rows(study, records.values(), seeds)
    if not any(row.records for row in found):
        return found, notes, []
    ledger.gather()
    table = folder / "table.md"
    parts = [as_markdown(study, found), say_chosen(study), beside(study.paper, found)]
    if study.analyse is not None:
        try:
            parts.append(_analyse(study.analyse, found, folder))
        # After hours of training, a fault of the analysis must not cost the table.
        except Exception as error:
            notes.append(f"the analysis failed: {error or type(error).__name__}")
    replace_file(table, "\n".join(f"{part.strip()}\n" for part in parts if part))
    files = [ledger.main, table]
    if folder.parent.name == TUNING:
        # The curves of trials would cost more time than they tell.
        return found, notes, files
    try:
        if curves := draw_curves(study, found, folder / "curves.png"):
            files.append(curves)
    except ModuleNotFoundError as error:
        # After hours of training, a missing package must not cost the table.
        notes.append(f"no curves: they need {error.name}: pip install 'mercer[train]'")
    return found, notes, files


def _analyse(
    analyse: Callable[[Sequence[Row], Path], str], found: Sequence[Row], folder: Path
) -> str:
    """The analysis; of the same results where it was made, if the models are not in this folder."""
    keys = sorted(record.key for row in found for record in row.records)
    mark, path = f"<!-- of the results {digest({'keys': keys})} -->\n", folder / ANALYSIS
    if text := analyse(found, folder):
        replace_file(path, mark + text)
        return text
    kept = path.read_text(encoding="utf-8") if path.exists() else ""
    return kept.removeprefix(mark) if kept.startswith(mark) else ""


def replace_file(path: Path, text: str | bytes) -> None:
    """Write a file in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(text.encode() if isinstance(text, str) else text)
    os.replace(temporary, path)
