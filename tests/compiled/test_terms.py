"""What ptxas makes of kernels with terms: nothing spills that does not without them."""

from __future__ import annotations

import pytest

from cute_lce.arch import Gpu, architecture
from cute_lce.plan.kernels import BackwardKey, ForwardKey, Key
from tests.compiled import cubin

full = pytest.mark.emulator_full


def local_memory(key: Key) -> list[tuple[int, int]]:
    """(bytes of stack, loads and stores of it) of each kernel, in their order."""
    found = cubin.kernels(key).values()
    return [(kernel.usage["STACK"], len(kernel.local_accesses)) for kernel in found]


def keys(arch: str) -> list[Key]:
    """Of the widest tiles, whose registers are scarcest."""
    configs = architecture(arch).configs[0]
    tokens = max(configs.tokens, key=lambda config: config.tile_n)
    return [
        ForwardKey(tokens),
        ForwardKey(tokens, keeps=True),
        BackwardKey(tokens, configs.dweight[0]),
    ]


@pytest.mark.parametrize(
    ("arch", "i"),
    [
        ("sm_90a", 0),
        *(pytest.param("sm_90a", i, marks=full) for i in (1, 2)),
        *(pytest.param("sm_100a", i, marks=full) for i in (0, 1, 2)),
    ],
)
def test_a_logit_scale_spills_nothing(arch: str, i: int):
    key = keys(arch)[i]
    assert local_memory(key._replace(terms=("logit_scale",))) == local_memory(key)


def capped(arch: str) -> list[Key]:
    """Of the widest tiles that a plan may choose for a softcap."""
    configs = architecture(arch).configs_for(1, 0, Gpu(arch, 1).serving(("softcap",)).columns)
    tokens = max(configs.tokens, key=lambda config: config.tile_n)
    return [
        ForwardKey(tokens, terms=("softcap",)),
        BackwardKey(tokens, configs.dweight[0], terms=("softcap", "coefficients")),
    ]


@pytest.mark.parametrize("i", [0, 1], ids=["forward", "backward"])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_softcap_spills_nothing(arch: str, i: int):
    cubin.check_no_local_memory(capped(arch)[i])
