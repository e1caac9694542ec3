"""How the keys of few queries are cut into parts: what of test_triton.py needs no GPU."""

from types import SimpleNamespace

import pytest
import torch

from mercer.backends.triton import block_sizes, codes, run
from mercer.backends.triton.filters import Clause

PLAIN = {"FORM": codes.PLAIN, "CLIP": -1, "HAS_COL0": False}


def plan(width, dtype=torch.bfloat16, shape=(8, 8, 4), places=None, **constants):
    static = SimpleNamespace(shape=shape, trains=False, filter=(Clause(causal=True),))
    widths = {
        "E0": width,
        "E1": width if places is None else places,
        "V": width,
        "LINK0": 0,
        "LINK1": 0,
    }
    return SimpleNamespace(
        constants=PLAIN | widths | constants, static=static, dtype=dtype, num_keys=32768,
        device=torch.device("cpu"),
    )  # fmt: skip


@pytest.mark.parametrize("heads", [1, 9, 12, 40, 64, 96, 130, 200, 500, 3000])
def test_programs_fill_the_device(heads, monkeypatch):
    monkeypatch.setattr(run, "processors", lambda device: 132)
    p = plan(128, shape=(1, heads, 1))
    parts = run._parts(p)
    room = 4 * 132
    assert parts == 1 or heads * parts <= room
    assert parts == 64 or heads * (parts + 1) > room
    # None of them is too short to be worth a program.
    p.num_keys = 2100
    assert run._parts(p) == min(parts, 4)


@pytest.mark.parametrize(
    ("width", "places", "clip", "found"),
    [
        (128, 0, -1, (128, 8, 2)),
        (64, 64, -1, (128, 8, 3)),
        (128, 0, 64, (64, 4, 2)),
        (64, 0, 64, (64, 4, 3)),
    ],
    ids=["one-factor", "two-factors", "table", "narrow-table"],
)
def test_blocks_are_those_that_were_measured(width, places, clip, found):
    p = plan(width, places=places, CLIP=clip, MODE0=0)
    sizes = block_sizes.sizes_of("split", p)
    assert (sizes.keys, sizes.warps, sizes.stages) == found
    assert block_sizes.fitted("forward", sizes, p, 232448) == sizes
