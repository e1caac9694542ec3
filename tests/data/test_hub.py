"""The hub, without a network: `datasets` reads folders on disk in the same way."""

import io
import json
import shutil
import sys

import pytest

pytest.importorskip("transformers")

from mercer import data
from mercer.data import hub
from mercer.data.errors import need

datasets = pytest.importorskip("datasets")
huggingface_hub = pytest.importorskip("huggingface_hub")


@pytest.fixture
def local(monkeypatch, tmp_path):
    """Names of the hub lead to folders on disk; everything else is not there."""
    load_dataset = datasets.load_dataset
    places = {}

    def load(path, config=None, **options):
        if path not in places:
            raise ConnectionError("Couldn't reach the hub")
        options.pop("revision", None)
        return load_dataset(str(places[path]), cache_dir=str(tmp_path / "hf"), **options)

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(hub, "_ask", lambda path: None)
    datasets.disable_progress_bars()
    yield places
    datasets.enable_progress_bars()


def write_rows(folder, **splits):
    folder.mkdir()
    for split, rows in splits.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(text)
    return folder


def test_wikitext_is_one_long_text(local, tmp_path):
    lines = [{"text": ""}, {"text": " = Title = \n"}, {"text": " Some text .\n"}]
    local["Salesforce/wikitext"] = write_rows(
        tmp_path / "w", train=lines, validation=lines[:2], test=lines[1:]
    )
    found = data.text("wikitext-103", tokenizer="bytes", cache_dir=tmp_path / "cache")
    assert bytes(found.train.ids[1:].tolist()) == b" = Title = \n Some text .\n"
    assert found.valid.num_bytes == 12
    assert found.test is not None
    assert found.source == "wikitext-103"


def test_fineweb_has_documents_and_its_last_rows_are_held_out(local, tmp_path):
    rows = [{"text": f"document {n:02d}", "url": "x"} for n in range(40)]
    local["HuggingFaceFW/fineweb-edu"] = write_rows(tmp_path / "f", train=rows)
    found = data.text("fineweb-edu", tokenizer="bytes", cache_dir=tmp_path / "cache")
    assert (found.train.ids == 256).sum() == 38
    assert bytes(found.valid.ids[1:12].tolist()) == b"document 38"


def test_any_name_with_its_column(local, tmp_path):
    rows = [{"body": f"document {n}", "n": n} for n in range(10)]
    local["someone/something"] = write_rows(tmp_path / "s", train=rows, valid=rows)
    options = {"tokenizer": "bytes", "cache_dir": tmp_path / "cache"}
    assert data.text("someone/something", column="body", **options).train.num_bytes == 100
    with pytest.raises(data.DataError, match="split train has no column 'text'; it has body, n"):
        data.text("someone/something", **options)
    with pytest.raises(data.DataError, match="row 1: column 'n' must be text, but is int"):
        data.text("someone/something", column="n", **options)


def test_translations(local, tmp_path):
    rows = [{"translation": {"de": f"wort {n}", "en": f"word {n}"}} for n in range(30)]
    local["bbaaaa/iwslt14-de-en"] = write_rows(
        tmp_path / "i", train=rows[:10], validation=rows[10:20], test=rows[20:]
    )
    options = {"tokenizer": "bytes", "cache_dir": tmp_path / "cache"}
    found = data.pairs("iwslt14", **options)
    assert found.train[0] == ("wort 0", "word 0")
    assert [len(found.split(s)) for s in ("train", "valid", "test")] == [10, 10, 10]
    local["x/y"] = tmp_path / "i"
    # both languages are found where they are the only ones
    assert data.pairs("x/y", **options).test[0] == ("wort 20", "word 20")
    names = ("translation.en", "translation.de")
    assert data.pairs("x/y", columns=names, **options).train[0] == ("word 0", "wort 0")
    with pytest.raises(data.DataError, match=r"no column 'translation.fr'; it has translation.de"):
        data.pairs("x/y", columns=("translation.de", "translation.fr"), **options)
    flat = [{"de": f"wort {n}", "en": f"word {n}"} for n in range(10)]
    local["bentrevett/multi30k"] = write_rows(tmp_path / "m", train=flat, validation=flat)
    assert data.pairs("multi30k", **options).train[1] == ("wort 1", "word 1")
    local["x/z"] = tmp_path / "m"
    with pytest.raises(data.DataError, match=r"name two of its columns \(de, en\)"):
        data.pairs("x/z", **options)


