"""The task of language models of transformers: go on from their weights, with other attention."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from ... import parse
from ...nn import TokenKernels
from ..pretrained import AS_SOFTMAX, weights_of
from ..settings import Settings
from .language import LanguageModel
from .task import Tell

# The share of the steps after which the kernel is RBF; in the rest the model settles.
PATH = 0.8


class Pretrained(LanguageModel):
    """Predict the next token, from a trained model on."""

    def __init__(
        self,
        settings: Settings,
        *,
        split: str | None = None,
        like: Any = None,
        sketch: bool = False,
        tell: Tell | None = None,
    ) -> None:
        if settings.kernel is not None:
            # A mistake is found before anything is loaded.
            parse.kernel(str(settings.kernel), settings.trust_kernels)
        self.settings = settings
        if like is None:
            # First, so that a wrong name is an error at once.
            self.model_config = self.source_of_model.read_config()
            if settings.tokenizer is None:
                like = self.source_of_model.read_tokenizer()
        super().__init__(settings, split=split, like=like, sketch=sketch, tell=tell)

    @functools.cached_property
    def source_of_model(self) -> Any:
        from ...integrations.hf.source import Source

        assert self.settings.init is not None
        return Source(weights_of(self.settings.init))

    def config(self) -> Any:
        config, init = self.model_config, self.settings.init
        vocabulary = getattr(config, "vocab_size", None)
        if vocabulary is not None and len(self.tokenizer) > vocabulary:
            raise ValueError(
                f"the tokenizer has {len(self.tokenizer)} tokens, but {init} has {vocabulary}: it "
                "belongs to another model"
            )
        places = getattr(config, "max_position_embeddings", None)
        if places is not None and self.length > places:
            raise ValueError(f"length must be at most {places}, the places of {init}, got "
                             f"{self.length}")  # fmt: skip
        return config

    def build(self) -> Any:
        model = self.source_of_model.read_model(
            self.config(), trust_kernels=self.settings.trust_kernels
        )
        return self.patch(model)

    def patch(self, model: Any) -> Any:
        """The attention that the settings ask for; without any, the model as it is."""
        from ...integrations import hf

        settings = self.settings
        tokens = None
        if settings.token_kernels is not None:
            tokens = TokenKernels.like(model, **parse.token_kernels(settings.token_kernels))
        if settings.kernel is None and tokens is None:
            return model
        return hf.patch(
            model, settings.kernel, token_kernels=tokens, trust_kernels=settings.trust_kernels,
            **settings.system_options,
        )  # fmt: skip

    def count(self, model: Any = None) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        from ...integrations.hf.count import count

        if model is None:
            with torch.device("meta"):
                model = self.patch(AutoModelForCausalLM.from_config(self.config()))
        return count(model, self.length)

    def resume(self, model: Any, checkpoint: Path) -> None:
        from ...integrations.hf.source import Source

        source = Source(str(checkpoint))
        config = source.read_config()
        here, there = (getattr(c, "mercer", None) for c in (model.config, config))
        if here != there:
            raise ValueError(
                f"the run cannot go on: {self.settings.init} has changed since. Start anew with "
                "another --output"
            )
        found = source.read_model(config, trust_kernels=self.settings.trust_kernels)
        model.load_state_dict(found.state_dict())

    def after_step(self, model: Any, progress: float) -> None:
        """On the way from softmax to RBF."""
        if self.settings.system_options.get("start") == AS_SOFTMAX:
            from ...integrations import hf

            hf.leave_softmax(model, min(progress / PATH, 1.0))

    def compile(self, model: Any) -> None:
        """Each layer by itself."""
        kinds = set(getattr(model, "_no_split_modules", None) or ())
        layers = [m for m in model.modules() if type(m).__name__ in kinds]
        for layer in layers:
            layer.compile(dynamic=False)

    def collate(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        # These models keep keys and values unless they are told not to.
        return {**super().collate(items), "use_cache": False}

    def save_checkpoint(self, model: Any, weights: dict[str, Tensor], path: Path) -> None:
        from ...integrations import hf

        save = model.save_pretrained if getattr(model.config, "mercer", None) is None else None
        if save is None:
            hf.save(model, path, state_dict=weights)
        else:
            save(path, state_dict=weights)
        # safetensors makes files for their owner alone; the config follows the umask.
        for file in path.glob("*.safetensors"):
            shutil.copymode(path / "config.json", file)
        # Without `init`, too, a checkpoint can be used.
        self.tokenizer.save_pretrained(path)

    def save_model(self, model: Any, weights: dict[str, Tensor], path: Path) -> None:
        self.save_checkpoint(model, weights, path)
