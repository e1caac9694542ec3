"""Images: digits, class folders and archives, in one size, with errors that name the file."""

import io
import pickle
import tarfile

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from mercer import data
from mercer.data import folders

pillow = pytest.importorskip("PIL.Image")


def picture(shade, size=(8, 8), mode="RGB", kind="PNG"):
    """The bytes of an image file of one colour."""
    file = io.BytesIO()
    pillow.new(mode, size, shade).save(file, kind)
    return file.getvalue()


def content(split="train/", count=4, **options):
    """Names and bytes of a few images in two classes."""
    return {
        f"{split}{name}/{n}.png": picture((value + n, value, 0), **options)
        for name, value in (("dog", 100), ("cat", 10))
        for n in range(count)
    }


def spread(folder, files):
    for name, some in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(some)
    return folder


def bundle(path, files):
    with tarfile.open(path, "w:xz") as archive:
        for name, some in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(some)
            archive.addfile(entry, io.BytesIO(some))
    return path


def test_digits():
    pytest.importorskip("sklearn")
    found = data.images("embedded")
    assert (found.num_classes, found.image_size, found.channels) == (10, 8, 1)
    assert (len(found.train), len(found.valid)) == (1437, 360)
    assert found.class_names == tuple("0123456789")
    item = found.train[0]
    assert item["pixel_values"].shape == (1, 8, 8)
    assert item["pixel_values"].dtype == torch.float32
    assert item["labels"] == 0
    assert type(item["labels"]) is int
    values = torch.stack([found.train[n]["pixel_values"] for n in range(len(found.train))])
    assert abs(values.mean()) < 1e-4
    assert abs(values.std() - 1) < 1e-2
    large = data.images("embedded", size=16, channels=3)
    assert large.train[0]["pixel_values"].shape == (3, 16, 16)


@pytest.mark.parametrize("packed", [False, True], ids=["folder", "archive"])
def test_class_folders(packed, tmp_path):
    files = {**content(), **content("test/", 2), "README.md": b"about"}
    path = bundle(tmp_path / "a.tar.xz", files) if packed else spread(tmp_path / "a", files)
    for _ in range(2):
        found = data.images(path, cache_dir=tmp_path / "cache")
        assert found.class_names == ("cat", "dog")
        assert (found.image_size, found.channels) == (8, 3)
        assert sorted(found.train.labels.tolist()) == [0] * 4 + [1] * 4
        assert len(found.valid) == 4
        shades = set()
        for n in range(8):
            item = found.train[n]
            mean, std = torch.tensor(found.mean), torch.tensor(found.std)
            pixel = (item["pixel_values"][:, 0, 0] * std + mean) * 255
            assert pixel[1].round() == (100 if item["labels"] == 1 else 10)
            shades.add(int(pixel[0].round()))
        assert shades == {100, 101, 102, 103, 10, 11, 12, 13}
    with pytest.raises(IndexError):
        found.train[8]


def test_a_folder_of_the_layout_has_one_archive(tmp_path):
    (tmp_path / "vision").mkdir()
    bundle(
        tmp_path / "vision" / "a.tar.xz", {**content(), **content("val/"), **content("test/", 1)}
    )
    for source in (tmp_path, tmp_path / "vision"):
        found = data.images(source, cache_dir=tmp_path / "cache")
        # valid before test
        assert len(found.valid) == 8
    bundle(tmp_path / "vision" / "b.tar.xz", content())
    with pytest.raises(data.DataError, match=r"several archives \(a.tar.xz, b.tar.xz\)"):
        data.images(tmp_path, cache_dir=tmp_path / "cache")


def test_without_splits_the_end_of_every_class_is_held_out(tmp_path):
    spread(tmp_path / "a", content("", 20))
    found = data.images(tmp_path / "a")
    assert (len(found.train), len(found.valid)) == (36, 4)
    assert sorted(found.valid.labels.tolist()) == [0, 0, 1, 1]


def test_size_and_channels(tmp_path):
    spread(tmp_path / "a", {**content(size=(20, 10)), **content("valid/", size=(9, 9))})
    with pytest.raises(data.DataError, match=r"cat/0.png is 20x10, not a square: give a size"):
        data.images(tmp_path / "a")
    found = data.images(tmp_path / "a", size=6, channels=1)
    assert found.train[0]["pixel_values"].shape == (1, 6, 6)
    assert found.valid[0]["pixel_values"].shape == (1, 6, 6)
    spread(tmp_path / "b", {**content(), **content("valid/", size=(9, 9))})
    with pytest.raises(data.DataError, match=r"valid.cat.0.png is 9x9x3 and the first image 8x8x3"):
        data.images(tmp_path / "b").valid[0]


