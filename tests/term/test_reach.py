"""How far tables reach that are formed for a number of keys."""

import torch

from mercer import Exponential
from mercer.kernels import ALiBi
from mercer.term.biases import reach
from mercer.term.sinusoids import SinusoidFactor


def test_a_reach_covers_the_distance_and_is_one_of_few():
    found = [reach(distance) for distance in range(8192)]
    assert all(distance <= far for distance, far in enumerate(found))
    assert sorted(set(found)) == [128, 256, 512, *range(1024, 8193, 1024)]


def sinusoids(length):
    q = torch.randn(1, 2, length, 8)
    weight = torch.randn(2, 8, 512)
    return SinusoidFactor(asking=q, weight=weight, base=10_000.0, num_keys=length)


def test_sentences_of_all_lengths_have_tables_of_one_size():
    """A kernel is compiled for the size of its table, and `generate` adds a key with each token."""
    assert {sinusoids(length).as_table().clip for length in (1, 7, 40, 100, 127, 128)} == {128}


def test_a_table_that_reaches_further_changes_nothing():
    factor = sinusoids(5)
    table = factor.as_table()
    i, j = torch.arange(5)[:, None], torch.arange(5)
    picked = table.table.gather(-1, (i - j + table.clip).expand(1, 2, 5, 5))
    torch.testing.assert_close(picked, factor.q @ factor.k.mT, atol=1e-3, rtol=1e-3)
    kernel = Exponential() * ALiBi([0.5, 0.25])
    q = torch.randn(1, 2, 5, 8)
    (term,) = (t.resolve(5, 5, causal=False) for t in kernel.terms(q, q))
    assert term.table.shape[-1] == 2 * 128 + 1
    slopes = torch.tensor([0.5, 0.25])[:, None, None]
    bias = term.table.expand(1, 2, 5, -1).gather(-1, (i - j + 128).expand(1, 2, 5, 5))
    torch.testing.assert_close(bias[0], -slopes * (i - j).abs())