def make_images(folder):
    """A table of images with names of classes, as CIFAR-10 has on the hub."""
    pillow = pytest.importorskip("PIL.Image")
    folder.mkdir()
    features = datasets.Features(
        {"img": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    )
    for split in ("train", "test"):
        rows = []
        for n in range(6):
            file = io.BytesIO()
            pillow.new("RGB", (8, 8), (n, 10, 20)).save(file, "PNG")
            rows.append({"img": {"bytes": file.getvalue(), "path": None}, "label": n % 2})
        table = datasets.Dataset.from_list(rows, features=features)
        table.to_parquet(str(folder / f"{split}.parquet"))
    return folder


def test_cifar(local, tmp_path):
    local["uoft-cs/cifar10"] = make_images(tmp_path / "c")
    found = data.images("cifar10")
    assert found.class_names == ("cat", "dog")
    assert (len(found.train), len(found.valid)) == (6, 6)
    assert found.train[3]["labels"] == 1
    pixel = found.train[3]["pixel_values"][0, 0, 0] * found.std[0] + found.mean[0]
    assert round(float(pixel) * 255) == 3
    local["a/b"] = tmp_path / "c"
    with pytest.raises(data.DataError, match="has no column 'image'; it has img, label"):
        data.images("a/b")
    with pytest.raises(data.DataError, match="row 1: column 'label' must be an image"):
        data.images("a/b", columns=("label", "label"))
    assert data.images("a/b", columns=("img", "label"), size=4).image_size == 4


def test_parquet_files_on_disk(tmp_path):
    datasets.disable_progress_bars()
    rows = [{"text": f"document {n:02d}"} for n in range(20)]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "a-train.parquet"))
    found = data.text(tmp_path, tokenizer="bytes", cache_dir=tmp_path / "cache")
    assert bytes(found.valid.ids[1:].tolist()) == b"document 19"
    (tmp_path / "a-train.parquet").write_bytes(b"not a table")
    with pytest.raises(data.DataError, match=r"a-train.parquet could not be read as a table"):
        data.text(tmp_path, tokenizer="bytes", cache_dir=tmp_path / "cache")
    datasets.enable_progress_bars()


@pytest.mark.parametrize("read", [data.text, data.pairs, data.images], ids=lambda f: f.__name__)
def test_a_download_that_fails_says_what_to_try(local, read, tmp_path):
    with pytest.raises(data.DataError, match=r"owner/name:conf could not be loaded.*embedded"):
        read("owner/name:conf", cache_dir=tmp_path)


def test_names():
    assert hub.find_name("wikitext-103", hub.TEXT, None).config == "wikitext-103-raw-v1"
    assert hub.find_name("imagenet-1k", hub.IMAGES, None).path == "ILSVRC/imagenet-1k"
    found = hub.find_name("allenai/c4:en", hub.TEXT, None)
    assert (found.path, found.config) == ("allenai/c4", "en")


def test_missing_packages_are_named(monkeypatch, tmp_path):
    for name in ("datasets", "sklearn", "sklearn.datasets", "tokenizers", "numpy"):
        monkeypatch.setitem(sys.modules, name, None)
    for call, name, extra in (
        (lambda: data.text("wikitext-103", cache_dir=tmp_path), "datasets", "data"),
        (lambda: data.images(cache_dir=tmp_path), "sklearn", "train"),
        (lambda: data.text(tokenizer="bytes", cache_dir=tmp_path), "tokenizers", "train"),
        (lambda: need("numpy"), "numpy", "train"),
    ):
        with pytest.raises(ModuleNotFoundError, match=rf"{name} .*'mercer\[{extra}\]'"):
            call()


class Lost(Exception):
    """A lost connection, as the client of the hub raises it."""


@pytest.fixture
def lost(monkeypatch, tmp_path):
    """The hub does not answer; how often it was asked is counted. Kept datasets are in a folder."""
    asked = []

    def fail(self, path, **options):
        asked.append((path, options["timeout"]))
        raise Lost("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", fail)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("it would retry"))
    return asked


def test_a_hub_that_does_not_answer_is_asked_once_and_in_silence(lost, capfd, caplog, tmp_path):
    with pytest.raises(data.DataError) as error:
        data.text("wrongname", tokenizer="bytes", cache_dir=tmp_path / "cache")
    assert str(error.value).startswith(
        "wrongname could not be loaded from the Hugging Face hub (it does not answer: Name or "
        "service not known). Check the name"
    )
    assert "\n" not in str(error.value)
    assert lost == [("wrongname", hub.PATIENCE)]
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


def test_a_dataset_that_is_kept_needs_no_hub(monkeypatch, tmp_path, request):
    rows = write_rows(tmp_path / "rows", train=[{"text": f"text {n}"} for n in range(30)])
    datasets.load_dataset(
        "json", data_files=str(rows / "train.jsonl"), cache_dir=str(tmp_path / "made")
    )
    # As `datasets` keeps one of the hub: in a folder and in files of its name.
    (made,) = (tmp_path / "made" / "json").glob("default*")
    place = tmp_path / "kept" / "owner___things" / "default"
    shutil.copytree(made, place)
    for file in place.glob("*/*/json-train*.arrow"):
        file.rename(file.with_name(file.name.replace("json", "things", 1)))
    request.getfixturevalue("lost")
    tables = hub.load(hub.Name(path="owner/things", config="default"))
    assert tables["train"].read_column("text") == [f"text {n}" for n in range(30)]


def test_a_hub_that_says_no_has_answered(monkeypatch):
    """An unknown name is left to `datasets`, which says what is wrong."""

    def refuse(self, path, **_):
        raise ValueError("no name")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", refuse)
    assert hub._ask("a b") is None
