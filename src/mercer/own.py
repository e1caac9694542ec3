"""Classes of your own in formulas: `my_kernels.py:ARD(32)`, `package.module:ARD(32)`.

Requirement: a text never imports anything, since it may come from a saved config. A file or a
module is imported only if it is in `trust`, the names that a person has given for this purpose: on
a command line, as `trust_kernels`, or by an object of the class.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import re
import sys
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .names import suggest

# A file of Python, or the dotted name of a module.
Trust = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None
# Strings of a formula are skipped; a source starts where no character of a path stands before it.
OWN = re.compile(
    r"""("[^"]*"|'[^']*')|(?<![\w.~/\\:-])((?:[A-Za-z]:[/\\])?[\w.~/\\-]+):([A-Za-z_]\w*)(?=\s*\()"""
)


class Untrusted(ValueError):
    """A text needs files or modules that are not in trust."""

    def __init__(self, sources: Sequence[str], what: str = "this") -> None:
        super().__init__(sources, what)
        self.sources = list(sources)
        names = ", ".join(sources)
        self.reason = f"{what} needs kernels of {names}, and a text alone imports nothing"

    def __str__(self) -> str:
        first, *more = self.sources
        kind = "code" if more else "file" if first.endswith(".py") else "module"
        given = self.sources if more else first
        return f"{self.reason}: if you trust this {kind}, pass trust_kernels={given!r}"


def split(text: str) -> tuple[str, dict[str, tuple[str, str]]]:
    """The text with a plain name for each `source:Name`, and what each of these stands for."""
    found: dict[str, tuple[str, str]] = {}

    def replace(match: re.Match[str]) -> str:
        quoted, source, name = match.groups()
        if quoted is not None:
            return str(quoted)
        stand_in = f"own_{len(found)}_"
        while stand_in in text:
            stand_in += "_"
        found[stand_in] = source, name
        return stand_in

    return OWN.sub(replace, text), found


def sources(*values: Any) -> tuple[str, ...]:
    """The files and modules that texts name, also inside lists and dicts."""
    found: list[str] = []
    for value in values:
        if isinstance(value, str):
            found += [source for source, _ in split(value)[1].values()]
        elif isinstance(value, Mapping):
            found += sources(*value.values())
        elif isinstance(value, list | tuple):
            found += sources(*value)
    return tuple(dict.fromkeys(found))


def trusted(trust: Trust) -> tuple[str, ...]:
    """The names of trust, files with their full path; ValueError if one is not there."""
    given = [trust] if isinstance(trust, str | os.PathLike) else list(trust or ())
    for name in given:
        if not isinstance(name, str | os.PathLike) or not str(name):
            raise ValueError(f"trust_kernels must be files or modules as text, got {name!r}")
    names = [os.fspath(name) for name in given]
    return tuple(dict.fromkeys(str(locate(n)) if is_file(n) else n for n in names))


def is_file(source: str) -> bool:
    """Whether a source is a file and not a module; ValueError if it is neither."""
    if source.endswith(".py"):
        return True
    if not all(part.isidentifier() for part in source.split(".")):
        raise ValueError(
            f"kernels of your own are in a file my_kernels.py or a module package.module, "
            f"got {source!r}"
        )
    return False


def locate(source: str) -> Path:
    """The path of a file, looked for in the current folder, then where Python looks for modules."""
    path = Path(source).expanduser()
    for folder in ("", *sys.path):
        if (found := Path(folder) / path).is_file():
            return found.resolve()
    raise ValueError(f"there is no file {source} in {Path.cwd()}")


def find(source: str, name: str, kind: type, trust: Trust) -> type:
    """The class of a source; ValueError if the source is not trusted, or has no such class."""
    is_file(source)
    module = load(_chosen(source, trusted(trust)))
    found = getattr(module, name, None)
    what = kind.__name__.lower()
    if found is None:
        own = [n for n, x in vars(module).items() if _fits(x, kind) and _is_from(x, module)]
        hint = suggest(name, own) if own else f"it has no {what}s"
        raise ValueError(f"{source} has no {what} {name!r}; {hint}")
    if not _fits(found, kind):
        raise ValueError(f"{name} in {source} must be a subclass of mercer's {kind.__name__}")
    return found


