"""A language model of transformers by one name: a folder, a GGUF file, or a name on the hub.

Requirement: whatever transformers raises for files that are missing or damaged, or without a
network, becomes one sentence. Weights are in the default dtype, float32, as training needs them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...own import Trust
from .saved import from_pretrained, told

GGUF = ".gguf"


@dataclass(frozen=True)
class Source:
    """Where config, tokenizer and weights of a language model come from."""

    name: str

    def read_config(self) -> Any:
        from transformers import AutoConfig

        with told(self.name, "config"):
            config = AutoConfig.from_pretrained(**self._where)
        # The weights of a GGUF file are read as plain numbers.
        if self._is_gguf and hasattr(config, "quantization_config"):
            del config.quantization_config
        return config

    def read_tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        with told(self.name, "tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(**self._where, trust_remote_code=False)
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise ValueError(
                f"the tokenizer of {self.name} is none of transformers' fast tokenizers: give "
                "--tokenizer with a folder of one"
            )
        return tokenizer

    def read_model(self, config: Any, *, trust_kernels: Trust = None) -> Any:
        """The model with its kernels if it was saved by Mercer, else as it is."""
        from transformers import AutoModelForCausalLM

        options: dict[str, Any] = {
            "dtype": torch.get_default_dtype(),
            "config": copy.deepcopy(config),
        }
        with told(self.name, "model"):
            if getattr(config, "mercer", None) is not None:
                model = from_pretrained(
                    self.name, model_class=AutoModelForCausalLM, trust_kernels=trust_kernels,
                    **options,
                )  # fmt: skip
            else:
                model = AutoModelForCausalLM.from_pretrained(**self._where, **options)
        if self._is_gguf:
            # Without the marks of a quantised model, which transformers would not train.
            plain = type(model)(copy.deepcopy(config))
            plain.load_state_dict(model.state_dict())
            plain.generation_config = model.generation_config
            model = plain
        return model

    @property
    def _is_gguf(self) -> bool:
        return self.name.endswith(GGUF)

    @property
    def _where(self) -> dict[str, Any]:
        path = Path(self.name).expanduser()
        if self._is_gguf:
            return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        name = str(path) if path.exists() else self.name
        return {"pretrained_model_name_or_path": name}
