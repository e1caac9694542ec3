"""Models with kernels of one's own: as objects, in configs, saved, loaded, and put in later."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import mercer as mc
from mercer import models
from mercer.models import KernelLMConfig, presets
from mercer.studies import Study, Variant
from mercer.train import Settings, run
from mercer.train.tasks import LanguageModel

SOURCE = """
import torch

import mercer as mc


class ARD(mc.Kernel):
    def __init__(self, dim):
        super().__init__()
        self.log_s = torch.nn.Parameter(torch.zeros(dim))

    def log_weight(self, q, k):
        q, k = (x / self.log_s.exp() for x in self.select(q, k))
        return -0.5 * (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)
"""


@pytest.fixture
def ard(tmp_path, monkeypatch):
    """The class ARD of a file in the current folder, imported as a person does."""
    monkeypatch.chdir(tmp_path)
    name = f"kernels_of_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    return __import__(name).ARD


def make(**more):
    torch.manual_seed(0)
    return models.KernelLM(presets.lm("tiny", vocab_size=30, **more)).eval()


def test_a_config_takes_an_object_and_stores_its_text(ard):
    text, file = f"{ard.__module__}.py:ARD(32)", f"{ard.__module__}.py"
    by_object = make(kernel=ard(32))
    assert by_object.config.kernel == text
    assert type(by_object.blocks[1].attention.kernel) is ard
    by_text = make(kernel=text, trust_kernels=file)
    given = models.KernelLM(presets.lm("tiny", vocab_size=30), kernel=ard(32))
    assert by_text.config.to_dict() == by_object.config.to_dict() == given.config.to_dict()
    assert "trust_kernels" not in given.config.to_dict()
    for parts in ({"kernel": [ard(32), None]}, {"system_options": {"kernel": ard(32)}}):
        kernels = [type(block.attention.kernel) for block in make(**parts).blocks]
        assert ard in kernels
    for build in (KernelLMConfig, presets.lm, lambda kernel: run(Settings(kernel=kernel))):
        with pytest.raises(ValueError, match=f"pass trust_kernels='{file}'"):
            build(kernel=text)
    assert Settings(kernel=ard(32)) == Settings(
        kernel=text, trust_kernels=str(Path(file).resolve())
    )


def test_a_saved_config_imports_nothing(ard, tmp_path, monkeypatch):
    model = make(kernel=ard(32))
    torch.nn.init.normal_(model.blocks[1].attention.kernel.log_s)
    ids = torch.arange(20)[None]
    model.save_pretrained(tmp_path / "saved")
    file = f"{ard.__module__}.py"
    # Also not if the config itself asks for it.
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    config["trust_kernels"] = [file]
    (tmp_path / "saved" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"imports nothing.*pass trust_kernels='{file}'"):
        models.KernelLM.from_pretrained(tmp_path / "saved")
    for load in (models.KernelLM, AutoModelForCausalLM):
        loaded = load.from_pretrained(tmp_path / "saved", trust_kernels=file)
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    config = KernelLMConfig.from_pretrained(tmp_path / "saved", trust_kernels=[file])
    loaded = models.KernelLM.from_pretrained(tmp_path / "saved", config=config, trust_kernels=file)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_a_kernel_put_in_later_is_saved(ard, tmp_path):
    model = make()
    model.blocks[0].attention.kernel = mc.RBF(2.0)
    model.blocks[1].attention.kernel = ard(32) * mc.Laplace(3.0)
    torch.nn.init.normal_(model.blocks[1].attention.kernel.kernels[0].log_s)
    model.save_pretrained(tmp_path / "saved")
    trust = f"{ard.__module__}.py"
    loaded = models.KernelLM.from_pretrained(tmp_path / "saved", trust_kernels=trust)
    assert loaded.config.kernel == ["RBF(2.0)", f"{trust}:ARD(32) * Laplace(3.0)"]
    ids = torch.arange(20)[None]
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    loaded.save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert again["kernel"] == loaded.config.kernel
    model.blocks[0].attention.kernel = mc.RBF(torch.ones(2))
    with pytest.raises(ValueError, match="RBF has no text form"):
        model.save_pretrained(tmp_path / "third")


def test_each_attention_of_a_translator_keeps_its_kernel(ard, tmp_path):
    model = models.KernelTranslator(presets.translator("tiny"), kernel=ard(32))
    model.encoder.blocks[1].attention.kernel = mc.RBF(2.0)
    model.blocks[0].cross.kernel = mc.Cosine(3.0)
    model.save_pretrained(tmp_path / "saved")
    trust = f"{ard.__module__}.py"
    loaded = models.KernelTranslator.from_pretrained(tmp_path / "saved", trust_kernels=trust)
    for path in ("encoder.blocks.0.attention", "encoder.blocks.1.attention",
                 "blocks.0.attention", "blocks.0.cross", "blocks.1.cross"):  # fmt: skip
        there, here = (m.get_submodule(path).kernel for m in (loaded, model))
        assert repr(there) == repr(here)
    image = models.KernelViT(presets.vit("tiny"), kernel=mc.RBF(2.0))
    assert image.config.kernel == "RBF(2.0)"
    assert image.config.position == "grid"


def test_a_kernel_that_does_not_fit_names_its_line(ard):
    (line,) = (n for n, text in enumerate(SOURCE.splitlines(), 1) if "def log_weight" in text)

    class Wrong(ard):
        def terms(self, q, k):
            return self.log_weight(q, k)

    # Not of the file: the error stays what it is.
    with pytest.raises(ValueError, match="not at the top level"):
        make(kernel=Wrong(30))
    file = f"{ard.__module__}.py"
    with open(file, "a") as text:
        text.write("\n    def terms(self, q, k):\n        return self.log_weight(q, k)\n")
    said = rf"2 heads of 32 features: .*{file}:{line + 1}: RuntimeError: The size of tensor"
    with pytest.raises(ValueError, match=said):
        models.KernelLM(
            presets.lm("tiny", kernel=f"other/{file}:ARD(30)", trust_kernels=copied(file))
        )


def copied(file):
    """A copy of a file under another folder, which nothing has imported yet."""
    Path("other").mkdir()
    return shutil.copy(file, Path("other") / file)


WORDS = {
    "kernel and position": {"kernel": "RBF(2.0)", "position": "rotary"},
    "position": {"position": "ProductKernel()"},
    "no position": {"position": "NoPosition()"},
    "kernel on positions": {"kernel": 'RBF(2.0) * Exponential(on="position")'},
    "added": {"position": "DirectSum(Learned(256))"},
    "value": {"kernel": "RBF()", "position": "rotary", "value": "content+position"},
}


@pytest.mark.parametrize("name", WORDS)
def test_the_same_words_are_the_same_model(name, monkeypatch):
    words = WORDS[name]
    shape = presets.lm("tiny", vocab_size=30)
    sizes = {n: getattr(shape, n) for n in ("d_model", "num_layers", "num_heads", "vocab_size")}
    configs = [
        presets.lm("tiny", vocab_size=30, **words),
        KernelLMConfig(system="vaswani2017", **sizes, **words),
    ]
    study = Study(systems=[Variant("mine", **words) if "kernel" in words else Variant(
        "mine", system="vaswani2017", **words)])  # fmt: skip
    task = object.__new__(LanguageModel)
    monkeypatch.setattr(LanguageModel, "vocabulary", lambda self: {"vocab_size": 30})
    for settings in (Settings(**words), Settings(**study.job(study.variants[0], 0).chosen)):
        task.settings, task.length = settings.resolve(), 64
        configs.append(task.config())
    layers = [models.KernelLM(config).blocks[0].attention for config in configs]
    said = {
        (layer.value_function, repr(layer.position), repr(layer.joined_kernel), repr(layer.filter))
        for layer in layers
    }
    assert len(said) == 1
    added = "position" in words and "DirectSum" in words["position"]
    value = "content+position" if added else "content"
    assert layers[0].value_function == words.get("value", value)


def test_names_that_do_not_exist_are_refused(tmp_path):
    for config, wrong, near in (
        (KernelLMConfig, "droput", "dropout"),
        (models.KernelTranslatorConfig, "encoder_layer", "encoder_layers"),
        (models.KernelViTConfig, "patchsize", "patch_size"),
    ):
        with pytest.raises(ValueError, match=f"no field '{wrong}'; did you mean '{near}'"):
            config(**{wrong: 1})
    make().save_pretrained(tmp_path)
    for load in (models.KernelLM, AutoModelForCausalLM, KernelLMConfig):
        with pytest.raises(ValueError, match="'droput'; did you mean 'dropout'"):
            load.from_pretrained(tmp_path, droput=0.1)
    assert models.KernelLM.from_pretrained(tmp_path, dropout=0.1).config.dropout == 0.1
    # Fields that transformers or another version has written are no slip of a person.
    config = json.loads((tmp_path / "config.json").read_text())
    assert KernelLMConfig(**config).to_dict() == make().config.to_dict() | {
        n: config[n] for n in ("architectures", "dtype")
    }
    (tmp_path / "config.json").write_text(json.dumps(config | {"of_a_later_version": 1}))
    assert models.KernelLM.from_pretrained(tmp_path).config.num_layers == 2
