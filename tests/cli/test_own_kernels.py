"""Kernels of one's own on the command line, with the kernels of examples/own_kernel.py."""

import json
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

pytest.importorskip("accelerate")

from mercer import models, studies, use
from mercer.cli.commands import app

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_kernel.py"
SMALL = "--steps 2 --save-every 1 --batch 2 --length 16 --eval-items 32 --tokenizer bytes"
STUDY = """
from own_kernel import Secant

import mercer as mc
from mercer.studies import Study, Variant

study = Study(
    systems=[
        Variant("object", kernel=Secant(heads=2)),
        Variant("text", kernel="own_kernel.py:Secant(2.0)"),
        Variant("known", kernel=mc.RBF(2.0), position="rotary"),
    ],
    budget={"steps": 2, "batch": 2, "length": 16, "eval_items": 32, "tokenizer": "bytes"},
    seeds=(0,),
)
"""


@pytest.fixture
def invoke(tmp_path, tmp_path_factory, monkeypatch):
    """A command line in a folder with a copy of the example."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(EXAMPLE, tmp_path)
    cache = tmp_path_factory.getbasetemp() / "tokens"

    def call(text):
        kept = f" --cache {cache}" if text.startswith("train") and "own_kernel" in text else ""
        return CliRunner(env={"COLUMNS": "400"}).invoke(app, shlex.split(text + kept))

    return call


def test_a_kernel_of_ones_own_trains_and_goes_on(invoke):
    done = invoke(f"train lm --kernel 'own_kernel.py:Secant(heads=2)' {SMALL} --output run")
    assert done.exit_code == 0, done.output
    stored = json.loads(Path("run/config.json").read_text())
    assert stored["kernel"] == "own_kernel.py:Secant(heads=2)"
    assert list(stored["kernel_files"]) == ["own_kernel.py"]
    assert "trust_kernels" not in stored
    with pytest.raises(ValueError, match=r"pass trust_kernels='own_kernel\.py'"):
        models.KernelLM.from_pretrained("run/model")
    loaded = models.KernelLM.from_pretrained("run/model", trust_kernels="own_kernel.py")
    assert type(loaded.blocks[0].attention.kernel).__name__ == "Secant"
    # As if it had been stopped before its end.
    Path("run/result.json").unlink()
    shutil.rmtree("run/checkpoints/step-00000002")
    again = "mercer train lm --output run --resume --trust-kernels own_kernel.py"
    refused = invoke("train lm --output run --resume")
    assert refused.exit_code == 2
    assert again in refused.output
    # Nor does a stored run trust itself.
    stored["trust_kernels"] = ["own_kernel.py"]
    Path("run/config.json").write_text(json.dumps(stored))
    assert invoke("train lm --output run --resume").exit_code == 2
    done = invoke(again.removeprefix("mercer "))
    assert done.exit_code == 0, done.output
    assert "going on from step-00000001" in done.output
    # The kernel on the command line names the file, too; but the file has changed.
    Path("own_kernel.py").write_text(EXAMPLE.read_text() + "\n# changed\n")
    named = invoke("train lm --output run --resume --kernel 'own_kernel.py:Secant(heads=2)'")
    assert "kernel_files was" in named.output


def test_its_run_is_used_by_the_commands_that_are_printed(invoke):
    done = invoke(f"train lm --kernel 'own_kernel.py:Secant(heads=2)' {SMALL} --output run")
    used = [line.strip() for line in done.output.splitlines() if line.startswith("  mercer ")]
    trust = "--trust-kernels own_kernel.py"
    assert used == [
        f"mercer generate run {trust} 'The'",
        f"mercer evaluate run {trust} --data FILE",
        f"mercer inspect run {trust}",
    ]
    done = invoke(used[0].removeprefix("mercer ") + " --tokens 4")
    assert done.exit_code == 0, done.output
    assert done.output.startswith("The")
    done = invoke(f"evaluate run {trust} --eval-items 32 --json")
    assert done.exit_code == 0, done.output
    # Two windows of 16 tokens, which share one.
    assert json.loads(done.output)["eval_tokens"] == 30
    assert use.load("run", trust_kernels="own_kernel.py").settings.untrusted == ()
    # As if it were not saved with the model, so that the task of the run makes it.
    for file in Path("run/model").glob("*token*"):
        file.unlink()
    done = invoke(f"generate run {trust} The --tokens 4")
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("command", "name", "lacks"),
    [
        ("generate {} The", "lm", "no tokenizer"),
        ("translate {} Katze", "translator", "no tokenizer"),
        ("classify {} cat.png", "vit", "no image processor"),
        ("evaluate {} --data FILE", "translator", "no tokenizer"),
    ],
)
def test_a_model_is_used_only_with_trust(invoke, command, name, lacks):
    kind = {"lm": models.KernelLM, "translator": models.KernelTranslator, "vit": models.KernelViT}
    sizes = {} if name == "vit" else {"vocab_size": 20}
    text = "own_kernel.py:Secant(2.0) * own_kernel.py:Squashed()"
    config = getattr(models.presets, name)(
        "tiny", **sizes, kernel=text, trust_kernels="own_kernel.py"
    )
    kind[name](config).save_pretrained("saved")
    done = invoke(command.format("saved"))
    assert done.exit_code == 2
    assert done.output.strip() == (
        "error: the model in saved needs kernels of own_kernel.py, and a text alone imports "
        "nothing: if you trust it, add --trust-kernels own_kernel.py"
    )
    with pytest.raises(ValueError, match=r"this file, pass trust_kernels='own_kernel\.py'"):
        use.load("saved")
    trusted = invoke(command.format("saved --trust-kernels own_kernel.py"))
    assert lacks in trusted.output
    wrong = invoke(command.format("saved --trust-kernels none.py"))
    assert wrong.exit_code == 2
    assert "there is no file none.py in" in wrong.output


def test_every_file_that_a_model_needs_is_named(invoke):
    texts = ["own_kernel.py:Secant(2.0)", None]
    config = models.presets.lm("tiny", vocab_size=20, kernel=texts, trust_kernels="own_kernel.py")
    models.KernelLM(config).save_pretrained("saved")
    stored = json.loads(Path("saved/config.json").read_text())
    stored["position"] = ["mine.places:Own()", None]
    Path("saved/config.json").write_text(json.dumps(stored))
    done = invoke("generate saved The")
    assert "needs kernels of own_kernel.py, mine.places," in done.output
    assert "add --trust-kernels own_kernel.py --trust-kernels mine.places" in done.output
    with pytest.raises(ValueError, match=r"this code, .*=\['own_kernel.py', 'mine.places'\]"):
        use.load("saved")
    done = invoke("generate saved The --trust-kernels own_kernel.py")
    assert "if you trust it, add --trust-kernels mine.places" in done.output


ROOT = EXAMPLE.parents[1]
COMMANDS = sorted({
    line.strip()
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), EXAMPLE)
    for line in page.read_text().splitlines()
    if line.strip().startswith("mercer ") and "own_kernel.py:" in line
})  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_docs_runs(invoke, command, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    more = {"train": f"{SMALL} --output {tmp_path / 'run'}", "explain": "",
            "bench": "--peers none --repeats 1 --forward-only --shapes 1x4x16x8"}  # fmt: skip
    done = invoke(f"{command.removeprefix('mercer ')} {more[command.split()[1]]}")
    assert done.exit_code == 0, done.output


def test_the_docs_show_the_commands():
    assert {command.split()[1] for command in COMMANDS} == {"train", "explain", "bench"}
    for page in ("README.md", "docs/kernels.md", "docs/training.md"):
        assert "mercer train lm --kernel 'examples/own_kernel.py:" in (ROOT / page).read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--kernel 'own_kernel.py:Secnt()'", "has no kernel 'Secnt'; did you mean 'Secant'?"),
        ("--kernel 'none.py:Secant()'", "there is no file none.py in"),
        ("--kernel 'no.such_module:Secant()'", "cannot import no.such_module"),
        ("--kernel 'Secant()'", "there is no kernel 'Secant'"),
        ("--kernel 'own_kernel.py:Secant(width=2)'", "cannot be built: TypeError"),
        ("--output empty --resume", "empty holds no run to go on with"),
    ],
)
def test_mistakes_give_a_one_line_error(invoke, arguments, message):
    done = invoke(f"train lm {arguments} --dry-run")
    assert done.exit_code == 2
    assert message in done.output
    assert len(done.output.strip().splitlines()) == 1


def test_a_study_imports_what_is_beside_it(invoke, monkeypatch):
    built, path = [], list(sys.path)

    def pretend(job, folder, screen, **options):
        parts = ("kernel", "position", "trust_kernels")
        chosen = {n: x for n, x in job.chosen.items() if n in parts}
        built.append(models.KernelLM(models.presets.lm("tiny", vocab_size=20, **chosen)))
        return SimpleNamespace(
            status="done", metrics={"bits_per_byte": 2.0}, parameters=1, flops_per_token=1.0,
            tokens_per_second=1.0, steps=2, history=[],
        )  # fmt: skip

    monkeypatch.setattr(sys.modules[studies.run.__module__], "train", pretend)
    Path("mine").mkdir()
    shutil.move("own_kernel.py", "mine")
    Path("mine/mine.py").write_text(STUDY)
    done = invoke("study mine/mine.py --output results")
    assert done.exit_code == 0, done.output
    records = [json.loads(line) for line in Path("results/results.jsonl").read_text().splitlines()]
    assert {r["variant"]: r["settings"]["kernel"] for r in records} == {
        "object": "own_kernel.py:Secant(heads=2)",
        "text": "own_kernel.py:Secant(2.0)",
        "known": "RBF(2.0)",
    }
    kinds = [type(block.attention.kernel).__name__ for model in built for block in model.blocks]
    assert kinds == ["Secant"] * 4 + ["RBF"] * 2
    assert "3 of 3 jobs are done already" in invoke("study mine/mine.py --output results").output
    assert sys.path == path
    # Another file of kernels is another result, and no other budget.
    with open("mine/own_kernel.py", "a") as file:
        file.write("\n# changed\n")
    done = invoke("study mine/mine.py --output results --table")
    assert "older results of 'text' are left out: kernel_files was" in done.output


def test_a_variant_without_a_text_says_what_to_do(invoke):
    Path("mine.py").write_text(STUDY.replace("mc.RBF(2.0)", "type('A', (mc.RBF,), {})()"))
    done = invoke("study mine.py")
    assert done.exit_code == 2
    assert "variant 'known': A has no text form" in done.output
    assert "my_kernels.py:Name(2.0)" in done.output


def test_a_kernel_is_explained_alone_or_in_a_system(invoke):
    shape = "--shape 1,2,32,8"
    done = invoke(f"explain --kernel 'own_kernel.py:Secant(heads=2)' {shape}")
    assert done.exit_code == 0, done.output
    assert "kernel    1 / cosh(|q - k| / s_h)" in done.output
    done = invoke(f"explain dai2019 --kernel 'own_kernel.py:Squashed()' {shape}")
    assert "exp(<tanh q, tanh k>) * exp(<q.relative W, sinusoid(i-j)>)" in done.output
    done = invoke(
        f"explain --kernel 'RBF(2.0)*Exponential(on=\"position\")' --filter 'Causal()' {shape}"
    )
    assert "position 8" in done.output
    assert "filter    Causal()" in done.output
    done = invoke(f"explain --kernel 'RBF()' --position alibi {shape}")
    assert "exp(-|q - k|^2 / 2 s^2) * exp(-m_h |i-j|)" in done.output
    done = invoke(f"explain all --kernel 'RBF()' {shape}")
    assert done.output.count("exp(-|q - k|^2 / 2 s^2)") == 11
    for wrong, message in (
        ("", "explain needs a system or --kernel"),
        ("--kernel 'RBX()'", "did you mean 'RBF'?"),
        ("--kernel 'own_kernel.py:Secant(heads=3)'", "3 heads"),
        ("kundu2026 --kernel 'RBF()'", "kundu2026 has a kernel and positions of its own"),
        ("vaswani2018", "did you mean 'vaswani2017'?"),
    ):
        done = invoke(f"explain {wrong} {shape}")
        assert done.exit_code == 2
        assert message in done.output


def test_the_bench_takes_a_text(invoke):
    kernels = "rbf,own_kernel.py:Secant(2.0, heads=4),RBF([1.0, 2.0, 3.0, 4.0])"
    done = invoke(f"bench --kernels '{kernels}' --shapes 1x4x32x8 --peers none --repeats 1")
    assert done.exit_code == 0, done.output
    for name in ("own_kernel.py:Secant", "RBF([1.0"):
        (line,) = (line for line in done.output.splitlines() if line.startswith(name))
        assert "refuses" not in line
        assert "fails" not in line
    done = invoke("bench --kernels 'own_kernel.py:Secnt()'")
    assert "did you mean 'Secant'?" in done.output
    assert "--kernels has no 'rbff'; did you mean 'rbf'?" in invoke("bench --kernels rbff").output
