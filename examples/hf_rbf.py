"""RBF attention in a model of Hugging Face: patched, trained for a few steps, saved, loaded.

python examples/hf_rbf.py                # a tiny random Llama
python examples/hf_rbf.py PATH_OR_NAME   # a model of yours, or of the hub
"""

import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from mercer.integrations import hf


def load(name: str | None) -> torch.nn.Module:
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes, **heads))


def train(model: torch.nn.Module, ids: torch.Tensor, steps: int = 20) -> list[float]:
    """Losses on one batch; bandwidths, as logarithms, learn faster than the weights."""
    ours = [x for name, x in model.named_parameters() if "mercer" in name]
    rest = [x for name, x in model.named_parameters() if "mercer" not in name]
    groups = [{"params": ours, "lr": 3e-2}, {"params": rest, "lr": 1e-3}]
    optimizer = torch.optim.AdamW(groups)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    torch.manual_seed(0)
    model = load(sys.argv[1] if len(sys.argv) > 1 else None)
    ids = torch.randint(3, 50, (4, 12)).repeat(1, 3)

    with torch.no_grad():
        came = model(ids).logits
        hf.patch(model, "Exponential()")
        print("the same logits with Exponential():", torch.equal(model(ids).logits, came))

    heads = model.config.num_attention_heads
    hf.patch(model, f"RBF(heads={heads})")
    losses = train(model, ids)
    print(f"RBF heads: loss {losses[0]:.2f}, and {losses[-1]:.2f} after {len(losses)} steps")
    named = dict(model.named_parameters())
    log = next(x for name, x in named.items() if name.endswith("kernel.log_bandwidth"))
    factors = [f"{s:.2f}" for s in log.detach().exp().flatten().tolist()]
    print("bandwidths of the first layer, as multiples of their start:", ", ".join(factors))

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        hf.save(model, folder)
        again = hf.from_pretrained(folder)
        print("the same logits after loading:", torch.equal(again(ids).logits, model(ids).logits))
