"""Tiny random models of transformers, one for each family, and inputs for them."""

import torch
import transformers as hf

TEXT = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
SPECIAL = {"cls_token_id": 1, "sep_token_id": 2}


def _windows(count):
    return ["sliding_attention", "full_attention", "sliding_attention"][:count]


MAKE = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**GROUPED, sliding_window=5)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(
        hf.Qwen3Config(
            **GROUPED, sliding_window=5, use_sliding_window=True, layer_types=_windows(3)
        )
    ),
    "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**GROUPED)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(
            **GROUPED, sliding_window=5, layer_types=_windows(3), query_pre_attn_scalar=11
        )
    ),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=97, n_embd=32, n_layer=3, n_head=4, n_positions=128, bos_token_id=1,
            eos_token_id=None, pad_token_id=0,
        )
    ),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**TEXT)),
    "modernbert": lambda: hf.ModernBertForMaskedLM(
        hf.ModernBertConfig(**TEXT, **SPECIAL, local_attention=6, layer_types=_windows(3))
    ),
    "vit": lambda: hf.ViTForImageClassification(
        hf.ViTConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
            image_size=16, patch_size=4,
        )
    ),
    "whisper": lambda: hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(
            vocab_size=97, d_model=32, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
            decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=16, max_target_positions=64,
            bos_token_id=1, eos_token_id=None, pad_token_id=0, decoder_start_token_id=1,
            suppress_tokens=None, begin_suppress_tokens=None,
        )
    ),
}  # fmt: skip
DECODERS = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3", "gpt2")
ENCODERS = ("bert", "modernbert")
READERS = (*DECODERS, *ENCODERS)


def checkpoint(model):
    """Turn gradient checkpointing on; transformers 5.23 has renamed it."""
    new = getattr(model, "activation_checkpointing_enable", None)
    (new or model.gradient_checkpointing_enable)()


def make(family):
    """A model whose logits are far from uniform, so that an error shows."""
    torch.manual_seed(0)
    model = MAKE[family]().eval()
    with torch.no_grad():
        for x in model.parameters():
            if x.dim() > 1:
                x.mul_(4)
    return model


def inputs(family, batch=2, length=17):
    """What `model(**inputs)` takes."""
    torch.manual_seed(1)
    ids = torch.randint(3, 97, (batch, length))
    if family == "vit":
        return {"pixel_values": torch.randn(batch, 3, 16, 16)}
    if family == "whisper":
        return {"input_features": torch.randn(batch, 8, 32), "decoder_input_ids": ids}
    return {"input_ids": ids}


def padded(length, *, left):
    """The mask of two sequences, the first with four places of padding."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, slice(0, 4) if left else slice(length - 4, None)] = 0
    return mask


@torch.no_grad()
def logits(model, **given):
    return model(**given).logits
