"""The command with hostile options: one sentence, a documented exit code, and no traceback."""

import subprocess
import sys
import tempfile

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("accelerate")

from mercer import interrupt
from mercer.cli import main
from mercer.cli.commands import app

SMALL = ["--steps", "2", "--batch", "2", "--length", "16", "--eval-items", "40"]
LM = ["train", "lm", "--tokenizer", "bytes", *SMALL]
VISION = ["train", "vision", *SMALL[:4]]
MANY = "9" * 30


def sets(text):
    return [*LM, "--set", text]


MISTAKES = {
    # a slip of the pen
    "no field": (sets("num_layer=7"), "has no field 'num_layer'; did you mean 'num_layers'?"),
    "no field of dropout": (sets("droput=0.1"), "no field 'droput'; did you mean 'dropout'?"),
    "no field of images": ([*VISION, "--set", "pach_size=2"], "did you mean 'patch_size'?"),
    "another library's field": (sets("torch_dtype=x"), "has no field 'torch_dtype'"),
    "no option of text": ([*LM, "--data-option", "zzz=1"], "the data has no option 'zzz'"),
    "nearly an option": ([*LM, "--data-option", "colum=x"], "did you mean 'column'?"),
    "no option of images": ([*VISION, "--data-option", "files=x"], "has no option 'files'"),
    "our own option": ([*LM, "--data-option", "seed=1"], "the data has no option 'seed'"),
    "no option of a system": (
        [*LM, "--system", "dai2019", "--option", "memroy=3"], "did you mean 'memory'?",
    ),
    # what is asked for cannot be done
    "no GPU": ([*LM, "--device", "cuda"], "device cuda cannot be used here"),
    "too small a vocabulary": (sets("vocab_size=3"), "vocab_size must be at least 257"),
    "too few classes": ([*VISION, "--set", "num_labels=3"], "num_labels must be at least 10"),
    "no device": (["explain", "tsai2019", "--device", "meta"], "'meta' cannot be used here"),
    # another type
    "width": (sets("d_model=x"), "d_model must be a whole number, got 'x'"),
    "no width": (sets("d_model=None"), "d_model must be a whole number, got None"),
    "another name of the width": (sets("hidden_size=x"), "hidden_size must be a whole number"),
    "no heads": (sets("num_heads=0"), "num_heads must be a whole number from 1 up, got 0"),
    "dropout": (sets("dropout=x"), "dropout must be a finite number, got 'x'"),
    "cutoffs": (sets("cutoffs=x"), "cutoffs must be a list or None, got 'x'"),
    "start": (sets("initializer_range=x"), "initializer_range must be a finite number or None"),
    "start below 0": (sets("initializer_range=-1"), "initializer_range must be at least 0"),
    "yes or no": (sets("bias=x"), "bias must be True or False, got 'x'"),
    "windows": (sets("windows=3"), "windows must be text or None, got 3"),
    "options": (sets("system_options=x"), "system_options must be a dict or a list or None"),
    "labels": ([*VISION, "--set", "id2label=x"], "id2label must be a dict or None, got 'x'"),
    "side": ([*VISION, "--data-option", "size=x"], "size must be a whole number from 1"),
    "side of the model": ([*VISION, "--set", "image_size=x"], "size must be a whole number"),
    "crops": ([*VISION, "--data-option", "augment=3"], "augment must be of"),
    "column": ([*LM, "--data-option", "column=3"], "column must be a name, got 3"),
    "a set": ([*LM, "--option", "memory={1}"], "must be a number, text, or a list"),
    "a kernel in a position": (
        [*LM, "--position", "ProductKernel(kernel=3)"], "kernel must be a Kernel, got int",
    ),
    "a width of images": (
        [*LM, "--system", "parmar2018", "--option", "width=0"], "width must be a whole number",
    ),
    "heads of token kernels": (
        [*LM, "--system", "leng2026", "--option", "heads=x"], "heads must be at least 1, got x",
    ),
    # too large
    "a window": ([*LM, "--filter", f"Window({MANY}, 0)"], "is beyond the largest whole number"),
    "steps": ([*LM, "--steps", MANY], "steps must be at most 1000000000000"),
    "seed": ([*LM, "--seed", MANY], "seed must be at most 4294967295"),
    "layers": (sets("num_layers=1000000000"), "num_layers must be at most 10000"),
    "a side": ([*VISION, "--data-option", "size=99999999"], "size must be a whole number from 1"),
    "a kernel's number": ([*LM, "--kernel", f"Cosine({'9' * 400})"], "beyond the largest whole"),
    "a base": (["explain", "tsai2019", "--shape", f"1,1,1,{MANY}"], "numbers below 2^31"),
    "seeds": (["study", "quick", "--seeds", f"0-{MANY}"], "--seeds must be below 2^32"),
    "a vocabulary": (
        ["train", "lm", *SMALL, "--tokenizer", "bpe:99999999999"], "size of a BPE must be",
    ),
    "dashes": ([*LM, "--option", "memory=" + "-" * 100_000], "at most 10000 characters"),
    "brackets": ([*LM, "--option", "memory=" + "[" * 9_000], "memory"),
    "a path": ([*LM, "--data", "x" * 300], "File name too long"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_gives_one_sentence(case, tmp_path, monkeypatch):
    arguments, said = MISTAKES[case]
    if case == "no GPU" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "10000")
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == 2, done.output
    assert said in done.output


def test_a_full_memory_has_a_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, sets("d_model=100000000000"))
    assert done.exit_code == 1
    assert "the memory is full" in done.output


