"""The task of vision transformers: classify images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ... import data, models
from ...models import presets
from .. import evaluate
from ..distributed import Team
from ..scores import Answers, one_line
from ..settings import Settings
from .task import Task, Tell, check_least, shorten_hash


class Vision(Task):
    """Classify images."""

    unit = "patches"
    noun = judged = "images"

    def __init__(
        self,
        settings: Settings,
        *,
        split: str | None = None,
        like: Any = None,
        sketch: bool = False,
        tell: Tell | None = None,
    ) -> None:
        super().__init__(settings, split=split, tell=tell)
        size = settings.overrides.get("image_size")
        given = {} if size is None or "size" in settings.data_options else {"size": size}
        self.images = self.read(data.images, look=like, **given)
        self.source = self.images.source
        self.train, self.valid = self.images.train, self.images.valid
        self.patches = 1

    @property
    def like(self) -> Any:
        return self.images.look

    def fingerprint(self) -> str | None:
        """Of all classes, and of some images: reading all would take long."""
        found: list[object] = []
        for part in (self.images.train, self.images.valid):
            found.append(part.labels.tolist())
            some = range(0, len(part), max(1, len(part) // 64))
            found += [np.asarray(part.pixels[n]).tobytes().hex() for n in some]
        return shorten_hash(*found)

    def sequence_length(self, config: Any) -> int:
        return int((config.image_size // config.patch_size) ** 2)

    def config(self) -> Any:
        images = self.images
        shape = {
            "num_labels": images.num_classes,
            "image_size": images.image_size,
            "num_channels": images.channels,
        }
        check_least("num_labels", self.settings, images.num_classes, "classes of the data")
        config: Any = presets.vit(self.settings.preset, **(shape | self.parts()))
        if "id2label" not in self.settings.overrides:
            # More labels than classes keep the names that transformers gives them.
            named: dict[int, str] = {**config.id2label, **dict(enumerate(images.class_names))}
            config.id2label, config.label2id = named, {name: n for n, name in named.items()}
        return config

    def build(self) -> Any:
        config = self.config()
        self.patches = self.sequence_length(config)
        return models.KernelViT(config)

    def save_model(self, model: Any, weights: dict[str, Tensor], path: Path) -> None:
        """The same, with the image processor: size, mean and deviation of the training."""
        super().save_model(model, weights, path)
        images = self.images
        models.KernelImageProcessor(
            size=images.image_size,
            num_channels=images.channels,
            image_mean=images.mean,
            image_std=images.std,
        ).save_pretrained(path)

    def count_tokens(self, inputs: dict[str, Any]) -> int | Tensor:
        return inputs["pixel_values"].shape[0] * self.patches

    def evaluate(
        self, model: Any, team: Team, *, final: bool, items: int | None = None
    ) -> dict[str, Any]:
        """The mean loss and the top-1 accuracy."""
        settings, valid = self.settings, self._spread(self.valid, items)
        assert settings.batch is not None

        def right(outputs: Any, inputs: dict[str, Any]) -> Tensor:
            hits: Tensor = outputs.logits.argmax(-1).eq(inputs["labels"]).sum()
            return hits

        chosen: dict[int, int] = {}

        def note(numbers: list[int], outputs: Any) -> None:
            chosen.update(zip(numbers, outputs.logits.argmax(-1).tolist(), strict=True))

        loss, targets, hits = evaluate.mean_loss(
            model, valid, len(valid), collate=self.collate, team=team, look=right,
            batch=max(1, settings.batch // (settings.accumulate * team.size)),
            targets=self.count_targets, precision=self.precision, note=note if final else None,
        )  # fmt: skip
        if final:
            self.answers = self._answer(evaluate.gather(chosen, team))
        return {"eval_loss": loss / targets, "accuracy": hits / targets}

    def _answer(self, chosen: dict[int, int]) -> Answers:
        """The class of each image beside the right one."""
        names, valid = self.images.class_names, self.images.valid
        paths = getattr(valid.pixels, "paths", None)
        rows = [("image", "class", "predicted")]
        for n in sorted(chosen):
            image = str(n) if paths is None else str(paths[n])
            rows.append((image, names[int(valid.labels[n])], names[chosen[n]]))
        lines = ["\t".join(one_line(cell) for cell in row) for row in rows]
        return Answers(name="predictions.tsv", lines=lines)
