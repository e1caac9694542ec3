"""`generate` of the models: defaults, lengths, and the cache."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin

from .base import KernelModel
from .cache import KernelCache

# How many tokens `generate` adds where no number is given.
MOST_NEW = 256


class Decoding(GenerationMixin):
    """`generate` with Mercer's cache: that of transformers holds one part of the keys only."""

    cross = False

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        theirs: Any = super()
        theirs._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        if generation_config.use_cache and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = self.new_cache()

    def set_generation_defaults(self) -> None:
        """Start, end and padding, and how many tokens where no end comes."""
        config: Any = self.config  # type: ignore[attr-defined]
        end = config.eos_token_id
        first = end[0] if isinstance(end, list) else end
        self.generation_config = GenerationConfig(
            bos_token_id=config.bos_token_id,
            eos_token_id=end,
            pad_token_id=first if config.pad_token_id is None else config.pad_token_id,
            decoder_start_token_id=getattr(config, "decoder_start_token_id", None),
            max_new_tokens=min(MOST_NEW, config.context_length),
        )

    def _prepare_generated_length(self, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        theirs: Any = super()
        prepared = theirs._prepare_generated_length(generation_config, *args, **kwargs)
        places = self.most_places  # type: ignore[attr-defined]
        if places and prepared.max_new_tokens == self.generation_config.max_new_tokens:
            # Not asked for by the caller, so it ends with the places of the positions.
            prepared.max_length = min(prepared.max_length, places)
        return prepared

    def new_cache(self) -> KernelCache:
        """An empty cache, for `past_key_values`."""
        config: Any = self.config  # type: ignore[attr-defined]
        return KernelCache(config.num_layers, cross=self.cross)

    def choose_cache(
        self, given: object, use_cache: bool | None, labels: Tensor | None
    ) -> KernelCache | None:
        """The given cache, a new one if `use_cache` is set, or None."""
        if given is not None:
            if not isinstance(given, KernelCache):
                raise ValueError(
                    f"past_key_values must be a KernelCache, got {type(given).__name__}"
                )
            return given
        assert isinstance(self, KernelModel)
        if use_cache is None:
            use_cache = self.config.use_cache and labels is None and not self.training
        # A checkpointed block runs twice, and would append its keys twice.
        if not use_cache or (self.training and self.runs_blocks_twice):
            return None
        return self.new_cache()


def keep_last(x: Tensor, keep: int | Tensor) -> Tensor:
    """The places whose logits are wanted: the last `keep` ones, or these indices."""
    if isinstance(keep, int):
        return x[:, -keep:] if keep else x
    return x[:, keep]
