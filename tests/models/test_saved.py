"""A saved model is whole: it generates, classifies, and says how to load it, with nothing else."""

import json
import os
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    pipeline,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mercer import models
from mercer.models import KernelImageProcessor, KernelLM, KernelTranslator, KernelViT, presets

NAMES = {0: "cat", 1: "dog", 2: "owl"}


@pytest.fixture
def language(tmp_path):
    config = presets.lm("tiny", vocab_size=30, num_layers=1, bos_token_id=1, eos_token_id=1)
    KernelLM(config).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def unknown(monkeypatch, tmp_path):
    """Transformers as it is before `import mercer.models`, and a console without an answer."""
    monkeypatch.delitem(CONFIG_MAPPING._extra_content, "mercer-lm")
    monkeypatch.setattr("builtins.input", _no_console)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))


def _no_console(*_):
    raise EOFError


def test_without_the_import_transformers_names_the_folder_and_its_card_the_import(
    language, unknown
):
    with pytest.raises(ValueError, match="contains custom code") as told:
        AutoModelForCausalLM.from_pretrained(language)
    assert "upgrade" not in str(told.value)
    assert os.path.abspath(language) in str(told.value)
    card = (language / "README.md").read_text()
    assert "import mercer.models\nfrom transformers import AutoModelForCausalLM" in card
    assert "system `vaswani2017`" in card


def test_trust_remote_code_stands_for_the_import(language, unknown):
    loaded = AutoModelForCausalLM.from_pretrained(language, trust_remote_code=True)
    assert type(loaded) is KernelLM
    loaded.save_pretrained(language / "again")
    assert sorted(os.listdir(language / "again")) == [
        "README.md", "config.json", "generation_config.json", "load_mercer.py",
        "model.safetensors",
    ]  # fmt: skip


@pytest.mark.parametrize("trust", [None, True])
def test_with_the_import_nothing_in_the_folder_is_executed(language, trust):
    (language / "load_mercer.py").write_text("raise RuntimeError('executed')")
    loaded = AutoModelForCausalLM.from_pretrained(language, trust_remote_code=trust)
    assert type(loaded) is KernelLM


def test_the_config_alone_names_no_file_that_it_does_not_have(language):
    config = AutoConfig.from_pretrained(language)
    assert "auto_map" in json.loads((language / "config.json").read_text())
    config.save_pretrained(language / "alone")
    assert "auto_map" not in json.loads((language / "alone" / "config.json").read_text())


def test_a_card_of_ones_own_stays(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    KernelLM(presets.lm("tiny", vocab_size=30, num_layers=1)).save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_a_language_model_knows_its_end_and_when_to_stop(language):
    loaded = AutoModelForCausalLM.from_pretrained(language)
    known = loaded.generation_config
    assert (known.bos_token_id, known.eos_token_id, known.pad_token_id) == (1, 1, 1)
    assert known.max_new_tokens == 256
    assert loaded.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=2).shape[1] <= 5


def test_generation_ends_with_the_learned_places():
    fields = {"vocab_size": 30, "num_layers": 1, "input_position": "learned", "context_length": 12}
    model, ids = KernelLM(presets.lm("tiny", **fields)).eval(), torch.arange(9)[None]
    assert model.generate(ids, do_sample=False).shape == (1, 12)
    with pytest.raises(ValueError, match="positions have 12 places"):
        model.generate(ids, max_new_tokens=8)


def test_a_translator_knows_its_start_and_padding(tmp_path):
    model = KernelTranslator(presets.translator("tiny", vocab_size=30, context_length=20))
    model.generation_config.num_beams = 3
    model.save_pretrained(tmp_path)
    known = KernelTranslator.from_pretrained(tmp_path).generation_config
    ids = (known.decoder_start_token_id, known.eos_token_id, known.pad_token_id)
    assert ids == (1, 2, 0)
    assert (known.num_beams, known.max_new_tokens) == (3, 20)


def save_classifier(folder, channels=3):
    labels = {"id2label": NAMES, "label2id": {name: n for n, name in NAMES.items()}}
    config = presets.vit("tiny", num_channels=channels, num_layers=1, **labels)
    model = KernelViT(config).eval()
    model.save_pretrained(folder)
    mean, std = [0.1, 0.2, 0.3][:channels], [0.5, 0.6, 0.7][:channels]
    KernelImageProcessor(
        size=8, num_channels=channels, image_mean=mean, image_std=std
    ).save_pretrained(folder)
    return model


@pytest.mark.parametrize("channels", [1, 3])
def test_a_pipeline_classifies_a_file_by_name(tmp_path, channels):
    model = save_classifier(tmp_path, channels)
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, channels), dtype=np.uint8)
    Image.fromarray(pixels.squeeze()).save(tmp_path / "image.png")
    found = pipeline("image-classification", model=str(tmp_path))(str(tmp_path / "image.png"))
    mean, std = (torch.tensor(x)[:channels, None, None] for x in ([0.1, 0.2, 0.3], [0.5, 0.6, 0.7]))
    values = (torch.from_numpy(pixels).permute(2, 0, 1) / 255 - mean) / std
    chances = model(values[None]).logits.softmax(-1)[0].tolist()
    wanted = dict(zip(NAMES.values(), chances, strict=True))
    assert {one["label"]: one["score"] for one in found} == pytest.approx(wanted, rel=1e-5)
    config = AutoModelForImageClassification.from_pretrained(tmp_path).config
    assert config.id2label == NAMES


def test_the_image_processor_takes_what_people_have(tmp_path):
    save_classifier(tmp_path)
    read = AutoImageProcessor.from_pretrained(tmp_path)
    assert type(read) is models.KernelImageProcessor
    wide = np.arange(10 * 20 * 3, dtype=np.uint8).reshape(10, 20, 3)
    one = read(wide, return_tensors="pt")["pixel_values"]
    assert one.shape == (1, 3, 8, 8)
    for given in (torch.from_numpy(wide), wide.transpose(2, 0, 1), [Image.fromarray(wide)]):
        assert torch.equal(read(given, return_tensors="pt")["pixel_values"], one)
    grey = KernelImageProcessor(size=4, num_channels=1)
    assert grey([wide, wide[..., 0]], return_tensors="np")["pixel_values"].shape == (2, 1, 4, 4)
    with pytest.raises(ValueError, match=r"from 0 to 255 \(uint8\), got float64"):
        read(wide / 255.0)
    with pytest.raises(ValueError, match="image_mean and image_std must have 3 numbers"):
        KernelImageProcessor(image_mean=[0.5])
    with pytest.raises(ValueError, match="num_channels must be 1 or 3, got 2"):
        KernelImageProcessor(num_channels=2)


def test_a_checkpoint_has_config_and_weights_alone(tmp_path):
    model = KernelLM(presets.lm("tiny", vocab_size=30, num_layers=1))
    model.save_pretrained(tmp_path, whole=False)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".safetensors"}
    assert "auto_map" not in (tmp_path / "config.json").read_text()


def test_models_are_registered_without_an_image_processor_of_transformers(monkeypatch):
    """Older releases of transformers need torchvision for AutoImageProcessor."""

    class Missing:
        @staticmethod
        def register(*args, **kwargs):
            raise ImportError("AutoImageProcessor requires the Torchvision library")

    monkeypatch.setattr(models.transformers, "AutoImageProcessor", Missing)
    models._register()
