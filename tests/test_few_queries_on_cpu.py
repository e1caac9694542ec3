"""How few queries are cut into programs: what needs no GPU of tests/test_triton.py."""

from types import SimpleNamespace

import pytest
import torch

from mercer.backends.triton import (
    block_sizes as triton_sizes,
)
from mercer.backends.triton import (
    decode_shared as sharing,
)
from mercer.backends.triton import (
    run as triton_launch,
)

PLAIN = {"FORM": triton_sizes.PLAIN, "SAME": True, "CLIP": -1, "DROPOUT": False, "HAS_COL0": False}


def plan(width, dtype=torch.bfloat16, shape=(8, 8, 4), places=None, **constants):
    static = SimpleNamespace(shape=shape, trains=False)
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


def inputs(queries=1, keys=1):
    """Content of a batch, and places of as many sequences."""
    q, k = (torch.empty(n, 1, 1, 1) for n in (queries, keys))
    return SimpleNamespace(q=[torch.empty(8, 1, 1, 1), q], k=[torch.empty(8, 1, 1, 1), k])


@pytest.mark.parametrize("width", [16, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_two_programs_of_two_sequences_share_a_processor(width, dtype):
    p = plan(width, dtype)
    keys = sharing._keys(p)
    # Two blocks of keys and values, one of places, and their queries.
    row, queries = dtype.itemsize * width * 5, dtype.itemsize * width * 3 * 16
    more = 0 if dtype == torch.bfloat16 else 16384
    assert 2 * (keys * row + queries + more) <= triton_sizes.HOPPER or not keys
    # And there is no room for blocks of twice the keys, or no need.
    twice = max(16, 2 * keys)
    assert keys == 128 or 2 * (twice * (row + 64) + queries + more) > triton_sizes.HOPPER - 2048
    assert sharing.takes(p, inputs()) == (keys > 0)


def test_what_is_too_wide_for_that_has_programs_of_one_sequence(monkeypatch):
    assert sharing._keys(plan(128)) == 64
    # As most GPUs have it.
    monkeypatch.setattr(sharing, "shared_memory", lambda device: 101376)
    assert sharing._keys(plan(128)) == 16
    assert sharing.takes(plan(128), inputs())
    assert not sharing.takes(plan(256), inputs())


@pytest.mark.parametrize(
    ("shape", "parts"), [((8, 8, 4), 8), ((7, 8, 4), 8), ((32, 16, 1), 1), ((2, 4, 1), 64)]
)
def test_programs_of_two_sequences_all_run_at_once(shape, parts, monkeypatch):
    monkeypatch.setattr(triton_launch, "processors", lambda device: 132)
    p = plan(128, shape=shape)
    assert triton_launch._parts(p, sharing.takes(p, inputs())) == parts
    assert sharing.programs(p) * parts <= 2 * 132


@pytest.mark.parametrize("heads", [1, 9, 12, 40, 64, 96, 130, 200, 500, 3000])
def test_programs_fill_the_device(heads, monkeypatch):
    monkeypatch.setattr(triton_launch, "processors", lambda device: 132)
    p = plan(128, shape=(1, heads, 1))
    parts = triton_launch._parts(p, shared=False)
    room = 4 * 132
    assert parts == 1 or heads * parts <= room
    assert parts == 64 or heads * (parts + 1) > room
    # None of them is too short to be worth a program.
    p.num_keys = 2100
    assert triton_launch._parts(p, shared=False) == min(parts, 4)


@pytest.mark.parametrize(
    ("changes", "given"),
    [
        ({}, inputs(queries=8)),
        ({}, inputs(keys=8)),
        ({"shape": (1, 8, 4)}, inputs()),
        ({"SAME": False}, inputs()),
        ({"FORM": 0}, inputs()),
        ({"CLIP": 4}, inputs()),
        ({"DROPOUT": True}, inputs()),
    ],
    ids=lambda x: "-".join(x) or "own" if isinstance(x, dict) else "",
)
def test_whatever_else_there_is_has_programs_of_one_sequence(changes, given):
    assert sharing.takes(plan(128), inputs())
    assert sharing.takes(plan(128, HAS_COL0=True), inputs())
    assert not sharing.takes(plan(128, **changes), given)


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
    p = plan(width, places=places, CLIP=clip, FILTER=((1, -1),), MODE0=0)
    sizes = triton_sizes.sizes_of("split", p)
    assert (sizes.keys, sizes.warps, sizes.stages) == found
    assert (
        triton_sizes.fitted("forward", sizes, SimpleNamespace(**vars(p), spread=False), 232448)
        == sizes
    )
