"""Publish a study: its results without checkpoints, for a repository or the appendix of a paper.

The folder holds results.jsonl, those of the trials in tuning/, table.md, the pictures, and
about.json: question, command, machines, versions and data. `--table --output FOLDER` reads it like
any folder of a study. Results of several machines are merged; the same results give the same files.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from .ledger import MAIN, TUNING, Ledger, Record, lines_of
from .look import ANALYSIS, look, look_up, replace_file
from .study import Study
from .tune import choose, points

ABOUT = "about.json"
PICTURES = ("*.png", "*.svg")


def publish(study: Study, folder: Path, place: Path) -> list[Path]:
    """Merge the results of `folder` into those of `place`; the files written.

    ValueError if there is none, or if either folder holds results of another budget.
    """
    for trial, inside in ((one, Path(TUNING) / one.name) for _, one in points(study)):
        _merge(trial, folder / inside, place / inside)
    chosen = choose(study, place)
    if chosen is None:
        raise ValueError(
            f"{folder} lacks trials of the tuning, and so what each system was tuned to: its "
            f"results need those in {folder / TUNING}, too"
        )
    study = replace(study, chosen=chosen)
    _merge(study, folder, place)
    # Pictures and an analysis that need the models of the jobs are made where these are.
    if folder.is_dir() and folder.resolve() != place.resolve():
        look_up(study, folder)
        for pattern in (ANALYSIS, *PICTURES):
            for path in folder.glob(pattern):
                shutil.copyfile(path, place / path.name)
    _, notes, files = look_up(study, place)
    if not files:
        raise ValueError(f"there are no results of the study {study.name} in {folder}")
    about = place / ABOUT
    found = [r for r in Ledger(place).read().values() if study.owns(r)]
    replace_file(about, json.dumps(describe(study, found, notes), indent=2) + "\n")
    return [*files, about]


def _merge(study: Study, source: Path, place: Path) -> None:
    """One file of all results that are this study's, in the order of its jobs."""
    found = {key: r for one in (place, source) for key, r in look(study, Ledger(one))[0].items()}
    names = [variant.name for variant in study.variants]
    own = [_stripped(record) for record in found.values() if study.owns(record)]
    if own:
        own.sort(key=lambda record: (record.seed, names.index(record.variant)))
        place.mkdir(parents=True, exist_ok=True)
        replace_file(place / MAIN, lines_of(own))


def _stripped(record: Record) -> Record:
    """Without the command of its process, which names folders of its machine."""
    kept = {name: x for name, x in record.environment.items() if name != "command"}
    return replace(record, environment=kept)


def describe(study: Study, records: Iterable[Record], notes: Iterable[str] = ()) -> dict[str, Any]:
    """What readers of the results must know: from the study, and from what the records say."""
    records = list(records)
    around = [record.environment for record in records]
    data = f" --data {'DATA' if Path(study.source or '.').exists() else study.source}"
    return {
        "study": study.name,
        "title": study.title or study.name,
        "question": study.question,
        "remark": study.remark,
        "command": f"mercer study {_called(study)}{data if study.corpus else ''}",
        "data": sorted({str(r.settings.get("data") or "drawn") for r in records}),
        "data_versions": sorted({str(e["data"]) for e in around if e.get("data")}),
        "budget": _plain(study.budget),
        "tuned": _plain(study.tune),
        "seeds": sorted({record.seed for record in records}),
        "jobs": len(records),
        "hours": round(sum(record.seconds for record in records) / 3600, 2),
        "devices": _all(around, "device"),
        "versions": {
            name: _all([e.get("versions", {}) for e in around], name)
            for name in ("mercer", "python", "torch", "triton", "cuda")
        },
        "commits": _all(around, "commit"),
        "from": min(record.finished for record in records)[:10],
        "to": max(record.finished for record in records)[:10],
        "notes": list(notes),
    }


def _called(study: Study) -> str:
    """The words that name a study and its size in the command."""
    from .load import NAMES

    name, _, size = study.name.rpartition("-")
    return f"{name} --size {size}" if study.name not in NAMES and name in NAMES else study.name


def _all(found: Iterable[Mapping[str, Any]], name: str) -> list[str]:
    return sorted({str(one[name]) for one in found if one.get(name)})


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(json.dumps(dict(settings), default=str))
    return kept
