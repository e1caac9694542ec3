"""A finished run that gets more steps, and a run that starts from the weights of another."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

pytest.importorskip("accelerate")

from mercer.cli.train import app
from mercer.models import presets
from mercer.studies import Study
from mercer.train import Settings, run
from mercer.train.folder import read_journal
from mercer.train.initial import digest, find_weights


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Settings of a run of a fraction of a second."""
    place = tmp_path_factory.mktemp("place")
    lines = (f"line {n} has the number {n * n % 97} and no other\n" for n in range(600))
    (place / "small.txt").write_text("".join(lines))
    return {
        "data": str(place / "small.txt"), "tokenizer": "bytes", "cache": str(place), "batch": 4,
        "length": 32, "steps": 4, "eval_items": 100, "samples": False, "log_every": 1,
    }  # fmt: skip


@pytest.fixture(scope="module")
def trained(small, tmp_path_factory):
    """The folder of a run that has ended."""
    path = tmp_path_factory.mktemp("trained") / "run"
    assert run(Settings(**small, output=str(path))).status == "done"
    return path


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


def rates(path):
    return {x["step"]: x["learning_rate"] for x in read_journal(path) if "loss" in x}


# More steps.


def test_a_finished_run_gets_more_steps(small, tmp_path):
    path = tmp_path / "run"
    run(Settings(**small, output=str(path)))
    short = read_journal(path)
    said = []
    longer = {**small, "steps": 10, "output": str(path), "resume": True}
    result = run(Settings(**longer), say=said.append)
    assert (result.status, result.steps) == ("done", 10)
    assert "the run had 4 steps and now has 10: from here on the learning rate follows" in said[1]
    # The first steps stay as they were, with their last evaluation.
    journal = read_journal(path)
    assert journal[: len(short)] == short
    assert {"step": 4, "steps_before": 4, "steps": 10} in journal
    config = json.loads((path / "config.json").read_text())
    assert (config["steps"], config["grown_from"]) == (10, 4)
    assert json.loads((path / "result-4.json").read_text())["steps"] == 4
    assert json.loads((path / "result.json").read_text())["steps"] == 10
    # The schedule is that of the new length from the first new step on.
    whole = tmp_path / "whole"
    run(Settings(**{**small, "steps": 10}, output=str(whole)))
    found, want = rates(path), rates(whole)
    assert list(found) == list(range(1, 11))
    assert [found[step] for step in range(5, 11)] == [want[step] for step in range(5, 11)]
    assert found[4] < want[4]
    # Steps see the data of a run that was as long from the start.
    assert [x["tokens"] for x in journal if "loss" in x] == [128 * n for n in range(1, 11)]
    # Again, it has ended.
    run(Settings(**longer), say=said.append)
    assert "has ended before: done" in said[-1]


@pytest.mark.parametrize("save_every", [1, 100])
def test_an_extended_run_that_is_stopped_resumes_to_the_same_bits(save_every, small, tmp_path):
    small = {**small, "overrides": {"dropout": 0.1}, "save_every": save_every}
    longer = {**small, "steps": 9, "resume": True}
    ends = []
    for name, stops in (("once", False), ("twice", True)):
        path = tmp_path / name
        run(Settings(**small, output=str(path)))

        def interrupt(progress, stops=stops):
            if stops and progress.step == 6:
                raise KeyboardInterrupt

        settings = Settings(**longer, output=str(path))
        if stops:
            with pytest.raises(KeyboardInterrupt):
                run(settings, interrupt)
        run(settings)
        lines = [
            {n: x for n, x in line.items() if n not in ("seconds", "tokens_per_second")}
            for line in read_journal(path)
        ]
        ends.append((weights(path), lines))
    (first, lines), (second, again) = ends
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert lines == again


def test_a_run_cannot_get_fewer_steps_or_other_settings(small, trained):
    settings = {**small, "output": str(trained), "resume": True}
    for given, message in (
        ({"steps": 3}, "has 4 steps: --steps may be more on --resume, but not fewer, got 3"),
        ({"steps": 8, "seed": 1}, "cannot go on with other settings: steps was 4, now 8; seed"),
        ({"steps": None, "time": 5.0}, "cannot go on with other settings"),
    ):
        with pytest.raises(ValueError, match=message):
            run(Settings(**{**settings, **given}))
    assert json.loads((trained / "config.json").read_text())["steps"] == 4


def test_a_run_of_a_preset_that_has_changed_since_cannot_go_on(small, trained, monkeypatch):
    """Its model would be another; the sentence names the fields."""
    monkeypatch.setitem(presets.LM, "tiny", presets.LM["tiny"] | {"activation": "relu"})
    settings = Settings(**{**small, "steps": 6}, output=str(trained), resume=True)
    changed = r"its preset has changed since \(activation was 'gelu', now 'relu'\)"
    with pytest.raises(ValueError, match=changed):
        run(settings)


