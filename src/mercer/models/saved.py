"""What tells people and transformers how to load a saved model.

Transformers knows the models after `import mercer.models`; then nothing in the folder is executed.
Without that import it reads `auto_map` in the config, which names a class in LOADER, a file of the
folder with one import. It runs that file only where `trust_remote_code=True` is given; otherwise
its error says that it does not, and names the folder, where README.md says what to import.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

LOADER = "load_mercer"
CODE = '''"""`import mercer.models` before loading does the same without running this file.

It is run by transformers where `trust_remote_code=True` is given.
"""

from mercer.models import {names}
'''
CARD = """---
library_name: transformers
pipeline_tag: {task}
tags: [mercer]
---

# {kind} of Mercer

`import mercer.models` before loading: it registers the model with transformers. It needs
`pip install 'mercer[train]'`.

```python
import mercer.models
from transformers import {names}

{code}
```

{about}

Where the import cannot be added, as in a command of another library, `trust_remote_code=True` does
the same: it runs `{loader}.py` of this folder, which imports `mercer.models`.
"""
USES = {
    "mercer-lm": (
        "A language model", "text-generation", "AutoModelForCausalLM, AutoTokenizer",
        'model = AutoModelForCausalLM.from_pretrained("this folder").eval()\n'
        'tokenizer = AutoTokenizer.from_pretrained("this folder")\n'
        'out = model.generate(**tokenizer("Once", return_tensors="pt"))\n'
        "print(tokenizer.decode(out[0]))",
    ),
    "mercer-translator": (
        "A translator", "translation", "AutoModelForSeq2SeqLM, AutoTokenizer",
        'model = AutoModelForSeq2SeqLM.from_pretrained("this folder").eval()\n'
        'tokenizer = AutoTokenizer.from_pretrained("this folder")\n'
        'out = model.generate(**tokenizer("a sentence", return_tensors="pt"))\n'
        "print(tokenizer.decode(out[0], skip_special_tokens=True))",
    ),
    "mercer-vit": (
        "A vision transformer", "image-classification", "pipeline",
        'classify = pipeline("image-classification", model="this folder")\n'
        'print(classify("an image.png"))',
    ),
}  # fmt: skip


def write_loader(folder: Any, config: Any) -> None:
    """Write the file that `trust_remote_code=True` runs."""
    code = CODE.format(names=type(config).__name__)
    (Path(folder) / f"{LOADER}.py").write_text(code, encoding="utf-8")


def write_card(folder: Any, config: Any) -> None:
    """Write README.md, unless there is one."""
    path = Path(folder) / "README.md"
    if path.exists():
        return
    kind, task, names, code = USES[config.model_type]
    layers = getattr(config, "layer_parts", None) or config.decoder_parts
    words = dict.fromkeys(_describe(parts) for parts in layers())
    about = f"Attention: {'; '.join(words)}. All sizes are in `config.json`."
    text = CARD.format(task=task, kind=kind, names=names, code=code, about=about, loader=LOADER)
    path.write_text(text, encoding="utf-8")


def _describe(parts: Any) -> str:
    given = {name: getattr(parts, name) for name in ("system", "kernel", "position", "filter")}
    words = [f"{name} `{text}`" for name, text in given.items() if text is not None]
    return ", ".join(words) or "kernel `Exponential()`"
