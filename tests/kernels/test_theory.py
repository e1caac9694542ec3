"""The propositions of Transformer Dissection, Section 3.3, and what makes a kernel a smoother."""

import pytest
import torch
from catalogue import FILTERS, HEADS, KERNELS

import mercer as mc
from mercer.testing import Shape, inputs

# Kernels of the features alone: those of i - j know the order by themselves.
ORDERLESS = sorted(
    set(KERNELS)
    - {"lookup", "lookup-per-head", "lookup-causal"}
    - {"relative-sinusoid", "relative-sinusoid-clipped", "alibi", "buckets", "buckets-one-way"}
)
BACKENDS = ("reference", "chunked", "sdpa")


def permuted(x, order):
    return mc.Features(**{n: part[:, :, order] for n, part in x.items()})


@pytest.mark.parametrize("name", ORDERLESS)
def test_proposition_2_a_filter_that_hides_nothing_is_permutation_equivariant(name):
    """Attention(x_q; pi S_k) = Attention(x_q; S_k) for every order of the keys."""
    kernel = KERNELS[name]().double()
    q, k, v = inputs(kernel, Shape(queries=9, keys=9))
    order = torch.randperm(9)
    plain = mc.smooth(kernel, q, k, v)
    shuffled = mc.smooth(kernel, q, permuted(k, order), v[:, :, order])
    assert (plain - shuffled).abs().max() < 1e-9 * (1 + plain.abs().max())


@pytest.mark.parametrize("filter", sorted(set(FILTERS) - {"full"}))
def test_proposition_3_a_filter_that_hides_something_is_not(filter):
    filter = FILTERS[filter]()
    kernel = mc.RBF().double()
    q, k, v = inputs(kernel, Shape(queries=11, keys=11))
    mask = filter.mask(11, 11)
    mask = mask.expand(2, -1, 11, 11)
    assert not mask.all()
    plain = mc.smooth(kernel, q, k, v, filter=filter)
    # The permutation of the proof: a hidden key changes places with a visible one.
    b, h, i, hidden = (~mask & mask.any(-1, keepdim=True)).nonzero()[0].tolist()
    seen = int(mask[b, h, i].nonzero()[0])
    order = torch.arange(11)
    order[[hidden, seen]] = order[[seen, hidden]]
    shuffled = mc.smooth(kernel, q, permuted(k, order), v[:, :, order], filter=filter)
    assert (plain - shuffled)[b, h, i].abs().max() > 1e-3


def test_proposition_1_decoder_self_attention_is_not_permutation_equivariant():
    """func(pi x) = pi func(x) for the encoder, not for the decoder, without positions."""
    attention = mc.nn.KernelAttention(16, HEADS, position="none").double()
    x = torch.randn(1, 7, 16, dtype=torch.float64)
    order = torch.randperm(7)
    encoder = attention(x[:, order]) - attention(x)[:, order]
    assert encoder.abs().max() < 1e-12
    causal = mc.Causal()
    decoder = attention(x[:, order], filter=causal) - attention(x, filter=causal)[:, order]
    assert decoder.abs().max() > 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_sum_to_one(backend):
    q, k = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    out = mc.smooth(mc.RBF(), q, k, torch.ones(1, 2, 9, 8), filter=mc.Causal(), backend=backend)
    assert (out - 1).abs().max() < 1e-5


def test_log_mass_merges_splits_of_the_keys():
    """The pair (out, log_mass) is all that a cache, a split or a sum needs."""
    from mercer.term.mix import Smoothed, mix

    kernel = mc.RBF().double()
    q, k, v = inputs(kernel, Shape(queries=5, keys=9))
    whole = mc.smooth(kernel, q, k, v, return_log_mass=True)
    halves = [
        Smoothed(
            *mc.smooth(
                kernel,
                q,
                permuted(k, slice(*part)),
                v[:, :, slice(*part)],
                return_log_mass=True,
            )
        )
        for part in ((0, 4), (4, 9))
    ]
    merged = mix(halves)
    assert (merged.out - whole[0]).abs().max() < 1e-12
    assert (merged.log_mass - whole[1]).abs().max() < 1e-12


def test_a_product_with_an_asymmetric_projection_is_not_valid():
    tied = mc.nn.KernelAttention(16, 2, position="product", symmetric=True)
    loose = mc.nn.KernelAttention(16, 2, position="product")
    assert tied.valid
    assert not loose.valid
    assert not loose.symmetric


def test_a_valid_attention_has_a_positive_semi_definite_gram_matrix_of_its_inputs():
    attention = mc.nn.KernelAttention(16, 2, position="product", symmetric=True).double()
    q, k, _, _ = attention.parts(torch.randn(1, 12, 16, dtype=torch.float64))
    gram = attention.joined_kernel(q, k)
    assert (gram - gram.mT).abs().max() < 1e-9 * gram.abs().max()
    assert torch.linalg.eigvalsh(gram).min() > -1e-9 * gram.abs().max()
