"""A few attacks of each kind from fixed seeds, and the score of a soak.

`make soak` draws new seeds for as long as one says.
"""

import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

from faults import compositions, flips, soak, texts


@pytest.mark.parametrize("seed", range(12))
def test_a_composition_agrees_with_the_reference(seed):
    compositions.attack(seed)


@pytest.mark.parametrize("seed", range(6))
def test_hostile_texts_are_read_or_refused(seed):
    texts.attack(seed)


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_run_goes_on_or_says_why(seed):
    flips.attack(seed)


def fails(seed, device):
    """An attack that finds something at odd seeds."""
    assert seed % 2 == 0, f"seed {seed} is odd"
    return "even"


def test_a_soak_counts_and_says_how_to_repeat(monkeypatch, capsys):
    monkeypatch.setitem(soak.ATTACKS, "test_soak", 60)
    given = ["soak", "--only", "test_soak", "--seed", "6", "--count", "4", "--jobs", "1"]
    monkeypatch.setattr(sys, "argv", given)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setattr(soak, "TARGET", "faults.{}:fails")
    assert soak.main() == 1
    said = capsys.readouterr().out
    assert "test_soak failed: seed 7 is odd" in said
    assert "again: python tests/faults/soak.py --only test_soak --seed 9 --count 1" in said
    assert said.splitlines()[-2].split() == ["test_soak", "4", "2", "2"]
