"""`save` and `from_pretrained`: a patched model in a folder, and back.

The folder is one of transformers': its config has the entry `mercer`, its weights those of the
hosts. Plain `from_pretrained` of transformers does not know them; it drops them, says so in its
report of the loading, and computes softmax.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from ...own import Trust
from .host import MARK
from .layers import Which, attention_layers
from .patch import (
    Kernels,
    base_of,
    host_of,
    install,
    is_patched,
    owner_of,
    patch,
    record,
    tokens_of,
)  # fmt: skip
from .spec import Spec

# Arguments that say where files come from; the config is read with these alone.
SOURCES = (
    "cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder",
    "gguf_file", "trust_remote_code",
)  # fmt: skip


def save(model: nn.Module, path: str | os.PathLike[str], **options: Any) -> None:
    """Save a patched model, as `model.save_pretrained(path, **options)`, with its kernels as now.

    ValueError before anything is written if a kernel has no text, or an adapter is not merged.
    """
    if hasattr(model, "get_base_model"):
        raise ValueError(
            "the model has an adapter: merge it first, model = model.merge_and_unload(), or save "
            "the adapter alone by model.save_pretrained(path)"
        )
    base = base_of(model)
    layers = attention_layers(base)
    if not all(is_patched(layer) for layer in layers):
        raise ValueError(
            f"{type(base).__name__} is not patched, so there is nothing of Mercer to save: use its "
            "own save_pretrained"
        )
    tokens = tokens_of(base)
    if tokens is not None:
        # Its embedding may have been resized.
        owner_of(base, layers, tokens)
    record(base, layers)
    for layer in layers:
        if base.config.mercer["kernels"].get(str(layer.number), "") is None:
            raise ValueError(
                f"{layer} has the kernel {host_of(layer).kernel!r}, which has no text form: put "
                "its class at the top level of a file, and name it as in 'my_kernels.py:Name(2.0)'"
            )
    base.save_pretrained(path, **options)


def from_pretrained(
    path: str | os.PathLike[str],
    *,
    kernel: Kernels | None = None,
    layers: Which = "all",
    start: str | None = None,
    model_class: Any = None,
    trust_kernels: Trust = None,
    **options: Any,
) -> Any:
    """Load a model that `save` has written, with its kernels; or any other, and patch it.

    Args:
        path: a folder or a name on the hub.
        kernel, layers, start: as in `patch`, for a checkpoint that came without Mercer.
        model_class: the class of transformers, or an Auto class; by default, the class that the
            checkpoint names.
        trust_kernels: files or modules that the kernels of the checkpoint may be imported from.
        options: as in the `from_pretrained` of transformers.
    """
    from transformers import AutoConfig

    sources = {name: options[name] for name in SOURCES if name in options}
    config = options.pop("config", None)
    if config is None:
        with told(path, "config"):
            config = AutoConfig.from_pretrained(path, **sources)
    kind = _class_of(config, model_class)
    values = getattr(config, "mercer", None)
    if values is None:
        if kernel is None:
            raise ValueError(
                f"{path} was not saved by mercer: give kernel=… to patch it, or load it by "
                "transformers"
            )
        model = kind.from_pretrained(path, config=config, **options)
        return patch(model, kernel, layers=layers, start=start, trust_kernels=trust_kernels)
    if kernel is not None:
        raise ValueError(f"{path} has kernels of its own: load it, then patch the model")
    spec = Spec.read(values)
    wanted = options.pop("output_loading_info", False)
    model, info = _with_hosts(kind, spec, trust_kernels).from_pretrained(
        path, config=config, output_loading_info=True,
        **{"ignore_mismatched_sizes": True} | options,
    )  # fmt: skip
    _check(path, info, bool(options.get("ignore_mismatched_sizes")))
    # The class has made the hosts, which the model has now.
    model.__class__ = kind
    return (model, info) if wanted else model


@contextlib.contextmanager
def told(name: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Whatever is raised becomes one sentence about this part of a model."""
    try:
        yield
    # Transformers raises many kinds for files that are missing, damaged, or of another model.
    except Exception as error:
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        there = Path(name).expanduser().exists()
        where = "" if there else ": there is no such folder, and no such model on the hub"
        raise ValueError(f"the {what} of {name} cannot be loaded{where} ({reason})") from error


def _class_of(config: Any, model_class: Any) -> Any:
    import transformers

    if hasattr(model_class, "_model_mapping"):
        if type(config) not in model_class._model_mapping:
            raise ValueError(f"{model_class.__name__} has no class for a {type(config).__name__}")
        return model_class._model_mapping[type(config)]
    if model_class is not None:
        if not _is_for(model_class, config):
            name = getattr(model_class, "__name__", repr(model_class))
            raise ValueError(
                "model_class must be a class of models of transformers for a "
                f"{type(config).__name__}, got {name}"
            )
        return model_class
    names = getattr(config, "architectures", None) or []
    kind = getattr(transformers, names[0], None) if names else None
    if not _is_for(kind, config):
        said = f"names {names[0]}, which is none of transformers" if names else "names no class"
        raise ValueError(f"the checkpoint {said} for a {type(config).__name__}: give model_class=…")
    return kind


def _is_for(kind: Any, config: Any) -> bool:
    """Whether it is a class of models that are made from such a config."""
    from transformers import PreTrainedModel

    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        return False
    made_of = getattr(kind, "config_class", None)
    return made_of is None or isinstance(config, made_of)


def _with_hosts(kind: Any, spec: Spec, trust: Trust) -> Any:
    """A class of models that are patched before their weights are loaded."""

    class Patched(kind):
        # Bandwidths are not cast to half precision.
        _keep_in_fp32_modules_strict = (
            *(kind._keep_in_fp32_modules_strict or ()), "mercer", "mercer_tokens"
        )  # fmt: skip

        def __init__(self, config: Any, *args: Any, **named: Any) -> None:
            super().__init__(config, *args, **named)
            install(self, spec, trust)

    # Transformers looks classes up by their names.
    Patched.__name__, Patched.__qualname__ = kind.__name__, kind.__qualname__
    Patched.__module__ = kind.__module__
    return Patched


def _check(path: Any, info: Any, mismatched_is_fine: bool) -> None:
    """ValueError where weights and config do not belong together."""
    for key, *shapes in info["mismatched_keys"]:
        if _is_ours(key) or not mismatched_is_fine:
            came, wanted = (list(shape) for shape in shapes)
            raise ValueError(f"{path} has {key} of size {came}, but its config says {wanted}")
    missing = sorted(filter(_is_ours, info["missing_keys"]))
    if missing:
        raise ValueError(
            f"{path} has no weights of Mercer, though its config names them, such as {missing[0]}: "
            "it was saved by something that left them out"
        )
    foreign = sorted(filter(_is_ours, info["unexpected_keys"]))
    if foreign:
        raise ValueError(f"{path} has {foreign[0]}, which its config does not name")


def _is_ours(key: str) -> bool:
    parts = key.split(".")
    return "mercer" in parts or "mercer_tokens" in parts or MARK in parts
