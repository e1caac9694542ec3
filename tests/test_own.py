"""Kernels of one's own in formulas: what is imported and when, and kernels as text."""

import copy
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import mercer as mc
from mercer import own, parse

SOURCE = '''
from dataclasses import dataclass

import torch

import mercer as mc
from helper_of_{stem} import START

with open("{log}", "a") as file:
    file.write("imported ")


class ARD(mc.Kernel):
    """exp(-sum_d (q_d - k_d)^2 / 2 s_d^2)."""

    def __init__(self, dim, start=START, names=("a",), on="content"):
        super().__init__()
        self.on = on
        self.log_s = torch.nn.Parameter(torch.full((dim,), float(start)).log())

    def log_weight(self, q, k):
        q, k = (x / self.log_s.exp() for x in self.select(q, k))
        return -0.5 * (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)


@dataclass(frozen=True)
class Every(mc.Filter):
    step: int

    def sees(self, b, i, j, start):
        return j % self.step == 0


def build():
    raise AssertionError("only classes are built")
'''


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a file of kernels, with a module beside it, and a log of its imports."""
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "log"
    log.touch()

    def make(name, more=""):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SOURCE.format(log=log.as_posix(), stem=path.stem) + more)
        (path.parent / f"helper_of_{path.stem}.py").write_text("START = 2.0")
        return path

    make.log = log
    return make


def test_a_file_is_imported_only_if_it_is_trusted(write):
    write("alone.py")
    before = list(sys.path)
    with pytest.raises(ValueError, match=r"imports nothing.*pass trust_kernels='alone\.py'"):
        parse.kernel("alone.py:ARD(4)")
    with pytest.raises(ValueError, match=r"pass trust_kernels='alone\.py'"):
        parse.kernel("alone.py:ARD(4)", "mercer.parse")
    assert write.log.read_text() == ""
    kernel = parse.kernel("alone.py:ARD(4)", "alone.py")
    assert kernel.log_s.shape == (4,)
    parse.kernel("alone.py:ARD(4)", ("alone.py",))
    assert write.log.read_text() == "imported "
    assert sys.path == before


def test_a_formula_may_have_both(write):
    write("both.py")
    text = 'both.py:ARD(4, start=1.0) * RBF(2.0) + Exponential(on="both.py:ARD(1)")'
    kernel = parse.kernel(text, "both.py")
    assert [type(k).__name__ for k in kernel] == ["Product", "Exponential"]
    assert own.sources(text, {"x": [text]}) == ("both.py",)
    inside = parse.position("ProductKernel(kernel=both.py:ARD(4, on='position'))", "both.py")
    assert type(inside.kernel).__name__ == "ARD"
    assert parse.filter("Causal() & both.py:Every(3)", "both.py").mask(4, 4)[0, 0, 3].tolist() == [
        True, False, False, True,
    ]  # fmt: skip


def test_a_module_is_found_beside_the_current_folder(write):
    write("packed_kernels/inner.py")
    Path("packed_kernels/helper_of_inner.py").rename("helper_of_inner.py")
    Path("packed_kernels/__init__.py").touch()
    before = list(sys.path)
    kernel = parse.kernel("packed_kernels.inner:ARD(3)", "packed_kernels.inner")
    assert kernel.log_s.shape == (3,)
    assert parse.write(kernel) == ("packed_kernels.inner:ARD(3)", ("packed_kernels.inner",))
    assert sys.path == before


def test_a_name_is_matched_from_its_end(write):
    a, b = write("one/same.py"), write("two/same.py")
    for trust in (str(a), ["one/same.py"], [str(a), str(b)]):
        kernel = parse.kernel("one/same.py:ARD(2)", trust)
        assert Path(sys.modules[type(kernel).__module__].__file__) == a
    assert parse.kernel("elsewhere/same.py:ARD(2)", str(b)).log_s.shape == (2,)
    assert parse.kernel("same:ARD(2)", str(b)).log_s.shape == (2,)
    with pytest.raises(ValueError, match="trust one of them"):
        parse.kernel("same.py:ARD(2)", [str(a), str(b)])


def test_a_changed_file_is_read_again(write):
    write("edited.py")
    old = parse.kernel("edited.py:ARD(2)", "edited.py")
    digest = own.digests(["edited.py"], "edited.py")
    write("edited.py", "\n\nclass New(ARD):\n    pass\n")
    assert parse.kernel("edited.py:New(2)", "edited.py").symmetric
    assert own.digests(["edited.py"], "edited.py") != digest
    assert parse.write(old)[0] == "edited.py:ARD(2)"


ERRORS = {
    "wrong.py:ADR(2)": r"wrong\.py has no kernel 'ADR'; did you mean 'ARD'\?",
    "wrong.py:build()": r"build in wrong\.py must be a subclass of mercer's Kernel",
    "wrong.py:open('x')": "has no kernel 'open'",
    "wrong.py:Every(2)": "must be a subclass",
    "wrong.py:ARD()": r"'wrong\.py:ARD\(\)' cannot be built: TypeError: .*'dim'",
    "wrong.py:ARD(2) - RBF()": r"'wrong\.py:ARD\(2\) - RBF\(\)' has an operator",
    "wrong.py:ARD(open('x'))": "is not a number, a string",
    "wrong/x:ARD(2)": r"my_kernels\.py or a module package\.module, got 'wrong/x'",
}


@pytest.mark.parametrize("text", ERRORS)
def test_errors_name_what_is_wrong(write, text):
    write("wrong.py")
    with pytest.raises(ValueError, match=ERRORS[text]):
        parse.kernel(text, "wrong.py")


def test_a_file_that_fails_says_where(write):
    Path("broken.py").write_text("x = 1\n1 / 0\n")
    with pytest.raises(ValueError, match=r"broken\.py:2: ZeroDivisionError: division by zero"):
        parse.kernel("broken.py:ARD()", "broken.py")
    Path("broken.py").write_text("x = 1\n\nclass (\n")
    with pytest.raises(ValueError, match=r"broken\.py:3: SyntaxError"):
        parse.kernel("broken.py:ARD()", "broken.py")
    for trust in ("nowhere.py", "no_such_module.kernels"):
        with pytest.raises(ValueError, match=r"there is no file nowhere\.py|No module named"):
            parse.kernel(f"{trust}:ARD()", trust)
    with pytest.raises(ValueError, match="must be files or modules as text, got 3"):
        parse.kernel("broken.py:ARD()", [3])


TEXTS = [
    "RBF(2.0)",
    "RBF([1.0, 2.0], trainable=False)",
    'Exponential() * Exponential(on="position") + Polynomial(4)',
    "(RBF() + Matern(2.5, heads=2)) * Cosine(3.0)",
    "ALiBi([0.5, 0.25])",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_kernel_is_written_as_it_was_made(text):
    for kernel in (parse.kernel(text), copy.deepcopy(parse.kernel(text))):
        written, trust = parse.write(kernel)
        assert written.replace("'", '"') == text
        assert trust == ()


def test_an_object_of_a_class_of_ones_own_has_a_text(write, monkeypatch):
    path = write("objects.py")
    monkeypatch.syspath_prepend(path.parent)
    from objects import ARD

    text, trust = parse.write(ARD(4, start=1.5, names=["b", "c"]) * mc.RBF(heads=2))
    assert text == "objects.py:ARD(4, start=1.5, names=['b', 'c']) * RBF(heads=2)"
    assert trust == (str(path),)
    # The class that the person has imported, not a second one.
    assert type(parse.kernel(text, trust).kernels[0]) is ARD
    assert parse.spell({"kernel": ARD(2), "x": [1, mc.RBF()]}) == (
        {"kernel": "objects.py:ARD(2)", "x": [1, "RBF()"]},
        trust,
    )


def test_a_kernel_without_a_text_says_what_to_do():
    @dataclass(eq=False)
    class Local(mc.RBF):
        def __init__(self):
            super().__init__()

    for kernel, why in (
        (Local(), "not at the top level"),
        (mc.Lookup(torch.zeros(3, 4)), "not all numbers"),
        (mc.RBF(torch.ones(2)), "not all numbers"),
        (mc.RBF(2.0) + Local(), "not at the top level"),
    ):
        with pytest.raises(ValueError, match=rf"{why}.*my_kernels\.py:Name\(2\.0\)"):
            parse.write(kernel)
