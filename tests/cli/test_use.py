"""`mercer generate | translate | classify | evaluate` on runs of a few steps; what they refuse."""

import json
import shutil
import sys

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("accelerate")
pytest.importorskip("sacrebleu")
pytest.importorskip("PIL")

from mercer import data, use
from mercer.cli.commands import app
from mercer.cli.outcome import next_steps
from mercer.data.grammar import draw_pairs
from mercer.train import Settings, run
from mercer.use.generate import _make_draw

SMALL = {
    "batch": 8,
    "length": 32,
    "steps": 6,
    "eval_every": 6,
    "eval_items": 6,
    "device": "cpu",
    "beams": 2,
}


def write_data(folder):
    """A small corpus and a few pairs, each with a test file."""
    (folder / "text").mkdir()
    (folder / "pairs").mkdir()
    pairs = draw_pairs({"train": 200, "valid": 20, "test": 20}, 0)
    for split, count in (("train", 400), ("valid", 40), ("test", 60)):
        lines = (f"the {split} line {n} has the number {n * n % 97}\n" for n in range(count))
        (folder / "text" / f"numbers-{split}.txt").write_text("".join(lines))
        rows = "".join(f"{german}\t{english}\n" for german, english in pairs[split])
        (folder / "pairs" / f"cats-{split}.tsv").write_text(rows)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of each task, and the cache of their data; nothing may change them."""
    place = tmp_path_factory.mktemp("used")
    write_data(place)
    own = {
        "lm": {"data": str(place / "text"), "tokenizer": "bytes", "split": "test"},
        "translation": {"data": str(place / "pairs"), "tokenizer": "bpe:300"},
    }
    found = {}
    for task in ("lm", "translation", "vision"):
        settings = Settings(
            **{**SMALL, "cache": str(place / "cache"), **own.get(task, {})},
            task=task, output=str(place / "runs" / task),
        )  # fmt: skip
        found[task] = run(settings)
    return place, found


@pytest.fixture
def invoke(runs, monkeypatch):
    monkeypatch.chdir(runs[0])

    def call(*arguments, **options):
        return CliRunner(env={"COLUMNS": "200"}).invoke(app, [*arguments], **options)

    return call


@pytest.fixture
def model(runs):
    return use.load(runs[0] / "runs" / "lm", device="cpu")


def test_help_has_examples(invoke):
    for name in ("generate", "translate", "classify", "evaluate"):
        done = invoke(name, "--help")
        assert done.exit_code == 0
        assert f"mercer {name} runs/" in done.output


def test_a_text_goes_on_as_the_seed_says(invoke):
    arguments = ["generate", "runs/lm", "the", "train line", "-n", "12"]
    done = invoke(*arguments)
    assert done.exit_code == 0, done.output
    assert done.output.startswith("the train line")
    assert done.output.endswith("\n")
    assert invoke(*arguments).output == done.output
    assert invoke(*arguments, "--seed", "7").output != done.output
    # The prompt from a file, and the folder of the model alone.
    piped = invoke("generate", "runs/lm/model", "-n", "12", input="the train line\n")
    assert piped.output == done.output


def test_the_most_likely_text_is_that_of_transformers(model):
    """Greedy decoding equals `generate` of the model, which decodes in its own loop."""
    ids = [model.tokenizer.eos_token_id, *b"the train line 1"]
    with torch.no_grad():
        want = model.model.generate(
            torch.tensor([ids]), max_new_tokens=20, do_sample=False, eos_token_id=None
        )
    text = model.tokenizer.decode(want[0, len(ids) :])
    assert "".join(use.generate(model, "the train line 1", tokens=20, temperature=0)) == text


def test_draws_keep_to_the_likely_tokens():
    logits = torch.log(torch.tensor([0.1, 0.5, 0.15, 0.25]))

    def drawn(**options):
        given = {"temperature": 1.0, "top_k": None, "top_p": None} | options
        draw = _make_draw(**given, device=torch.device("cpu"), seed=0)
        return {draw(logits) for _ in range(200)}

    assert drawn() == {0, 1, 2, 3}
    assert drawn(top_k=2) == {1, 3}
    assert drawn(top_p=0.6) == {1, 3}
    assert drawn(top_p=0.4) == {1}
    assert drawn(top_k=3, top_p=0.99) == {1, 2, 3}
    assert drawn(temperature=0.0) == drawn(temperature=1e-3) == {1}


def test_a_character_of_several_bytes_is_one_piece(model):
    text = "ein Käfer 甲虫"
    forced = iter([*text.encode(), model.tokenizer.eos_token_id])

    def say_next(ids, **options):
        logits = torch.full((1, 1, model.model.config.vocab_size), -torch.inf)
        logits[..., next(forced)] = 0.0
        return type("Out", (), {"logits": logits})

    class Pretended:
        config, most_places, new_cache = model.model.config, None, model.model.new_cache
        __call__ = staticmethod(say_next)

    pretended = use.Trained(
        task="lm", model=Pretended(), tokenizer=model.tokenizer, device=model.device,
        path=model.path,
    )  # fmt: skip
    pieces = list(use.generate(pretended, "so", tokens=100))
    assert pieces == list(text)


def test_translations_come_line_by_line(invoke, runs):
    lines = ["Die Katze schläft.", "", "Der Mann tanzt."]
    done = invoke("translate", "runs/translation", input="\n".join(lines))
    assert done.exit_code == 0, done.output
    got = done.output.split("\n")
    assert len(got) == 4
    assert got[1] == ""
    assert got[0]
    assert got[2]
    assert invoke("translate", "runs/translation", *lines, "--batch", "1").output == done.output
    # With batch 1 a line is answered before the next one is read.
    trained = use.load(runs[0] / "runs" / "translation", device="cpu")
    asked = []
    found = use.translate(trained, (asked.append(line) or line for line in lines), batch=1)
    next(found)
    assert asked == lines[:1]


def test_images_are_seen_as_in_training(invoke, runs, tmp_path):
    from PIL import Image

    digits = data.images("embedded").valid
    for n in range(3):
        Image.fromarray(digits.pixels[n][..., 0]).save(tmp_path / f"{n}.png")
    files = [str(tmp_path / f"{n}.png") for n in range(3)]
    done = invoke("classify", "runs/vision", *files, "--top", "2", "--batch", "2")
    assert done.exit_code == 0, done.output
    rows = [line.split("\t") for line in done.output.splitlines()]
    table = (runs[0] / "runs/vision/evaluations/valid/predictions.tsv").read_text().splitlines()
    assert table[0].split("\t") == ["image", "class", "predicted"]
    for n, row in enumerate(rows):
        assert row[0] == files[n]
        assert row[1].split()[0] == table[n + 1].split("\t")[2]
        assert len(row) == 3
    found = json.loads(invoke("classify", "runs/vision", files[0], "--top", "10", "--json").output)
    assert sum(one["probability"] for one in found[0]["classes"]) == pytest.approx(1)


@pytest.mark.parametrize("task", ["lm", "translation", "vision"])
def test_an_evaluation_gives_the_figures_of_training(invoke, runs, task):
    limit = ["--eval-items", "6"]
    done = invoke("evaluate", f"runs/{task}", "--json", "--output", f"again-{task}", *limit)
    assert done.exit_code == 0, done.output
    found, metrics = json.loads(done.stdout), runs[1][task].metrics
    names = {"lm": "bits_per_byte", "translation": "bleu", "vision": "accuracy"}
    assert found[names[task]] == pytest.approx(metrics[names[task]])
    assert found["eval_loss"] == pytest.approx(metrics["eval_loss"])
    kept = runs[0] / "runs" / task / "evaluations" / "valid"
    for file in kept.iterdir():
        again = (runs[0] / f"again-{task}" / file.name).read_text()
        assert file.name == "scores.json" or again == file.read_text()
    assert json.loads((kept / "scores.json").read_text())["split"] == "valid"


def test_the_test_split_is_scored(invoke, runs):
    """By training with --split test, and by evaluate; BLEU during training is of validation."""
    metrics = runs[1]["lm"].metrics
    done = invoke("evaluate", "runs/lm", "--split", "test", "--json", "--eval-items", "6")
    assert json.loads(done.stdout)["eval_loss"] == pytest.approx(metrics["test_loss"])
    assert metrics["test_loss"] != metrics["eval_loss"]
    assert runs[1]["lm"].test_split
    assert runs[1]["translation"].test_split
    assert "test_bleu" not in runs[1]["translation"].metrics
    done = invoke("evaluate", "runs/translation", "--split", "test", "--eval-items", "4")
    assert done.exit_code == 0, done.output
    assert "BLEU" in done.output
    assert "nrefs:1" in done.output
    kept = runs[0] / "runs" / "translation" / "evaluations"
    assert len((kept / "test" / "hypotheses.txt").read_text().splitlines()) == 4
    assert len((kept / "valid" / "hypotheses.txt").read_text().splitlines()) == 6


def test_a_file_is_scored_as_a_whole(invoke, runs, tmp_path):
    """Nothing is held out of it; a folder has its splits."""
    file = tmp_path / "two lines.txt"
    file.write_text("the train line 1\nthe train line 2\n")
    done = invoke("evaluate", "runs/lm", "--data", str(file), "--json")
    found = json.loads(done.stdout)
    assert found["split"] == "all"
    assert found["eval_tokens"] == len(file.read_bytes())
    assert found["folder"].endswith("evaluations/two-lines.txt-all")
    folder = invoke("evaluate", "runs/lm", "--data", "text", "--json", "--output", "o")
    assert json.loads(folder.stdout)["split"] == "valid"
    both = invoke("evaluate", "runs/lm", "--data", "text", "--split", "all", "--json")
    sizes = [path.stat().st_size for path in (runs[0] / "text").iterdir()]
    # Three documents; the first token of all is not predicted.
    assert json.loads(both.stdout)["eval_tokens"] == sum(sizes) + 3 - 1


def test_classes_of_other_images_are_found_by_name(runs, tmp_path):
    from PIL import Image

    for name in ("7", "3"):
        (tmp_path / "some" / name).mkdir(parents=True)
        Image.new("L", (20, 16), 90).save(tmp_path / "some" / name / "a.png")
    trained = use.load(runs[0] / "runs" / "vision", device="cpu")
    found = use.evaluate(trained, tmp_path / "some", split="all", output=tmp_path / "out")
    rows = [line.split("\t")[1] for line in found.answers.lines[1:]]
    assert rows == ["3", "7"]
    (tmp_path / "some" / "3").rename(tmp_path / "some" / "three")
    with pytest.raises(ValueError, match="the class 'three' is none of the model's"):
        use.evaluate(trained, tmp_path / "some", split="all")


def test_a_run_that_has_not_ended_is_taken_at_its_checkpoint(invoke, runs, tmp_path):
    copy = tmp_path / "lm"
    shutil.copytree(runs[0] / "runs" / "lm", copy)
    whole = invoke("generate", str(copy), "the", "-n", "5").stdout
    shutil.rmtree(copy / "model")
    done = invoke("generate", str(copy), "the", "-n", "5")
    assert done.exit_code == 0, done.output
    assert "has not ended: this is its last checkpoint, of step 6" in done.stderr
    assert done.stdout == whole
    shutil.rmtree(copy / "checkpoints")
    done = invoke("generate", str(copy), "the")
    assert done.exit_code == 2
    assert "has neither a model nor a checkpoint yet" in done.stderr


def test_a_model_elsewhere_needs_its_own_files(invoke, runs, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(runs[0] / "runs" / "lm" / "model", copy)
    assert invoke("generate", str(copy), "the", "-n", "5").exit_code == 0
    done = invoke("evaluate", str(copy))
    assert "so say which data to score it on" in done.stderr
    file = tmp_path / "a.txt"
    file.write_text("the line\n" * 9)
    done = invoke("evaluate", str(copy), "--data", str(file))
    assert done.exit_code == 0, done.output
    assert "saved in" not in done.output
    for path in copy.glob("*token*"):
        path.unlink()
    done = invoke("generate", str(copy), "the")
    assert (done.exit_code, "has no tokenizer" in done.stderr) == (2, True)
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    done = invoke("generate", str(copy), "the")
    assert (done.exit_code, "cannot be loaded" in done.stderr) == (2, True)


def test_an_image_processor_beside_the_weights_is_used(runs, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(runs[0] / "runs" / "vision" / "model", copy)
    processor = {"image_mean": [0.25], "image_std": [0.5]}
    (copy / "preprocessor_config.json").write_text(json.dumps(processor))
    look = use.load(copy, device="cpu").look
    assert (look.mean, look.std, look.image_size) == ((0.25,), (0.5,), 8)
    for wrong in ({}, {"image_mean": [0.1] * 3, "image_std": [1.0] * 3}):
        (copy / "preprocessor_config.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=r"image processor|channels"):
            use.load(copy)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "nowhere", "x"], "nowhere does not exist: give the folder of a run"),
        (["generate", "runs", "x"], "runs is a folder of runs (lm, translation, vision)"),
        (["generate", "text", "x"], "text holds neither a run nor a saved model"),
        (["generate", "text/numbers-test.txt", "x"], "is a file: give the folder"),
        (["generate", "runs/lm", " "], "the prompt is empty"),
        (["generate", "runs/lm", "x", "--temperature", "-1"], "temperature must be 0 or more"),
        (["generate", "runs/lm", "x", "--temperature", "nan"], "temperature must be 0 or more"),
        (["generate", "runs/lm", "x", "--top-p", "0"], "top_p must be above 0 and at most 1"),
        (["generate", "runs/lm", "x", "--top-k", "0"], "top_k must be a whole number from 1"),
        (["generate", "runs/lm", "x", "--tokens", "0"], "tokens must be a whole number from 1"),
        (["generate", "runs/lm", "x", "--device", "abacus"], "device 'abacus' cannot be used"),
        (["generate", "runs/vision", "x"], "runs/vision is an image classifier, not a language"),
        (["translate", "runs/lm", "x"], "it is used by: mercer generate runs/lm"),
        (["translate", "runs/translation", "x", "--beams", "0"], "beams must be a whole number"),
        (["classify", "runs/vision", "no.png"], "no.png does not exist"),
        (["classify", "runs/vision", "text"], "text is a folder: give its images"),
        (["classify", "runs/vision", "text/numbers-test.txt"], "is not an image that can be read"),
        (["evaluate", "runs/vision", "--split", "test"], "embedded has no test split"),
        (["evaluate", "runs/lm", "--split", "last"], "split must be one of train, valid, test"),
        (["evaluate", "runs/lm", "--data", "no.txt"], "'no.txt' does not exist"),
        (["evaluate", "runs/lm", "--data-option", "colum=1"], "did you mean 'column'?"),
        (["evaluate", "runs/lm", "--evaluate-by", "eye"], "evaluate_by must be one of"),
        (["evaluate", "runs/vision", "--split", "all"], "embedded comes in splits"),
    ],
)
def test_bad_input_is_one_sentence(arguments, message, invoke):
    done = invoke(*arguments, input="")
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.output


def test_bytes_that_are_no_text_are_named(invoke):
    done = invoke("translate", "runs/translation", input=b"Die Katze.\n\xff\n")
    assert done.exit_code == 2
    assert "line 2 of standard input is not UTF-8" in done.stderr


def test_ctrl_c_and_a_closed_pipe_end_it(invoke, monkeypatch, capsys):
    from mercer.cli.main import main

    def stopped(*arguments, **options):
        yield " and"
        raise KeyboardInterrupt

    monkeypatch.setattr(use, "generate", stopped)
    monkeypatch.setattr(sys, "argv", ["mercer", "generate", "runs/lm", "the"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 130
    out, err = capsys.readouterr()
    assert (out, err) == ("the and\n", "stopped\n")

    def closed(*arguments, **options):
        raise BrokenPipeError

    monkeypatch.setattr(use, "generate", closed)
    # Not the real one: it would close this process's own output.
    monkeypatch.setattr("os.dup2", lambda *handles: None)
    done = invoke("generate", "runs/lm", "the")
    assert (done.exit_code, done.output) == (141, "")


def test_a_model_that_recalls_is_scored_as_its_training_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {"vocabulary": 64, "pairs": [2], "held_out_pairs": [2, 4]}
    settings = Settings(
        task="recall", steps=2, batch=2, length=16, data_options=options, output="run",
        eval_items=20, device="cpu",
    )  # fmt: skip
    (command,) = next_steps("recall", settings, run(settings))
    cli = CliRunner(env={"COLUMNS": "200"})
    done = cli.invoke(app, [*command.split()[1:], "--device", "cpu"])
    assert done.exit_code == 0, done.output
    scores = json.loads((tmp_path / "run" / "evaluations" / "test" / "scores.json").read_text())
    for pairs in (2, 4):
        assert f"{pairs} pairs      {scores[f'accuracy_{pairs}']:.2%}" in done.output
    assert scores["accuracy"] == (scores["accuracy_2"] + scores["accuracy_4"]) / 2
    for arguments, message in (
        (["generate", "run", "The"], "run is a model that recalls values, not a language model"),
        (["evaluate", "run", "--data", "x.txt"], "draws its data and takes no data, got 'x.txt'"),
        (["evaluate", "run", "--split", "all"], "split must be valid or test, got 'all'"),
    ):
        done = cli.invoke(app, arguments)
        assert done.exit_code == 2
        assert message in done.output


def test_training_says_what_to_do_next(runs):
    place, found = runs
    tasks = {"lm": "generate", "translation": "translate", "vision": "classify"}
    for task, command in tasks.items():
        settings = Settings.read(place / "runs" / task / "config.json")
        first, second, third = next_steps(task, settings, found[task])
        assert third == f"mercer inspect {place}/runs/{task}"
        assert first.startswith(f"mercer {command} {place}/runs/{task} ")
        assert second.startswith(f"mercer evaluate {place}/runs/{task}")
        # The test split of the language model was scored at the end of its training.
        assert ("--split test" in second) == (task == "translation")