def load(source: str) -> types.ModuleType:
    """The module of a file or of a dotted name; a file that has changed is read again."""
    if not is_file(source):
        with importable(Path.cwd()):
            try:
                return importlib.import_module(source)
            except Exception as error:
                raise ValueError(f"cannot import {source}: {describe(error)}") from error
    path = locate(source)
    text = path.read_bytes()
    version = hashlib.sha256(text).hexdigest()
    for module in list(sys.modules.values()):
        there = getattr(module, "__file__", None)
        if isinstance(there, str) and os.path.basename(there) == path.name:
            # Of a file that the person has imported there is one version, theirs.
            same = Path(there).resolve() == path
            if same and vars(module).get("__version_of_file__", version) == version:
                return module
    name = f"{path.stem}-{hashlib.sha256(bytes(path) + text).hexdigest()[:16]}"
    module = types.ModuleType(name)
    vars(module).update(__file__=str(path), __version_of_file__=version)
    # Dataclasses look for their module there.
    sys.modules[name] = module
    try:
        with importable(path.parent):
            exec(compile(text, str(path), "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ValueError(f"{place(path, error)}: {describe(error)}") from error
    return module


def name_of(cls: type) -> tuple[str, str]:
    """How a text names a class, such as `my_kernels.py:ARD`, and the source to trust for it."""
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    if module is None or not isinstance(file, str) or not file.endswith(".py"):
        raise ValueError(f"{cls.__name__} has no text form, since it is not in a Python file")
    if getattr(module, cls.__name__, None) is not cls:
        raise ValueError(
            f"{cls.__name__} has no text form, since it is not at the top level of {file}"
        )
    if "." in module.__name__:
        return f"{module.__name__}:{cls.__name__}", module.__name__
    return f"{Path(file).name}:{cls.__name__}", str(Path(file).resolve())


def digests(names: Sequence[str], trust: Trust) -> dict[str, str]:
    """For each source, the start of its file's SHA-256."""
    found = {}
    for source in names:
        file = load(_chosen(source, trusted(trust))).__file__
        if file is not None:
            found[source] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    return found


def untrusted(names: Sequence[str], trust: Trust) -> tuple[str, ...]:
    """The sources that are not in trust."""
    known = trusted(trust)
    return tuple(name for name in names if not any(_common(name, one) for one in known))


@contextlib.contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Modules of this folder can be imported in the block; sys.path is as before after it."""
    before = list(sys.path)
    sys.path.insert(0, str(folder.resolve()))
    # A file may be newer than what the finders remember of the folder.
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before


def place(path: Path, error: BaseException) -> str:
    """file:line of the last line of a person's file that ran."""
    if isinstance(error, SyntaxError) and Path(error.filename or path).name == path.name:
        return f"{path}:{error.lineno}"
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).name == path.name
    ]
    return f"{path}:{lines[-1]}" if lines else str(path)


def blame(error: BaseException, trust: Trust) -> str | None:
    """An error in trusted code, with its file and line; None for an error elsewhere."""
    names = trusted(trust)
    files = {n if is_file(n) else getattr(sys.modules.get(n), "__file__", None) for n in names}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename in files:
            return f"{frame.filename}:{frame.lineno}: {describe(error)}"
    return None


def describe(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    lines = str(error).strip().splitlines()
    kind = type(error).__name__
    return f"{kind}: {lines[0]:.200}" if lines else kind


def _chosen(source: str, trust: Sequence[str]) -> str:
    """The trusted name that a source means: the one with the most parts in common at its end."""
    shared = {name: _common(source, name) for name in trust}
    most = max(shared.values(), default=0)
    found = [name for name, count in shared.items() if count == most]
    if not most:
        raise Untrusted([source])
    if len(found) > 1:
        raise ValueError(f"{source} may be {' or '.join(found)}: trust one of them")
    return found[0]


def _common(a: str, b: str) -> int:
    """How many parts two names have in common, counted from their ends."""
    pairs = list(zip(reversed(_parts(a)), reversed(_parts(b)), strict=False))
    return next((n for n, (x, y) in enumerate(pairs) if x != y), len(pairs))


def _parts(source: str) -> list[str]:
    """The parts of a path or of a dotted name."""
    if source.endswith(".py"):
        return [p for p in re.split(r"[/\\]", source.removesuffix(".py")) if p not in ("", ".")]
    return source.split(".")


def _fits(value: Any, kind: type) -> bool:
    return isinstance(value, type) and issubclass(value, kind)


def _is_from(value: Any, module: types.ModuleType) -> bool:
    return getattr(value, "__module__", None) == module.__name__
