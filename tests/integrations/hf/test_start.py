"""From softmax to RBF: the model as it came at c = 1, RBF at c = 0, and a path between them."""

import hf_models
import pytest
import torch

import mercer as mc
from mercer.integrations import hf

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def bridged(family="llama", kernel="RBF(heads=4)", **options):
    return hf.patch(hf_models.make(family), kernel, start="as-softmax", **options)


def logits(model, family="llama"):
    return hf_models.logits(model, **hf_models.inputs(family))


def kernels(model):
    return [m for m in model.modules() if isinstance(m, mc.Bridge | mc.RBF)]


@pytest.mark.parametrize("family", hf_models.MAKE)
def test_it_starts_as_the_model_as_it_came(family):
    came = logits(hf_models.make(family), family)
    assert torch.allclose(logits(bridged(family), family), came, atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "whisper"])
def test_it_ends_as_rbf(family):
    model = bridged(family)
    logits(model, family)
    hf.leave_softmax(model, progress=1)
    at_the_end = logits(model, family)
    hf.to_rbf(model)
    assert all(type(kernel) is mc.RBF for kernel in kernels(model))
    assert torch.allclose(logits(model, family), at_the_end, atol=2e-5)
    assert not torch.allclose(at_the_end, logits(hf_models.make(family), family), atol=1e-2)


def test_c_is_learned_below_a_bound_that_falls():
    model = bridged()
    given = hf_models.inputs("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(1, 5):
        model(**given, labels=given["input_ids"]).loss.backward()
        assert all(kernel.c.grad is not None for kernel in kernels(model))
        optimizer.step()
        hf.leave_softmax(model, progress=step / 4)
        assert all(0 <= kernel.c <= 1 - step / 4 for kernel in kernels(model))
    hf.leave_softmax(model, progress=1.5)
    assert all(kernel.c == 0 for kernel in kernels(model))


def test_it_is_saved_on_its_way(tmp_path):
    model = bridged(layers=[0, 2])
    hf.leave_softmax(model, progress=0.3)
    hf.save(model, tmp_path)
    loaded = hf.from_pretrained(tmp_path)
    assert loaded.config.mercer["kernels"] == {"0": "Bridge(heads=4)", "2": "Bridge(heads=4)"}
    assert [float(kernel.c.detach()) for kernel in kernels(loaded)] == pytest.approx([0.7, 0.7])
    assert torch.equal(logits(loaded), logits(model))


def test_a_checkpoint_is_loaded_to_start_as_softmax(tmp_path):
    model = hf_models.make("llama")
    model.save_pretrained(tmp_path)
    loaded = hf.from_pretrained(tmp_path, kernel="RBF(heads=4)", start="as-softmax")
    assert torch.allclose(logits(loaded), logits(model), atol=2e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kernel": "Laplace()"}, "leads from softmax to RBF, but the kernel is"),
        ({"kernel": "RBF(2.0)"}, "takes the bandwidths from the scale of the model"),
        ({"kernel": "RBF()", "start": "softmax"}, 'start must be "as-softmax" or None'),
        ({"kernel": None, "start": "as-softmax"}, "needs kernel="),
    ],
)
def test_what_cannot_start_as_softmax(options, said):
    with pytest.raises(ValueError, match=said):
        hf.patch(hf_models.make("llama"), **{"start": "as-softmax"} | options)


def test_what_cannot_leave_softmax():
    model = hf_models.make("llama")
    with pytest.raises(ValueError, match="no layer of the model leads from softmax to RBF"):
        hf.leave_softmax(model, 0.5)
    model = bridged()
    for wrong in (-1, "half"):
        with pytest.raises(
            ValueError, match=f"progress must be a number from 0 to 1, got .?{wrong}"
        ):
            hf.leave_softmax(model, wrong)
    with pytest.raises(ValueError, match="c of layer 0 is 1"):
        hf.to_rbf(model)
    hf.leave_softmax(model, 1)
    with pytest.raises(ValueError, match="call the model once"):
        hf.to_rbf(model)