def test_a_run_without_checkpoints_is_not_extended(small, tmp_path):
    path = tmp_path / "run"
    run(Settings(**small, output=str(path)))
    for file in (path / "checkpoints").glob("step-*/*"):
        file.unlink()
    for folder in (path / "checkpoints").glob("step-*"):
        folder.rmdir()
    with pytest.raises(ValueError, match="has no checkpoint to go on from"):
        run(Settings(**{**small, "steps": 6}, output=str(path), resume=True))
    assert (path / "result.json").exists()


def test_the_command_extends(small, trained, tmp_path, monkeypatch):
    import shutil

    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, "run")
    done = CliRunner().invoke(app, ["lm", "--output", "run", "--resume", "--steps", "6"])
    assert done.exit_code == 0, done.output
    assert "done: 6 steps" in done.output


# Initial weights.


def test_a_run_starts_from_the_weights_of_another(small, trained, tmp_path):
    said = []
    # A rate of almost 0, so that a step leaves the weights as they were.
    still = {**small, "steps": 1, "learning_rate": 1e-12, "weight_decay": 0.0, "seed": 3}
    for init in (trained, trained / "model", trained / "checkpoints" / "step-00000004"):
        path = tmp_path / init.name
        result = run(Settings(**still, init=str(init), output=str(path)), say=said.append)
        assert result.status == "done"
        first, second = weights(trained), weights(path)
        assert all(torch.allclose(first[name], second[name], atol=1e-6) for name in first)
    assert said == []
    fresh = run(Settings(**still))
    assert fresh.metrics["eval_loss"] > result.metrics["eval_loss"] + 0.1


def test_kernels_may_differ_and_it_is_said(small, trained, tmp_path):
    said = []
    path = tmp_path / "run"
    once = {**small, "steps": 1}
    gaussian = {"system": "vaswani2017", "system_options": {"kernel": "RBF(heads=2)"}}
    run(Settings(**once, **gaussian, init=str(trained), output=str(path)), say=said.append)
    assert "so they start as usual: blocks.0.attention.kernel" in said[0]
    assert "log_bandwidth" in said[0]
    said.clear()
    run(Settings(**once, init=str(path)), say=said.append)
    assert "in this model, so they are left out: blocks.0.attention.kernel" in said[0]
    said.clear()
    run(Settings(**once, system="leng2026", init=str(trained)), say=said.append)
    assert "token_kernels.weight" in said[0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"overrides": {"d_model": 32}}, r"the shape \[257, 32\] here and \[257, 64\] in "),
        ({"overrides": {"num_layers": 3}}, r"lacks the tensor 'blocks\.2\."),
        ({"overrides": {"num_layers": 1}}, r"has the tensor 'blocks\.1\..*does not have"),
        ({"tokenizer": "bpe:300"}, "differs from that of the model: give --tokenizer"),
        ({"system": "kundu2026"}, "has the tensor 'blocks.0.attention"),
    ],
)
def test_other_shapes_are_refused(given, message, small, trained):
    with pytest.raises(ValueError, match=message):
        run(Settings(**{**small, **given, "init": str(trained)}))


def test_what_is_no_model_is_refused(small, tmp_path):
    with pytest.raises(ValueError, match="but there is no folder"):
        run(Settings(**small, init=str(tmp_path / "nowhere")))
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        run(Settings(**small, init=str(tmp_path)))
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ValueError, match="cannot be read as weights"):
        run(Settings(**small, init=str(tmp_path)))


def test_weights_in_several_files(small, trained, tmp_path):
    found = weights(trained)
    names = sorted(found)
    half = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, some in half.items():
        save_file({name: found[name] for name in some}, tmp_path / file)
    index = {"weight_map": {name: file for file, some in half.items() for name in some}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [path.name for path in find_weights(str(tmp_path))] == list(half)
    assert run(Settings(**{**small, "steps": 1}, init=str(tmp_path))).status == "done"
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match="cannot be read as an index of weights"):
        find_weights(str(tmp_path))


def test_the_key_of_a_job_depends_on_the_weights(trained, tmp_path):
    def key(init):
        budget = {"steps": 4} | ({} if init is None else {"init": str(init)})
        return Study(systems=["vaswani2017"], budget=budget, seeds=(0,)).jobs()[0].key

    copy = tmp_path / "copy"
    copy.mkdir()
    save_file(weights(trained), copy / "model.safetensors", {"format": "pt"})
    assert digest(str(trained)) == digest(str(trained / "model")) == digest(str(copy))
    assert key(trained) == key(copy) != key(None)
    changed = weights(trained)
    changed["norm.weight"] += 1
    save_file(changed, copy / "model.safetensors", {"format": "pt"})
    assert key(copy) != key(trained)
    with pytest.raises(ValueError, match="there is no folder"):
        key(tmp_path / "nowhere")
