"""What a run is made of: settings, the order of the data, checkpoints, the folder."""

import errno
import json
import os

import pytest
import torch

pytest.importorskip("accelerate")

from mercer.train import DiskFull, Settings, read_time
from mercer.train.checkpoints import Checkpoints, examine
from mercer.train.distributed import Team, Watch
from mercer.train.folder import Folder, read_journal
from mercer.train.order import Order, Stream
from mercer.train.progress import Reading
from mercer.train.state import capture_random, kept_random, restore_random, seed_all
from mercer.train.tasks import make


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"task": "speech"}, "task must be one of lm, translation, vision, recall, tagging, got"),
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16"),
        ({"device": "abacus"}, "device must be one of cpu, cuda"),
        ({"evaluate_by": "eye"}, "evaluate_by must be one of blocks, sliding, memory"),
        ({"steps": 0}, "steps must be a whole number from 1 on, got 0"),
        ({"batch": 2.5}, "batch must be a whole number"),
        ({"learning_rate": -1.0}, "learning_rate must be above 0, got -1.0"),
        ({"clip": float("nan")}, "clip must be above 0"),
        ({"floor": 2.0}, "floor must be from 0 to 1"),
        ({"time": 60.0, "warmup": 10.0}, "warmup must be from 0 to 1"),
        ({"seed": -1}, "seed must be a whole number from 0 on"),
        ({"batch": 6, "accumulate": 4}, "batch must be a multiple of accumulate"),
        ({"resume": True}, "resume needs output, the folder of the run"),
        ({"task": "recall", "data": "a.txt"}, "recall draws its data and takes no data"),
        ({"task": "recall", "tokenizer": "bytes"}, "recall draws its data and takes no tokenizer"),
    ],
)
def test_mistakes_are_found_before_anything_is_loaded(given, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        Settings(**given).resolve()


def test_settings_are_filled_once_and_read_back(tmp_path):
    settings = Settings(kernel="RBF(2.0)", system_options={"memory": 8}, overrides={"d_model": 32})
    settings = settings.resolve()
    assert settings.steps == 300
    assert settings.token_rate == 5e-3
    assert settings.resolve() == settings
    (tmp_path / "config.json").write_text(settings.as_json())
    assert Settings.read(tmp_path / "config.json") == settings
    with pytest.raises(ValueError, match="cannot be read as the settings"):
        Settings.read(tmp_path / "nothing.json")
    assert Settings(time=60.0).resolve().steps is None


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("1h30m", 5400), ("0.5s", 0.5)]
)
def test_time_is_read(text, seconds):
    assert read_time(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "10 apples", "-5m"])
def test_a_wrong_time_is_refused(text):
    with pytest.raises(ValueError, match="time must be such as"):
        read_time(text)


def positions(**how):
    """The positions of each step, as a set, from all processes together."""
    count = how.pop("processes", 1)
    orders = [Order(batch=24, steps=5, rank=r, processes=count, **how) for r in range(count)]
    rows = [list(order) for order in orders]
    parts = len(rows[0]) // 5
    return [
        sorted(p for row in rows for part in row[step * parts : (step + 1) * parts] for p in part)
        for step in range(5)
    ]


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_a_step_sees_the_same_however_it_is_shared(processes, accumulate):
    want = [list(range(24 * step, 24 * (step + 1))) for step in range(5)]
    assert positions(processes=processes, accumulate=accumulate) == want


def test_an_order_starts_anywhere():
    order = Order(batch=4, steps=6, accumulate=2)
    whole = list(order)
    order.start = 4
    assert list(order) == whole[8:]
    assert len(order) == 12
    with pytest.raises(ValueError, match="batch must be a multiple of accumulate x processes"):
        Order(batch=4, steps=1, processes=3)


def test_every_pass_over_the_data_is_shuffled_anew():
    class Items(list):
        def set_epoch(self, number):
            self.number = number

    items = Items(range(7))
    stream = Stream(items, seed=3)
    passes = [[stream[7 * n + place] for place in range(7)] for n in range(3)]
    assert all(sorted(one) == list(range(7)) for one in passes)
    assert passes[0] != passes[1] != passes[2]
    assert items.number == 2
    assert [Stream(items, seed=3)[p] for p in (20, 0, 9)] == [stream[p] for p in (20, 0, 9)]
    assert [Stream(items, seed=4)[p] for p in range(7)] != passes[0]
    with pytest.raises(ValueError, match="nothing to train on"):
        Stream([], seed=0)


