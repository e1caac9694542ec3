"""An attack: random texts as kernels, positions, filters, and options of the command.

A text is read, or refused with a ValueError; a command ends with a documented exit code and prints
no traceback. Dry runs and `explain` alone are started, so no text costs a training.
"""

import os
import random

# A text that is no file is looked up on the hub, with retries for half a minute.
os.environ["HF_HUB_OFFLINE"] = "1"

from typer.testing import CliRunner

from mercer import parse

SEEDS = {
    "kernel": (
        "RBF(2.0)", "Exponential() * Lookup(16)", 'RBF(2.0)*Exponential(on="position")',
        "Matern(nu=2.5) + Polynomial(2) * Laplace(heads=2)", "Cosine(4.0) * ALiBi([0.5, 0.25])",
        "Linear(signed=True) * RationalQuadratic(alpha=0.5)", "AdaptiveRBF(8, 1.0, heads=2)",
    ),
    "position": (
        "rotary", "ProductKernel()", "DirectSum(Learned(1024))", "LookupTable(16)", "Grid2D(4, 4)",
        "ProductKernel(kernel=RBF(2.0)*Exponential())", "RelativeSinusoid()", "ALiBi()",
    ),
    "filter": (
        "Causal()", "Window(128, 0) & Causal()", "Strided(4) | Fixed(4, 2)", "Memory(16)",
        "(Causal() | Window(0, 3)) & Strided(stride=2)",
    ),
}  # fmt: skip
READ = {"kernel": parse.kernel, "position": parse.position, "filter": parse.filter}
VALUES = (
    "0", "-1", "1e400", "nan", "9" * 400, "1_000", "0x10", "True", "None", "''", "[]", "[1, [2]]",
    "{}", "x", "__import__('os')", "lambda: 0", "-" * 3000, "(" * 300, "\x00", "\u202e", "🦀",
    "1+" * 500 + "1", "a=b=c", " ", "\n",
)  # fmt: skip
OPTIONS = (
    "--steps", "--batch", "--length", "--lr", "--warmup", "--seed", "--dtype", "--device", "--data",
    "--tokenizer", "--time", "--preset", "--system", "--value", "--clip", "--accumulate",
    "--kernel", "--position", "--filter", "--evaluate-by",
)  # fmt: skip
FIELDS = (
    "d_model", "num_heads", "num_layers", "dropout", "vocab_size", "initializer_range", "cutoffs",
    "torch_dtype", "kernel", "memory", "num_layer", "pad_token_id",
)  # fmt: skip
# The exit codes that docs/training.md names, but for those of a training that has begun.
CODES = {0, 2}


def attack(seed: int, device: str = "cpu") -> str:
    """Some texts, and a command; AssertionError names the one that was not refused in order."""
    choose = random.Random(seed)
    refused = sum(read(choose) for _ in range(50))
    return f"{refused} of 50 texts refused; {command(choose)}"


def read(choose: random.Random) -> bool:
    """Whether a mutated formula is refused."""
    what = choose.choice(list(SEEDS))
    text = mutated(choose.choice(SEEDS[what]), choose)
    try:
        READ[what](text)
    except ValueError:
        return True
    except Exception as error:
        raise AssertionError(f"{what} {text!r}: {type(error).__name__}: {error}") from error
    return False


def mutated(text: str, choose: random.Random) -> str:
    """A text with up to four changes."""
    for _ in range(choose.randint(0, 4)):
        at = choose.randint(0, len(text))
        piece = choose.choice(
            (*VALUES, "()", ",", "*", "+", "&", "|", ".", "=", '"', "heads=", text)
        )
        match choose.randrange(3):
            case 0:
                text = text[:at] + piece + text[at:]
            case 1:
                text = text[:at] + text[at + choose.randint(1, 3) :]
            case 2:
                text = text[:at] + piece + text[at + len(piece) :]
    return text


def command(choose: random.Random) -> str:
    """A dry run, or an explanation, with hostile options."""
    from mercer.cli.commands import app

    if choose.random() < 0.3:
        given = ["explain", choose.choice(("dai2019", "RBF", mutated("tsai2019", choose)))]
        given += ["--shape", mutated("1,2,16,8", choose)]
    else:
        given = ["train", choose.choice(("lm", "translation", "vision")), "--dry-run"]
        for _ in range(choose.randint(1, 3)):
            if choose.random() < 0.5:
                value = choose.choice((*VALUES, mutated("RBF(2.0)", choose)))
                given += [choose.choice(OPTIONS), value]
            else:
                name = choose.choice((*FIELDS, mutated("num_heads", choose)))
                kind = choose.choice(("--set", "--option", "--data-option"))
                given += [kind, f"{name}={choose.choice(VALUES)}"]
    result = CliRunner().invoke(app, given)
    said = f"mercer {given!r}"
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        error = result.exception
        raise AssertionError(f"{said}: {type(error).__name__}: {str(error)[:300]}") from error
    assert result.exit_code in CODES, f"{said} ended with {result.exit_code}"
    assert "Traceback" not in result.output, f"{said} printed a traceback"
    return f"exit code {result.exit_code}"
