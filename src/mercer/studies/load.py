"""Load a study by its name, or from a user's Python file."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

from .. import own
from .study import Study

# Built in: each is a file beside this one.
NAMES = ("quick",)


def load(text: str) -> Study:
    """The study of a name or a file."""
    return read(find(text))


def find(text: str) -> Path:
    """The file of a study: a built-in one by its name, or the user's."""
    if text in NAMES:
        return Path(__file__).with_name(f"{text}.py")
    path = Path(text)
    if path.suffix != ".py" and not path.exists():
        raise ValueError(
            f"there is no study {text!r}; there are: {', '.join(NAMES)}, or give a Python file"
        )
    return path


def read(path: Path) -> Study:
    """The `study` that a file defines, named after the file unless it has a name.

    The file can import modules beside it.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        with own.importable(path.parent):
            names = runpy.run_path(str(path), run_name="mercer_study")
    except Exception as error:
        raise ValueError(f"{own.place(path, error)}: {error or type(error).__name__}") from error
    if "study" not in names:
        raise ValueError(f"{path} must define `study = Study(...)`, but has no `study`")
    study = names["study"]
    if not isinstance(study, Study):
        raise ValueError(f"`study` in {path} must be a mercer.studies.Study, got {study!r:.80}")
    return replace(study, name=path.stem) if study.name == "study" else study
