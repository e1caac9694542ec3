"""`mercer inspect`: tables, JSON and pages of small runs, and what it refuses."""

import errno
import json
import lzma
import re

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("accelerate")

from mercer import use
from mercer.cli.commands import app
from mercer.data import tokens
from mercer.train import Settings, run

SENTENCE = "1\tthe\tthe\tDET\tDT\t_\t2\tdet\t_\t_\n2\tcat\tcat\tNOUN\tNN\t_\t0\troot\t_\t_\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run with token kernels, one with bandwidths, a text and tags; nothing may change them."""
    place = tmp_path_factory.mktemp("inspected")
    text = "".join(f"the cat number {n} sees the {n * n % 97}\n" for n in range(600))
    (place / "data.txt").write_text(text)
    (place / "novel.txt").write_text("the cat sat on the mat\n" * 30)
    (place / "tags.conllu").write_text(SENTENCE * 8)
    (place / "bytes.conllu").write_bytes(b"1\tgood \xff")
    (place / "cut.xz").write_bytes(lzma.compress(SENTENCE.encode())[:-9])
    for name, options in {
        "leng": {"system": "leng2026"},
        "rbf": {"kernel": "RBF(heads=2)"},
    }.items():
        settings = Settings(
            task="lm", data=str(place / "data.txt"), tokenizer="bpe:300", batch=4, length=32,
            steps=4, eval_every=4, eval_items=64, device="cpu", cache=str(place / "cache"),
            output=str(place / name), **options,
        )  # fmt: skip
        run(settings)
    return place


@pytest.fixture
def invoke(place, monkeypatch):
    monkeypatch.chdir(place)

    def call(*arguments, columns=80):
        done = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["inspect", *arguments])
        return done

    return call


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_terminal_has_the_tables_of_a_run(invoke, columns):
    done = invoke("rbf", columns=columns)
    assert done.exit_code == 0, done.output
    assert "exp(-|q - k|^2" in done.output
    assert "validation loss" in done.output
    assert max(map(len, done.output.splitlines())) <= columns
    done = invoke("leng", "--tags", "tags.conllu", "--text", "novel.txt", columns=columns)
    assert done.exit_code == 0, done.output
    assert "deviate most" in done.output


def test_json_has_the_same_numbers_for_programs(invoke, place):
    found = json.loads(invoke("rbf", "--json").stdout)
    report = use.read(use.load(place / "rbf", device="cpu"))
    assert found["heads"] == json.loads(json.dumps(report.heads.as_dicts()))
    assert found["context"] == "32 tokens"
    assert [len(found[name]) for name in ("heads", "spreads")] == [len(report.heads), 0]
    curves = {curve["name"]: curve["values"] for curve in found["curves"]}
    assert curves.keys() >= {"loss", "eval_loss"}
    for one in found["heads"]:
        logged = curves[f"bandwidth {one['layer']} {one['head']}"]
        assert logged[-1] == pytest.approx(one["bandwidth"], rel=1e-4)


def test_a_page_is_written_and_says_where(invoke, tmp_path):
    page = tmp_path / "page.html"
    done = invoke("leng", "--text", "novel.txt", "--rows", "3:9", "--output", str(page))
    assert done.exit_code == 0, done.output
    assert re.search(r"wrote .*page\.html, 0\.\d\d MB", done.output.replace("\n", ""))
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert list(tmp_path.iterdir()) == [page]


def test_models_are_compared(invoke, tmp_path):
    found = json.loads(invoke("leng", "leng", "--compare", "--json").stdout)
    assert found["names"] == ["leng (1)", "leng (2)"]
    assert found["matrix"] == [[0.0, 0.0], [0.0, 0.0]]
    done = invoke("leng", "rbf", "--compare", "--output", str(tmp_path / "both.html"))
    assert done.exit_code == 0, done.output


