"""A tensor that grows at its end: the same as a concatenation, without its copies."""

import copy

import pytest
import torch

from mercer.memory.growing import LEAST, Growing


def pieces(*lengths, batch=2):
    return [torch.randn(batch, 3, n, 4) for n in lengths]


@torch.no_grad()
def test_it_equals_a_concatenation():
    parts = pieces(5, 1, 1, 100, 1)
    x = Growing(parts[0], 2)
    for n, part in enumerate(parts[1:], 2):
        x.append(part)
        assert torch.equal(x.tensor, torch.cat(parts[:n], 2))
    assert x.length == 108


@torch.no_grad()
def test_steps_are_written_in_place():
    first, *steps = pieces(8, *[1] * (LEAST - 1))
    x = Growing(first, 2)
    x.append(torch.randn(2, 3, 1, 4))
    assert x.tensor.data_ptr() != first.data_ptr()
    places = set()
    for step in steps:
        x.append(step)
        places.add(x.tensor.data_ptr())
    assert len(places) == 1


@torch.no_grad()
def test_earlier_results_do_not_change():
    first, *steps = pieces(3, 1, 1)
    x, kept = Growing(first, 2), first.clone()
    for step in steps:
        seen = x.tensor
        before = seen.clone()
        x.append(step)
        assert torch.equal(seen, before)
    assert torch.equal(first, kept)


@pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
@torch.no_grad()
def test_copies_grow_independently(twin):
    first, step, one, other = pieces(3, 1, 1, 1)
    x = Growing(first, 2)
    x.append(step)
    y = twin(x)
    x.append(one)
    y.append(other)
    assert torch.equal(x.tensor, torch.cat([first, step, one], 2))
    assert torch.equal(y.tensor, torch.cat([first, step, other], 2))


@torch.no_grad()
def test_a_cropped_tensor_can_grow_differently():
    first, guess, better = pieces(4, 3, 2)
    x = Growing(first, 2)
    x.append(guess)
    guessed = x.tensor
    before = guessed.clone()
    x.crop(4)
    x.append(better)
    assert torch.equal(x.tensor, torch.cat([first, better], 2))
    assert torch.equal(guessed, before)


@torch.no_grad()
def test_sequences_in_another_order():
    first, step = pieces(3, 1)
    x = Growing(first, 2)
    x.reorder(torch.tensor([1, 1, 0]))
    x.append(step[[1, 1, 0]])
    assert torch.equal(x.tensor, torch.cat([first, step], 2)[[1, 1, 0]])


def test_gradients_pass_and_are_not_disturbed():
    parts = [x.requires_grad_() for x in pieces(3, 1, 1)]
    x = Growing(parts[0], 2)
    total = torch.zeros(())
    for part in parts[1:]:
        x.append(part)
        total = total + x.tensor.square().sum()
    found = torch.autograd.grad(total, parts)
    for times, part, grad in zip((2, 2, 1), parts, found, strict=True):
        torch.testing.assert_close(grad, times * 2 * part)
    with torch.no_grad():
        x.append(torch.ones(2, 3, 1, 4))
    assert not x.tensor.requires_grad


def test_inference_tensors_can_grow_outside_inference():
    with torch.inference_mode():
        first, step = pieces(3, 1)
        x = Growing(first, 2)
        x.append(step)
    with torch.no_grad():
        x.append(torch.ones(2, 3, 1, 4))
    assert x.length == 5
    assert torch.equal(x.tensor[:, :, 4:], torch.ones(2, 3, 1, 4))


@torch.no_grad()
def test_one_sequence_for_all_joins_several():
    (one,), (several,) = pieces(3, batch=1), pieces(1)
    x = Growing(one, 2)
    x.append(several)
    assert torch.equal(x.tensor, torch.cat([one.expand(2, -1, -1, -1), several], 2))
