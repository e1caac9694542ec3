"""Is the lowering right? Every kernel x filter in float64, outputs and all gradients."""

import pytest
from catalogue import COMPOSED, DIM, FILTERS, HEADS, KERNELS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mercer.testing import Shape, check_lowering

ALL = KERNELS | COMPOSED
SELF = Shape(heads=HEADS, kv_heads=HEADS, queries=11, keys=11)
STEP = Shape(heads=HEADS, kv_heads=1, queries=6, keys=11, values=3)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("filter", FILTERS)
@pytest.mark.parametrize("kernel", ALL)
def test_every_kernel_under_every_filter(kernel, filter):
    for shape in (SELF, STEP):
        check_lowering(ALL[kernel](), FILTERS[filter](), shape, dim=DIM)


# Signed weights may cancel to almost nothing, and then no rounding is small: they are tested above.
leaves = st.sampled_from(sorted(set(KERNELS) - {"linear"})).map(lambda name: KERNELS[name]())
kernels = st.recursive(
    leaves,
    lambda inner: st.tuples(inner, st.sampled_from("+*"), inner).map(
        lambda t: t[0] + t[2] if t[1] == "+" else t[0] * t[2]
    ),
    max_leaves=4,
)
filters = st.recursive(
    st.sampled_from(sorted(FILTERS)).map(lambda name: FILTERS[name]()),
    lambda inner: st.tuples(inner, st.sampled_from("&|"), inner).map(
        lambda t: t[0] & t[2] if t[1] == "&" else t[0] | t[2]
    ),
    max_leaves=3,
)


@pytest.mark.usefixtures("small_blocks")
@given(
    kernel=kernels,
    filter=filters,
    queries=st.integers(1, 11),
    kv_heads=st.sampled_from([1, 2]),
    values=st.integers(1, 9),
    seed=st.integers(0, 2**16),
)
@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_random_compositions(kernel, filter, queries, kv_heads, values, seed):
    shape = Shape(queries=queries, keys=11, kv_heads=kv_heads, values=values)
    check_lowering(kernel, filter, shape, dim=DIM, seed=seed)
