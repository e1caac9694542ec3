"""What a task saves reads texts and images as its training did, with transformers alone."""

import pytest
import torch
from PIL import Image

pytest.importorskip("accelerate")

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

from mercer.train import Settings
from mercer.train.tasks import TASKS


def save(name, folder, **options):
    settings = Settings(task=name, cache=str(folder / "cache"), **options).resolve()
    task = TASKS[name](settings)
    torch.manual_seed(0)
    model = task.build().eval()
    task.save_model(model, model.state_dict(), folder / "model")
    if task.tokenizer is not None:
        task.tokenizer.save_pretrained(folder / "model")
    return task, model, folder / "model"


def test_a_saved_translator_translates_as_its_evaluation_does(tmp_path):
    task, model, folder = save("translation", tmp_path, tokenizer="bytes", beams=3)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pairs, items = task.pairs.split("valid"), task.pairs.encoded("valid")
    for n in range(5):
        source, target = pairs[n]
        assert tokenizer(source)["input_ids"] == items[n]["input_ids"].tolist()
        assert tokenizer(text_target=target)["input_ids"] == items[n]["labels"].tolist()
        assert tokenizer.decode(items[n]["labels"], skip_special_tokens=True) == target
    loaded = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert loaded.generation_config.num_beams == 3
    batch = task.collate([items[n] for n in range(2)])
    batch.pop("labels")
    options = {"max_new_tokens": 6, "do_sample": False}
    again = tokenizer([pairs[n][0] for n in range(2)], padding=True, return_tensors="pt")
    assert torch.equal(
        loaded.generate(**again, **options), model.generate(**batch, num_beams=3, **options)
    )


def test_a_saved_classifier_names_its_classes_and_reads_pixels_as_training(tmp_path):
    task, model, folder = save("vision", tmp_path)
    classify = pipeline("image-classification", model=str(folder))
    assert classify.model.config.label2id == {str(n): n for n in range(10)}
    item = task.images.valid[3]
    image = Image.fromarray(task.images.valid.pixels[3][..., 0])
    read = classify.image_processor(image, return_tensors="pt")["pixel_values"]
    assert torch.equal(read[0], item["pixel_values"])
    image.save(tmp_path / "digit.png")
    found = classify(str(tmp_path / "digit.png"), top_k=1)
    assert found[0]["label"] == str(int(model(item["pixel_values"][None]).logits.argmax()))


def test_names_of_classes_may_be_given_or_fewer_than_the_classes(tmp_path):
    task, _, _ = save("vision", tmp_path, overrides={"num_labels": 12})
    assert task.config().id2label == {n: str(n) if n < 10 else f"LABEL_{n}" for n in range(12)}