def test_batches_have_items_of_similar_length():
    items = list(range(1003))

    class Items(list):
        lengths = torch.randint(1, 40, (1003,), generator=torch.Generator().manual_seed(0))

    batch, batches = 8, 3 * 1003 // 8
    stream, plain = Stream(Items(items), seed=3, batch=batch), Stream(items, seed=3, batch=batch)
    drawn = [stream[p] for p in range(batches * batch)]
    for number in range(2):
        assert sorted(drawn[1003 * number : 1003 * (number + 1)]) == items

    def padding(stream):
        lengths = Items.lengths[[stream[p] for p in range(batches * batch)]].view(-1, batch)
        return float((lengths.amax(1, keepdim=True) - lengths).sum() / lengths.sum())

    # Every pass is cut where steps are, though its number of items is no multiple of the batch.
    assert padding(stream) < 0.1 < 0.7 < padding(plain)
    # Batches of a length are not side by side, and a pass is no copy of another.
    longest = Items.lengths[drawn].view(-1, batch).amax(1).double()
    assert abs(float(torch.corrcoef(torch.stack([longest[:-1], longest[1:]]))[0, 1])) < 0.2
    assert drawn[:1003] != drawn[1003:2006]
    # A stream that is read from the middle gives the same items.
    again = Stream(Items(items), seed=3, batch=batch)
    assert [again[p] for p in (2500, 17, 1100)] == [drawn[p] for p in (2500, 17, 1100)]


def test_fewer_items_than_a_batch():
    class Items(list):
        lengths = (3, 1, 2)

    stream = Stream(Items("abc"), seed=0, batch=8)
    assert sorted(stream[p] for p in range(3)) == ["a", "b", "c"]


def fill(text="weights"):
    def write(path):
        (path / "model.bin").write_text(text)
        (path / "state.json").write_text("{}")

    return write


def test_checkpoints_keep_the_last_few(tmp_path):
    store = Checkpoints(tmp_path / "checkpoints", keep=2)
    for step in (5, 10, 15):
        store.save(step, fill())
    assert [p.name for p in store.steps()] == ["step-00000010", "step-00000015"]
    assert store.latest(print).name == "step-00000015"
    assert Checkpoints(tmp_path / "none", keep=1).latest(print) is None


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (
            lambda p: (p / "model.bin").write_text("weight5"),
            "model.bin does not match its checksum",
        ),
        (lambda p: (p / "model.bin").write_text("short"), "model.bin has 5 bytes, not 7"),
        (lambda p: (p / "model.bin").unlink(), "model.bin is missing"),
        (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda p: (p / "manifest.json").write_text('{"files"'), "manifest.json cannot be read"),
        (lambda p: (p / "manifest.json").write_text("[]"), "manifest.json cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(spoil, word, tmp_path):
    store = Checkpoints(tmp_path, keep=3)
    store.save(1, fill())
    spoil(store.save(2, fill()))
    said = []
    assert store.latest(said.append).name == "step-00000001"
    assert "step-00000002 is damaged" in said[0]
    assert word in said[0]
    # Written anew, it is whole again; others that are damaged go.
    store.save(2, fill())
    assert all(examine(path) is None for path in store.steps())
    for path in store.steps():
        spoil(path)
    with pytest.raises(ValueError, match=r"all checkpoints in .* are damaged"):
        store.latest(said.append)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_leaves_what_was_there(error, tmp_path):
    store = Checkpoints(tmp_path, keep=1)
    store.save(1, fill())

    def fails(path):
        (path / "model.bin").write_text("half")
        raise error

    with pytest.raises(DiskFull, match="no room for the checkpoint of step 2; step-00000001"):
        store.save(2, fails)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert examine(tmp_path / "step-00000001") is None

    def breaks(path):
        raise KeyError("ours")

    with pytest.raises(KeyError):
        store.save(2, breaks)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_a_crash_before_the_rename_leaves_no_checkpoint(tmp_path, monkeypatch):
    """The process dies between the last write and the rename."""
    store = Checkpoints(tmp_path, keep=2)
    store.save(1, fill())

    class Killed(BaseException):
        pass

    def die(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", die)
        patch.setattr("shutil.rmtree", lambda *a, **k: None)
        with pytest.raises(Killed):
            store.save(2, fill())
    assert store.latest(print).name == "step-00000001"
    store.sweep()
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_a_folder_holds_one_run(tmp_path):
    settings = Settings(output=str(tmp_path / "run"), steps=4).resolve()
    folder = Folder(tmp_path / "run")
    assert folder.open(settings) == settings
    # A run that failed before it began leaves no trace.
    folder.close()
    assert not (tmp_path / "run").exists()
    assert folder.open(settings) == settings
    folder.begin(settings, {})
    with pytest.raises(ValueError, match="another process is training in"):
        Folder(tmp_path / "run").open(settings)
    folder.close()
    with pytest.raises(ValueError, match="holds a run already: continue it with --resume"):
        Folder(tmp_path / "run").open(settings)
    other = Settings(output=str(tmp_path / "run"), steps=5, seed=1, resume=True, keep=9).resolve()
    with pytest.raises(ValueError, match=r"steps was 4, now 5; seed was 0, now 1\. Leave"):
        Folder(tmp_path / "run").open(other)
    fewer = Settings(output=str(tmp_path / "run"), steps=3, resume=True).resolve()
    with pytest.raises(ValueError, match="has 4 steps: --steps may be more on --resume, but not"):
        Folder(tmp_path / "run").open(fewer)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="is not empty and holds no run"):
        Folder(tmp_path / "mine").open(settings)


def test_a_journal_is_rewound(tmp_path):
    folder = Folder(tmp_path)
    for step in range(1, 6):
        folder.note({"step": step, "loss": float("nan") if step == 2 else 0.5})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "lo')
    again = Folder(tmp_path)
    again.rewind(3)
    assert [r["step"] for r in again.history] == [1, 2, 3]
    assert read_journal(tmp_path) == again.history
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])["loss"] is None


