"""An attack: one file of a stopped run, or of its cache, is damaged, and the run goes on.

What is signed (checkpoints, caches) leads to the same weights, whatever is damaged. Damage in
other files leads to the same, or to an error with a documented exit code. Nothing ends in a
traceback.
"""

import functools
import random
import shutil
import tempfile
from pathlib import Path

import torch
from faults.small_run import arguments, outcome, place
from typer.testing import CliRunner

SIGNED = ("cache", "checkpoints")
CODES = {0, 1, 2}


@functools.cache
def prepared() -> Path:
    """A folder with a run that stopped after a checkpoint, its cache, and its end if it goes on."""
    path = place()
    said = resume(path / "run", path / "cache", "--save-every", "5", first=True)
    assert said.exit_code == 0, said.output
    # As it was between the checkpoint and the end.
    shutil.copytree(path / "run", path / "end")
    shutil.rmtree(path / "run" / "model")
    (path / "run" / "result.json").unlink()
    return path


def resume(folder: Path, cache: Path, *more: str, first: bool = False) -> object:
    from mercer.cli.train import app

    given = ["lm", "--output", str(folder), "--cache", str(cache), "--resume"]
    torch.set_num_threads(1)
    return CliRunner().invoke(app, [*(arguments(folder, cache) if first else given), *more])


def attack(seed: int, device: str = "cpu") -> str:
    """One damage; AssertionError says what followed."""
    choose = random.Random(seed)
    whole = prepared()
    with tempfile.TemporaryDirectory(prefix="mercer-flip-") as name:
        copy = Path(name)
        for part in ("run", "cache"):
            shutil.copytree(whole / part, copy / part)
        files = sorted(p for p in copy.rglob("*") if p.is_file() and p.name != ".lock")
        path = choose.choice(files)
        signed = any(part in SIGNED for part in path.relative_to(copy).parts[:-1])
        said = f"{path.relative_to(copy)}, {damage(path, choose, signed)}"
        done = resume(copy / "run", copy / "cache")
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            error = done.exception
            raise AssertionError(f"{said}: {type(error).__name__}: {error}") from error
        assert done.exit_code in CODES, f"{said}: exit code {done.exit_code}"
        assert "Traceback" not in done.output, f"{said}: {done.output[-300:]}"
        if signed:
            assert done.exit_code == 0, f"{said}: {done.output[-300:]}"
            same = outcome(copy / "run")[0] == outcome(whole / "end")[0]
            assert same, f"{said}: other weights, in silence"
    return f"{said}: exit code {done.exit_code}"


def damage(path: Path, choose: random.Random, signed: bool) -> str:
    """Damage a file and say how. A bit of a file that is not signed may make another valid file."""
    data = bytearray(path.read_bytes())
    ways = ["cut", "zeros", "noise", "longer", "removed", *(["bit"] * 5 if signed else [])]
    way = choose.choice(ways if data else ["longer", "removed"])
    at = choose.randrange(len(data)) if data else 0
    match way:
        case "bit":
            data[at] ^= 1 << choose.randrange(8)
        case "cut":
            del data[at:]
        case "zeros":
            data[at : at + 64] = bytes(len(data[at : at + 64]))
        case "noise":
            data[at : at + 64] = choose.randbytes(len(data[at : at + 64]))
        case "longer":
            data += choose.randbytes(choose.choice((1, 64, 4096)))
        case "removed":
            path.unlink()
            return way
    path.write_bytes(data)
    return f"{way} at {at}"
