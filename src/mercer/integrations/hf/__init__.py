"""Mercer in models of Hugging Face transformers: other kernels, token kernels, saving, reports.

    from mercer.integrations import hf

    model = AutoModelForCausalLM.from_pretrained(path)
    hf.patch(model, kernel="RBF(heads=9)", layers="all")          # or a Kernel, or {layer: kernel}
    hf.patch(model, kernel="RBF(heads=9)", start="as-softmax")    # as it came, on its way to RBF
    hf.patch(model, token_kernels=TokenKernels.like(model, size=3, on="v", layers=[0]))
    hf.save(model, path)
    model = hf.from_pretrained(path)

Nothing is changed in transformers but two registrations, of an attention function and of a mask
function, under the name "mercer". Only models that were patched use them.
"""

from .patch import patch as patch
from .report import report as report
from .saved import from_pretrained as from_pretrained
from .saved import save as save
from .start import leave_softmax as leave_softmax
from .start import to_rbf as to_rbf