def test_random_numbers_come_back():
    seed_all(7, 1)
    with kept_random():
        torch.rand(3)
    state = json.loads(json.dumps(capture_random()))
    want = torch.rand(4)
    restore_random(state)
    assert torch.equal(torch.rand(4), want)
    seed_all(7, 1)
    assert torch.equal(torch.rand(4), want)
    seed_all(7, 0)
    assert not torch.equal(torch.rand(4), want)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_watch_tells_the_first_bad_step(lag):
    watch = Watch(Team(torch.device("cpu")))
    watch.lag = lag
    one, bad = torch.ones(()), torch.tensor(float("inf"))
    seen = []
    for step, (loss, norm) in enumerate([(one, one), (one, bad), (bad, one)], 1):
        watch.post(step, loss, norm, 15 if step == 3 else 0, step / 2)
        seen.append([row[:3] for row in watch.read()])
    assert sum(map(len, seen)) == 3 - lag
    seen.append([row[:3] for row in watch.read(everything=True)])
    assert [row for rows in seen for row in rows] == [(1, False, 0), (2, True, 0), (3, True, 15)]


def test_work_is_dealt_evenly():
    for size in (1, 2, 3):
        hands = [list(Team(torch.device("cpu"), rank, size).deal(10, 3)) for rank in range(size)]
        assert len({len(hand) for hand in hands}) == 1
        counted = [n for hand in hands for numbers, counts in hand if counts for n in numbers]
        assert sorted(counted) == list(range(10))


def test_data_that_take_long_to_read_are_noted(tmp_path):
    file, heard, notes = tmp_path / "a.txt", [], []
    file.write_text("one word after another\n\n" * 300)
    settings = Settings(data=str(file), tokenizer="bytes", cache=str(tmp_path), length=16)
    make(settings.resolve(), tell=lambda what, share: heard.append((what, share)))
    assert ("tokenising train", 1.0) in heard
    patient = Reading(notes.append, 10, every=1000.0)
    patient("reading a.tar", 0.5)
    assert notes == []
    hasty = Reading(notes.append, 10, every=0.0)
    hasty("reading a.tar", 0.5)
    assert [note.note for note in notes] == ["reading a.tar: 50%"]
    # Processes besides the main one say nothing.
    Reading(None, 10, every=0.0)("reading a.tar", 0.5)
