"""`mercer inspect` of translators and vision transformers, read with their validation data."""

import json
import shutil

import pytest
import torch
from inspect_reports import data_of
from typer.testing import CliRunner

pytest.importorskip("accelerate")

from mercer import inspect, use
from mercer.cli.commands import app
from mercer.train import Settings, run


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run of each task; nothing may change them."""
    place = tmp_path_factory.mktemp("examples")
    kinds = {
        "vit": {"task": "vision", "kernel": "RBF(heads=2)", "overrides": {"pooling": "class"}},
        "mean": {"task": "vision", "overrides": {"pooling": "mean"}},
        "translator": {"task": "translation", "tokenizer": "bpe:300", "kernel": "RBF(heads=2)"},
    }
    for name, options in kinds.items():
        settings = Settings(
            batch=4, steps=2, eval_every=2, eval_items=8, device="cpu", beams=1,
            cache=str(place / "cache"), output=str(place / name), **options,
        )  # fmt: skip
        run(settings)
    return place


@pytest.fixture
def invoke(place, monkeypatch):
    monkeypatch.chdir(place)

    def call(*arguments, columns=80):
        return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["inspect", *arguments])

    return call


def test_heads_of_a_vision_transformer_stand_on_the_grid(invoke, place):
    found = json.loads(invoke("vit", "--json").stdout)
    trained = use.load(place / "vit", device="cpu")
    side = trained.model.config.side
    assert found["unit"] == "patches"
    assert found["images"] == "16 of the validation data"
    assert found["patches"] == f"{side} x {side} and a class token"
    assert [found[name] for name in ("positions", "spreads", "tokens", "tags")] == [None] * 4
    # The same by hand, from all weights.
    task = use.examples._task(trained)
    items = [task.valid[n * len(task.valid) // 16] for n in range(16)]
    with torch.no_grad():
        weights = trained.model(
            pixel_values=task.collate(items)["pixel_values"], output_attentions=True
        ).attentions
    n = torch.arange(side**2)
    stand = torch.stack([n // side, n % side], -1).float()
    apart = (stand[:, None] - stand).norm(dim=-1)
    logged = {one["name"]: one for one in found["curves"]}
    for one in found["heads"]:
        layer = int(one["layer"].split(".")[1])
        p = weights[layer][:, one["head"]]  # [B, T, T]
        patches = p[:, 1:, 1:]
        distance = (patches * apart).sum() / patches.sum()
        assert one["distance"] == pytest.approx(distance.item(), rel=1e-4)
        assert one["first_weight"] == pytest.approx(p[..., 0].mean().item(), rel=1e-4)
        alone = p.diagonal(dim1=1, dim2=2).mean()
        assert one["self_weight"] == pytest.approx(alone.item(), rel=1e-4)
        assert one["kernel"].startswith("exp(-|q - k|^2 / (2 * ")
        values = logged[f"bandwidth {one['layer']} {one['head']}"]["values"]
        assert values[-1] == pytest.approx(one["bandwidth"], rel=1e-4)
    assert logged["eval_loss"]["unit"] == "nats per image"


def test_heads_of_a_translator_are_named_by_their_part(invoke, place):
    found = json.loads(invoke("translator", "--json").stdout)
    trained = use.load(place / "translator", device="cpu")
    assert found["unit"] == "tokens"
    assert found["sentence pairs"] == "16 of the validation data"
    layers = list(dict.fromkeys(one["layer"] for one in found["heads"]))
    numbers = range(len(layers) // 3)
    assert sorted(layers) == sorted(
        f"{part}.{n}" for part in ("encoder", "decoder", "cross") for n in numbers
    )
    crossing = [one for one in found["heads"] if one["layer"].startswith("cross")]
    assert {one["distance"] for one in crossing} == {None}
    # The mean over the rows of pairs that are read alone, from all weights.
    task = use.examples._task(trained)
    items = [task.valid[n * len(task.valid) // 16] for n in range(16)]
    rows, sums = 0, 0.0
    for item in items:
        with torch.no_grad():
            out = trained.model(
                input_ids=item["input_ids"][None], labels=item["labels"][None],
                output_attentions=True,
            )  # fmt: skip
        p = out.cross_attentions[0][0, 1]  # [Q, K]
        sums += torch.special.entr(p).sum(-1).exp().sum().item()
        rows += len(p)
    one = next(one for one in crossing if one["layer"] == "cross.0" and one["head"] == 1)
    assert one["neighbours"] == pytest.approx(sums / rows, rel=1e-4)
    names = {curve["name"] for curve in found["curves"]}
    assert {"bandwidth encoder.0 0", "bandwidth decoder.1 1", "bleu"} <= names


@pytest.mark.parametrize("name", ["vit", "mean", "translator"])
def test_the_terminal_has_the_table(invoke, name):
    done = invoke(name)
    assert done.exit_code == 0, done.output
    words = {"vit": "in patches", "mean": "in patches", "translator": "in tokens"}
    assert f"neighbours and distance {words[name]}" in done.output
    assert "validation loss" in done.output
    assert "…" not in done.output
    assert max(map(len, done.output.splitlines())) <= 80


@pytest.mark.parametrize(
    ("name", "first"), [("vit", "class token"), ("mean", "first patch"), ("translator", None)]
)
def test_a_page_has_heads_and_training_and_no_text(invoke, tmp_path, name, first):
    done = invoke(name, "--output", str(tmp_path / "page.html"))
    assert done.exit_code == 0, done.output
    (model,) = data_of((tmp_path / "page.html").read_text(encoding="utf-8"))["models"]
    assert model["heads"]
    assert model["curves"]
    assert (model["has_text"], model["rows"], model["tokens"]) == (False, None, None)
    assert model["unit"] == ("tokens" if first is None else "patches")
    assert model["first"] == (first or "first token")


BAD = {
    "a text": (["vit", "--text", "vit/config.json"], "--text is for language models"),
    "rows": (["translator", "--rows", "1:2"], "is a translator, which is read with"),
    "context": (["vit", "--context", "8"], "--context is for language models"),
    "text and images": (["vit", "translator", "--compare"], "models of text and of images"),
    "no run": (["alone"], "is an image classifier, which is read with the validation data"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence(invoke, place, name):
    if name == "no run":
        shutil.copytree(place / "vit" / "model", place / "alone", dirs_exist_ok=True)
    arguments, sentence = BAD[name]
    done = invoke(*arguments, columns=300)
    assert done.exit_code == 2, done.output
    (line,) = [line for line in done.output.splitlines() if line.strip()]
    assert line.startswith("error:")
    assert sentence in line


def test_data_that_is_gone_is_said(place, monkeypatch):
    trained = use.load(place / "translator", device="cpu")
    object.__setattr__(trained.settings, "data", "nowhere.tsv")
    with pytest.raises(ValueError, match=r"with which a translator is read, cannot be read: .*no"):
        use.read(trained)


def test_curves_of_other_tasks_keep_their_names(place):
    trained = use.load(place / "vit", device="cpu")
    plain = inspect.curves(place / "vit")
    assert [one.name for one in use.read(trained).curves] == [one.name for one in plain]