def test_settings_nested_too_deeply(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    done = CliRunner().invoke(app, ["train", "lm", "--output", str(tmp_path), "--resume"])
    assert done.exit_code == 2, done.exception
    assert "cannot be read as the settings of a run" in done.output


# --- the net under all commands


def fall(monkeypatch, error, capsys):
    """What the command says, and its code, if a command raises this."""

    def fails(**options):
        raise error

    monkeypatch.setattr("mercer.cli.commands.app", fails)
    with pytest.raises(SystemExit) as caught:
        main.main()
    return caught.value.code, capsys.readouterr().err


def test_what_was_not_expected_is_one_sentence_and_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["mercer", "train", "lm", "--kernel", "RBF(2.0)"])
    code, said = fall(monkeypatch, KeyError("no\nsuch key \udcff"), capsys)
    (file,) = tmp_path.iterdir()
    assert code == main.UNEXPECTED == 4
    assert said.count("\n") == 1
    assert "this was not expected (KeyError" in said
    assert str(file) in said
    text = file.read_text()
    assert "command: mercer train lm --kernel 'RBF(2.0)'" in text
    assert f"torch {torch.__version__}" in text
    assert "Traceback" in text
    assert "in fails" in text


def test_the_details_go_elsewhere_if_the_folder_cannot_be_written(tmp_path, monkeypatch, capsys):
    gone, other = tmp_path / "gone", tmp_path / "other"
    gone.mkdir()
    other.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(tempfile, "tempdir", str(other))
    assert str(other) in fall(monkeypatch, RuntimeError(), capsys)[1]
    assert len(list(other.iterdir())) == 1
    monkeypatch.setattr(tempfile, "tempdir", str(gone))
    code, said = fall(monkeypatch, RuntimeError("x"), capsys)
    assert code == 4
    assert "the details could not be written" in said


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "stopped"),
        (MemoryError(), 1, "the memory is full"),
        (torch.OutOfMemoryError("CUDA"), 1, "the memory is full"),
        (RecursionError("deep"), 4, "RecursionError: deep"),
        (SystemExit(3), 3, ""),
    ],
)
def test_codes(error, code, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = fall(monkeypatch, error, capsys)
    assert found[0] == code
    assert said in found[1]


# As `python -m mercer`, with a Ctrl-C when torch is about to be imported.
STOPS = """
import runpy, signal, sys

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            signal.raise_signal(signal.SIGINT)

# A parent that runs in the background may ignore the signal, and its children would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Stop())
sys.argv[0] = "-m"
runpy.run_module("mercer", run_name="__main__")
"""


def test_an_early_interrupt_gives_no_traceback():
    command = [sys.executable, "-c", STOPS, "systems"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("-m", True),
        ("/usr/bin/mercer", True),
        ("mercer.exe", True),
        ("train.py", False),
        ("", False),
    ],
)
def test_other_programs_keep_their_hook(name, expected, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name])
    assert interrupt.is_command() is expected
    assert sys.excepthook is not interrupt._say


@pytest.mark.parametrize("options", [["kernels"], ["systems", "--json"], ["--help"]])
def test_a_closed_reader_ends_it_with_its_code(options):
    """As in `mercer kernels | true`."""
    command = [sys.executable, "-m", "mercer.cli.main", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 141
