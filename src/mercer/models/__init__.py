"""Language models, translators and vision transformers with any attention.

Importing this registers them with transformers' Auto classes.
"""

try:
    import transformers as transformers
except ImportError as error:
    raise ImportError("models need transformers: pip install 'mercer[train]'") from error

from . import count as count
from . import presets as presets
from .cache import KernelCache as KernelCache
from .config import KernelLMConfig as KernelLMConfig
from .grouping import groups as groups
from .lm import KernelLM as KernelLM

transformers.AutoConfig.register(KernelLMConfig.model_type, KernelLMConfig, exist_ok=True)
transformers.AutoModelForCausalLM.register(KernelLMConfig, KernelLM, exist_ok=True)