BROKEN = {
    "cut": (picture(1, size=(64, 64), kind="BMP")[:200], "is not an image that can be read"),
    "text": (b"not an image", "is not an image that can be read"),
    "empty": (b"", "is empty"),
    "too large": (picture(0, (14_000, 14_000), "1"), "is not an image that can be read .*bomb"),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("packed", [False, True], ids=["folder", "archive"])
def test_broken_images_are_named(case, packed, tmp_path):
    some, message = BROKEN[case]
    files = {**content(), **content("test/"), "train/cat/x.png": some}
    path = bundle(tmp_path / "a.tar.xz", files) if packed else spread(tmp_path / "a", files)

    def look():
        found = data.images(path, cache_dir=tmp_path / "cache")
        return [found.train[n] for n in range(len(found.train))]

    with pytest.raises(data.DataError, match=rf"train.cat.x\.png {message}"):
        look()
    assert not list((tmp_path / "cache").glob("*.arr"))


def test_missing_data_gives_an_error(tmp_path):
    (tmp_path / "none").mkdir()
    with pytest.raises(data.DataError, match="holds no images in class folders"):
        data.images(tmp_path / "none")
    with pytest.raises(data.DataError, match="holds no images in class folders"):
        data.images(bundle(tmp_path / "a.tar.xz", {"a.txt": b"x"}), cache_dir=tmp_path)
    with pytest.raises(data.DataError, match="must have images for training and validation"):
        data.images(spread(tmp_path / "train-only", content()))
    with pytest.raises(data.DataError, match="the class 'bird' has no image for training"):
        data.images(spread(tmp_path / "b", {**content(), "test/bird/1.png": picture(1)}))
    with pytest.raises(data.DataError, match="must be a folder or an archive"):
        data.images(tmp_path / "b" / "test" / "bird" / "1.png")
    with pytest.raises(ValueError, match="augment must be of"):
        data.images("embedded", augment=("spin",))
    with pytest.raises(ValueError, match="channels must be 1 or 3"):
        data.images("embedded", channels=2)


def test_crops_and_flips_follow_seed_epoch_and_item(tmp_path):
    random = np.random.default_rng(0)
    files = {}
    for name in [*content(), *content("test/")]:
        file = io.BytesIO()
        pillow.fromarray(random.integers(0, 256, (16, 16, 3), np.uint8)).save(file, "PNG")
        files[name] = file.getvalue()
    path = spread(tmp_path / "a", files)

    def take(seed=0, epoch=0):
        found = data.images(path, augment=("crop", "flip"), seed=seed)
        found.train.set_epoch(epoch)
        return torch.stack([found.train[n]["pixel_values"] for n in range(8)])

    assert take().shape == (8, 3, 16, 16)
    assert torch.equal(take(), take())
    assert not torch.equal(take(), take(epoch=1))
    assert not torch.equal(take(), take(seed=1))
    found = data.images(path, augment=("crop", "flip"))
    assert torch.equal(found.valid[0]["pixel_values"], data.images(path).valid[0]["pixel_values"])


def test_an_archive_travels_to_a_worker_without_its_pixels(tmp_path):
    path = bundle(tmp_path / "a.tar.xz", {**content(count=50), **content("test/")})
    found = data.images(path, cache_dir=tmp_path / "cache").train
    packed = pickle.dumps(found)
    assert len(packed) < 6000
    again = pickle.loads(packed)
    assert torch.equal(again[9]["pixel_values"], found[9]["pixel_values"])


def test_names_in_an_archive_are_never_used_as_paths():
    assert folders.find_class("a/train/cat/1.JPG") == ("train", "cat")
    assert folders.find_class("val/x/cat/1.png") == ("valid", "cat")
    assert folders.find_class("cat/1.png") == ("all", "cat")
    assert folders.find_class("1.png") is None
    assert folders.find_class("train/1.png") is None
    assert folders.find_class("train/test/1.png") == ("train", "test")
    assert folders.find_class("train/cat/.hidden.png") is None
    assert folders.find_class("../../train/cat/1.png") == ("train", "cat")
