"""Language models, translators and vision transformers with any attention.

Importing this registers them with transformers' Auto classes.
"""

import contextlib

try:
    import transformers as transformers
except ImportError as error:
    raise ImportError("models need transformers: pip install 'mercer[train]'") from error

from . import count as count
from . import presets as presets
from .cache import KernelCache as KernelCache
from .grouping import groups as groups
from .images import KernelImageProcessor as KernelImageProcessor
from .llama import from_llama as from_llama
from .lm import KernelLM as KernelLM
from .lm_config import KernelLMConfig as KernelLMConfig
from .multimodal import MultimodalTransformer as MultimodalTransformer
from .translator import KernelTranslator as KernelTranslator
from .translator_config import KernelTranslatorConfig as KernelTranslatorConfig
from .vit import KernelViT as KernelViT
from .vit_config import KernelViTConfig as KernelViTConfig


def _register() -> None:
    models = (
        (transformers.AutoModelForCausalLM, KernelLMConfig, KernelLM),
        (transformers.AutoModelForSeq2SeqLM, KernelTranslatorConfig, KernelTranslator),
        (transformers.AutoModelForImageClassification, KernelViTConfig, KernelViT),
    )
    for auto, config, model in models:
        transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
        auto.register(config, model, exist_ok=True)
    # The same with and without torchvision. Older releases of transformers need torchvision for the
    # class itself; then `KernelImageProcessor` is used by its own name.
    with contextlib.suppress(ImportError):
        transformers.AutoImageProcessor.register(
            KernelViTConfig, KernelImageProcessor, KernelImageProcessor, exist_ok=True
        )


_register()