def test_published_token_kernels_need_no_model(invoke, place, tmp_path):
    tokenizer = use.load(place / "leng", device="cpu").tokenizer
    tokenizer.save_pretrained(tmp_path / "files")
    weight = torch.zeros(300, 6)
    weight[:, 1::3] = 4.0
    weight[5, 3:] = torch.tensor([1.0, 1.0, 0.0])
    torch.save(weight, tmp_path / "shakes.pt")
    files = ["--tokenizer", str(tmp_path / "files")]
    done = invoke("published", str(tmp_path / "shakes.pt"), *files, "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["tokens"]
    assert max(rows, key=lambda row: row["deviation"])["id"] == 5
    assert rows[5]["text"] == tokenizer.decode([5])
    assert len(json.loads(done.stdout)["notes"]) == 1
    torch.save(torch.cat([weight, weight]), tmp_path / "more.pt")
    done = invoke("published", str(tmp_path / "more.pt"), *files, columns=300)
    assert "has 300 tokens, and there are kernels of 600" in done.output
    assert "count" not in done.output
    page = tmp_path / "page.html"
    done = invoke(
        "published",
        str(tmp_path / "shakes.pt"),
        *files,
        "--tags",
        "tags.conllu",
        "--output",
        str(page),
    )
    assert done.exit_code == 0, done.output
    assert page.stat().st_size > 10_000


def test_a_patched_model_is_read_with_a_text(invoke, place, tmp_path):
    transformers = pytest.importorskip("transformers")
    from mercer import nn
    from mercer.integrations import hf

    tokenizer = use.load(place / "leng", device="cpu").tokenizer
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    hf.patch(model, "RBF(heads=4)", token_kernels=nn.TokenKernels.like(model, size=3, on="v"))
    hf.save(model, tmp_path / "llama")
    done = invoke(str(tmp_path / "llama"), "--text", "novel.txt", columns=300)
    assert done.exit_code == 2
    assert "has no tokenizer" in done.output
    tokenizer.save_pretrained(tmp_path / "llama")
    done = invoke(str(tmp_path / "llama"), columns=300)
    assert done.exit_code == 2
    assert "give one with --text" in done.output
    done = invoke(str(tmp_path / "llama"), "--text", "novel.txt", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert len(found["heads"]) == 8
    assert found["heads"][0]["kernel"].startswith("exp(-|q - k|^2")
    assert len(found["tokens"]) == 300
    page = tmp_path / "page.html"
    done = invoke(str(tmp_path / "llama"), "--text", "novel.txt", "--output", str(page))
    assert done.exit_code == 0, done.output


def test_every_token_has_a_text_of_its_own():
    tokenizer = tokens.spell_bytes()
    words = use.reading.spell(tokenizer, 260)
    assert words[ord("a")] == "a"
    assert words[0xE2] == "\\xe2"
    assert words[256:] == ["<|endoftext|>", "(id 257)", "(id 258)", "(id 259)"]


def test_an_empty_text_is_said(invoke, tmp_path):
    (tmp_path / "empty.txt").write_text("\n")
    done = invoke("leng", "--text", str(tmp_path / "empty.txt"))
    assert done.exit_code == 0, done.output
    assert "The text is empty" in done.output


BAD = {
    "nowhere": (["nowhere"], "nowhere does not exist"),
    "two models": (["rbf", "leng"], "2 models are compared with --compare"),
    "one to compare": (["rbf", "--compare"], "--compare needs two models or more"),
    "no text": (["rbf", "--text", "nowhere.txt"], "--text: nowhere.txt is not there"),
    "a folder as text": (["rbf", "--text", "cache"], "--text: cache is a folder"),
    "no tags": (["rbf", "--tags", "nowhere"], "--tags: nowhere is not there"),
    "tags of bytes": (["rbf", "--tags", "bytes.conllu"], "bytes.conllu is not CoNLL-U"),
    "tags cut short": (["rbf", "--tags", "cut.xz"], "cut.xz is no .xz file, or it is damaged"),
    "tags of no kind": (["rbf", "--tags", "novel.txt"], "no tagged word in novel.txt"),
    "rows of words": (["rbf", "--rows", "a:b"], "--rows must be FIRST:LAST such as 100:180"),
    "rows behind": (["rbf", "--rows", "9:900", "--output", "page.html"], "LAST < 32"),
    "context": (["rbf", "--context", "1"], "--context must be at least 2"),
    "output": (["rbf", "--output", "nowhere/page.html"], "the folder nowhere is not there"),
    "a folder as output": (["rbf", "--output", "cache"], "cache is a folder"),
    "a corpus": (["rbf", "--published", "bible"], "--published must be shakes or victorian"),
    "published": (["published"], "published needs a file"),
    "no kernels": (["published", "novel.txt"], "novel.txt cannot be read with weights_only"),
    "a device": (["rbf", "--device", "moon"], "device 'moon' cannot be used here"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence(invoke, name):
    arguments, sentence = BAD[name]
    done = invoke(*arguments, columns=300)
    assert done.exit_code == 2, done.output
    (line,) = [line for line in done.output.splitlines() if line.strip()]
    assert line.startswith("error:")
    assert sentence in line


def test_a_page_that_cannot_be_written_is_named(invoke, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", ".page.html.x.tmp")

    monkeypatch.setattr("mercer.inspect.write_page", full)
    done = invoke("rbf", "--output", "page.html", columns=300)
    assert done.exit_code == 1, done.output
    assert "error: cannot write page.html: No space left on device\n" in done.output


def test_a_text_may_be_packed_and_a_damaged_one_is_refused(invoke, tmp_path):
    packed = lzma.compress(b"the cat sat on the mat\n" * 30)
    for name, written in {"whole.xz": packed, "cut.xz": packed[:-9], "no.gz": b"words"}.items():
        (tmp_path / name).write_bytes(written)
    texts = ("novel.txt", str(tmp_path / "whole.xz"))
    plain, whole = (invoke("rbf", "--json", "--text", text) for text in texts)
    assert json.loads(plain.stdout)["heads"] == json.loads(whole.stdout)["heads"]
    for name in ("cut.xz", "no.gz"):
        done = invoke("rbf", "--text", str(tmp_path / name), columns=300)
        assert done.exit_code == 2
        assert f"{name} is no .{name[-2:]} file, or it is damaged" in done.output


def test_a_text_that_is_not_utf8_is_refused(invoke, tmp_path):
    (tmp_path / "bytes").write_bytes(b"good \xff bad")
    done = invoke("rbf", "--text", str(tmp_path / "bytes"), columns=300)
    assert done.exit_code == 2
    assert "is not UTF-8, at byte 5" in done.output
