"""A LoRA adapter with the bandwidths of RBF heads: trained by PEFT, saved, loaded, merged.

    python examples/hf_peft.py                # a tiny random Llama
    python examples/hf_peft.py PATH_OR_NAME   # a model of yours, or of the hub

`modules_to_save=["mercer"]` makes PEFT train the kernels and store them with the adapter.
"""

import copy
import sys
import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from mercer.integrations import hf


def load(name: str | None) -> torch.nn.Module:
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes, **heads))


if __name__ == "__main__":
    torch.manual_seed(0)
    model = load(sys.argv[1] if len(sys.argv) > 1 else None)
    hf.patch(model, f"RBF(heads={model.config.num_attention_heads})")
    came = copy.deepcopy(model)

    lora = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["mercer"], task_type="CAUSAL_LM"
    )
    adapted = get_peft_model(model, lora)
    adapted.print_trainable_parameters()
    ids = torch.randint(3, 50, (4, 12)).repeat(1, 3)
    optimizer = torch.optim.AdamW([x for x in adapted.parameters() if x.requires_grad], lr=1e-2)
    losses = []
    for _ in range(20):
        loss = adapted(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.2f}, and {losses[-1]:.2f} after {len(losses)} steps")

    adapted.eval()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        # The adapter alone, beside the model as it was.
        adapted.save_pretrained(f"{folder}/adapter")
        again = PeftModel.from_pretrained(came, f"{folder}/adapter").eval()
        same = torch.equal(again(ids).logits, adapted(ids).logits)
        print("the same logits with the adapter loaded:", same)
        # One model, without PEFT.
        merged = adapted.merge_and_unload()
        hf.save(merged, f"{folder}/merged")
        loaded = hf.from_pretrained(f"{folder}/merged")
        print(
            "the same logits merged and loaded:",
            torch.equal(loaded(ids).logits, merged(ids).logits),
        )
