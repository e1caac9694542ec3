"""Load a study by its name, or from a user's Python file."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from .. import own
from ..names import suggest
from .study import Study

# Built in: the name of each, and its file beside this one.
FILES = {
    "quick": "quick.py",
    **{
        f"tsai-{table}{task}": "tsai.py"
        for table in ("positions", "kernels", "order", "values") for task in ("", "-lm")
    },
    "tsai-positions-iwslt": "tsai.py",
    "gka-language": "gka.py",
    "gka-vision": "gka.py",
    "kernels-per-second": "speed.py",
    "twikers-causality": "twikers.py",
    "twikers-speech": "twikers.py",
    "twikers-style": "twikers_style.py",
    "twikers-bias": "twikers.py",
    "twikers-bias-translation": "twikers.py",
    "twikers-bias-tags": "twikers.py",
    "twikers-bias-genre": "twikers.py",
    "twikers-bias-pretrained": "twikers.py",
    "recall": "recall.py",
}  # fmt: skip
NAMES = tuple(FILES)
# "full", "small" -> the study; the first is the default.
Sizes = Mapping[str, Callable[[], Study]]


def load(text: str, size: str | None = None) -> Study:
    """The study of a name or a file, in one of its sizes."""
    return read(find(text), size, text if text in FILES else None)


def list_sizes(name: str) -> tuple[str, ...]:
    """The sizes of a study that comes with the package; none if it has one only."""
    studies = runpy.run_path(str(find(name)), run_name="mercer_study").get("studies", {})
    return tuple(studies.get(name, ()))


def use_data(study: Study, source: str) -> Study:
    """The study on the data in a folder, or on a source by name; ValueError if it has its own."""
    if not study.corpus:
        raise ValueError(f"the study {study.name} names its own data, so it takes no --data")
    return replace(study, source=source)


def check_data(study: Study) -> None:
    """Raise ValueError if the study's data is in a folder that was not given or lacks it."""
    if not study.corpus:
        return
    if not study.source:
        raise ValueError(
            f"the study {study.name} needs data: give --data FOLDER, a folder with "
            f"{study.corpus}, or a source by name; see docs/studies.md"
        )
    folder = Path(study.source)
    # A name of the hub, such as owner/name, is no path.
    if not folder.exists() and (folder.is_absolute() or study.source.startswith((".", "~"))):
        raise ValueError(f"there is no folder {folder}, which --data names")
    if folder.is_dir() and not (folder / Path(study.corpus).parts[0]).is_dir():
        raise ValueError(
            f"{folder} has no folder {Path(study.corpus).parts[0]}, where {study.corpus} should be"
        )
    for name in study.needs:
        if not (folder / name).exists():
            raise ValueError(
                f"the study {study.name} needs {name} in a folder that --data names, "
                f"got {study.source}"
            )


def find(text: str) -> Path:
    """The file of a study: a built-in one by its name, or the user's."""
    if text in FILES:
        return Path(__file__).with_name(FILES[text])
    path = Path(text)
    if path.suffix != ".py" and not path.exists():
        raise ValueError(
            f"there is no study {text!r}; there are: {', '.join(NAMES)}, or give a Python file"
        )
    return path


def read(path: Path, size: str | None = None, name: str | None = None) -> Study:
    """The `study` that a file defines, named after the file unless it has a name.

    A file may define `studies` in place of it, by name and size: a name -> `Sizes`. The file can
    import modules beside it.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        with own.importable(path.parent):
            names = runpy.run_path(str(path), run_name="mercer_study")
    except Exception as error:
        raise ValueError(f"{own.place(path, error)}: {error or type(error).__name__}") from error
    # `from mercer import studies` makes a module of that name.
    if isinstance(names.get("studies"), Mapping):
        return _choose(names["studies"], path, size, name)
    if "study" not in names:
        raise ValueError(f"{path} must define `study = Study(...)`, but has no `study`")
    if size is not None:
        raise ValueError(f"the study in {path} has one size only, so it takes no --size {size}")
    study = names["study"]
    if not isinstance(study, Study):
        raise ValueError(f"`study` in {path} must be a mercer.studies.Study, got {study!r:.80}")
    return replace(study, name=path.stem) if study.name == "study" else study


def _choose(studies: Mapping[str, Sizes], path: Path, size: str | None, name: str | None) -> Study:
    name = name or next(iter(studies))
    sizes = studies[name]
    if size is not None and size not in sizes:
        raise ValueError(f"{path} has no size {size!r} of {name}; {suggest(size, sizes)}")
    first = next(iter(sizes))
    # Results of another size stay apart.
    called = name if size in (None, first) else f"{name}-{size}"
    return replace(sizes[size or first](), name=called)
