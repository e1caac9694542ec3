"""The vision transformer with every system, on grids, with a class token and without."""

import hf_models
import pytest
import torch
from transformers import AutoModelForImageClassification

import mercer as mc
from mercer import nn as mn
from mercer import systems
from mercer.models import KernelViT, KernelViTConfig, presets

SIZES = {
    "image_size": 8, "patch_size": 2, "num_channels": 1, "d_model": 16, "num_heads": 2, "d_ff": 24,
    "num_layers": 2, "num_labels": 5,
}  # fmt: skip
COMPOSED = {
    "grid": {"kernel": "RBF(2.0)", "position": "grid"},
    "grid-sum": {"position": "grid-sum", "value": "content+position"},
    "own axes": {"kernel": "RBF() * Exponential(on='height') * Laplace(on='width')"},
    "learned": {"system": "kundu2026", "input_position": "learned"},
    "mixed layers": {"position": ["grid", None], "system": [None, "shaw2018"]},
}
CASES = {name: {"system": name} for name in systems.SYSTEMS if name != "leng2026"} | COMPOSED


def make(case="grid", **more):
    return KernelViT(KernelViTConfig(**(SIZES | CASES[case] | more)))


def draw(batch=2):
    return torch.randn(batch, 1, 8, 8)


@pytest.mark.parametrize("pooling", ["class", "mean"])
@pytest.mark.parametrize("case", CASES)
def test_a_step_of_training_reaches_every_parameter(case, pooling, tmp_path):
    model, images, labels = make(case, pooling=pooling), draw(), torch.tensor([1, 4])
    loss = model(images, labels=labels).loss
    assert loss.isfinite()
    loss.backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None]
    torch.optim.SGD(model.parameters(), lr=0.02).step()
    assert model(images, labels=labels).loss < loss
    model.eval().save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert torch.equal(loaded(images).logits, model(images).logits)


@pytest.mark.parametrize("case", CASES)
def test_every_patch_is_seen(case):
    """Filters of decoders are not those of an image: the last patch reaches the class token."""
    model, image = make(case).eval(), draw(1)
    changed = image.clone()
    changed[..., -2:, -2:] += 1.0
    assert not torch.equal(model(image).logits, model(changed).logits)
    assert all(block.attention.filter == mc.Full() for block in model.blocks)


def test_a_given_filter_is_kept():
    model = make("grid", filter="Window(3, 3)")
    assert model.blocks[0].attention.filter == mc.Window(3, 3)


def test_the_grid_is_a_product_of_height_and_width():
    for pooling, prefix in (("class", 1), ("mean", 0)):
        position = make(pooling=pooling).blocks[0].attention.position
        assert isinstance(position, mn.Grid2D)
        assert (position.height, position.width, position.prefix) == (4, 4, prefix)
        rows, columns = position.axes(torch.arange(prefix + 16))
        assert torch.equal(rows[prefix], rows[prefix + 3])
        assert torch.equal(columns[prefix], columns[prefix + 4])
        assert not rows[:prefix].any()
        assert not columns[:prefix].any()
    own = make("own axes").blocks[0].attention
    assert {"height", "width"} <= own.joined_kernel.query_parts
    # The kernel's own factors, and none besides.
    assert len(list(own.joined_kernel)) == 3


def test_without_positions_an_image_is_a_set_of_patches():
    model, image = make("lee2018", pooling="mean").eval(), draw(1)
    patches = image.unfold(2, 2, 2).unfold(3, 2, 2)  # [1, 1, 4, 4, 2, 2]
    swapped = patches.transpose(2, 3).permute(0, 1, 2, 4, 3, 5).reshape(1, 1, 8, 8)
    torch.testing.assert_close(model(image).logits, model(swapped).logits)
    placed = make("grid", pooling="mean").eval()
    assert not torch.allclose(placed(image).logits, placed(swapped).logits, atol=1e-4)


def test_gradient_checkpointing_changes_nothing():
    model, images, labels = make().train(), draw(), torch.tensor([0, 3])
    model(images, labels=labels).loss.backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    hf_models.checkpoint(model)
    model(images, labels=labels).loss.backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(plain, model.parameters(), strict=True))


def test_it_says_what_is_wrong():
    with pytest.raises(ValueError, match=r"pixel_values must be \[B, 1, 8, 8\], got"):
        make()(torch.randn(2, 3, 8, 8))
    with pytest.raises(ValueError, match="patch_size must divide image_size"):
        KernelViTConfig(**(SIZES | {"patch_size": 3}))
    with pytest.raises(ValueError, match="pooling must be 'class' or 'mean'"):
        KernelViTConfig(**(SIZES | {"pooling": "max"}))
    with pytest.raises(ValueError, match="an image has no token ids"):
        KernelViTConfig(**(SIZES | {"system": "leng2026"}))
    with pytest.raises(ValueError, match="no vision preset 'vit-huge'; there are: deit-tiny"):
        presets.vit("vit-huge")


def test_presets():
    tiny, small = presets.vit("deit-tiny"), presets.vit("deit-small")
    assert (tiny.d_model, tiny.num_heads, tiny.num_layers, tiny.side) == (192, 3, 12, 14)
    assert (small.d_model, small.num_heads, small.pooling) == (384, 6, "class")
    cifar = presets.vit("cifar", num_labels=100)
    assert (cifar.image_size, cifar.num_labels, cifar.position) == (32, 100, "grid")
    assert presets.vit("tiny", system="kundu2026").input_position == "learned"
    assert presets.vit("tiny", kernel="RBF(on='height')").position is None
