"""A kernel or filter is declared once, and everything that lists them follows from that."""

import re
from pathlib import Path

import pytest
from catalogue import DIM, HEADS

import mercer as mc
from mercer.filters import FILTERS
from mercer.kernels import KERNELS

PAGE = (Path(__file__).parent.parent / "docs" / "kernels.md").read_text()
ANSWERS = {"yes": True, "no": False}


def table(head):
    """The rows of a table of docs/kernels.md, by the name in their first cell."""
    body = PAGE[PAGE.index(f"| {head} |") :].split("\n\n")[0]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in body.splitlines()[2:]]
    cells = [[cell.strip() for cell in row] for row in rows]
    return {re.match(r"`(\w+)\(", row[0])[1]: row for row in cells if "(" in row[0]}


@pytest.mark.parametrize(("head", "declared"), [("kernel", KERNELS), ("filter", FILTERS)])
def test_the_docs_list_what_is_declared(head, declared):
    names = [cls.__name__ for cls in declared]
    assert sorted(table(head)) == sorted(names)
    assert all(getattr(mc, cls.__name__) is cls for cls in declared)


@pytest.mark.parametrize("cls", KERNELS, ids=lambda cls: cls.__name__)
def test_the_docs_say_what_a_kernel_promises(cls):
    _, _, symmetric, valid, _ = table("kernel")[cls.__name__]
    for build in cls.entry.examples.values():
        kernel = build(HEADS, DIM)
        assert type(kernel) is cls
        assert kernel.symmetric == ANSWERS.get(symmetric, kernel.symmetric)
        assert kernel.valid == ANSWERS.get(valid, kernel.valid)


@pytest.mark.parametrize("cls", FILTERS, ids=lambda cls: cls.__name__)
def test_an_example_is_of_its_filter(cls):
    assert all(type(build()) is cls for build in cls.entry.examples.values())
