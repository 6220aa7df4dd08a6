"""Plans of the forward: windows, budgets, and a chip that is full at every number of tokens.

python -m tests.host.test_plan        prints the table of docs/kernels.md
"""

from __future__ import annotations

import dataclasses
import math
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from cute_lce import plan as plans
from cute_lce.kernels import schedule
from cute_lce.plan import DEVICES, KernelConfig, ceil_div

ARCHITECTURES = tuple(DEVICES)
TOKENS = (1, 37, 128, 129, 256, 257, 1000, 1024, 4096, 8192, 32768, 65536)
SIZES = ((64, 7), (256, 1000), (1024, 50257), (2048, 151936), (4096, 32768), (4096, 262144), (7168, 129280))


def sweep(arch: str, count: int = 150):
    """Plans of the usual sizes and of random ones."""
    sms = DEVICES[arch].sms
    for n in TOKENS:
        for d, vocab in SIZES:
            yield plans.forward(arch, n, d, vocab, sms)
    draw = random.Random(7)
    for _ in range(count):
        n, d, vocab = (int(2 ** draw.uniform(0, top)) for top in (17, 13, 19))
        window = draw.choice((0, 0, draw.randint(1, vocab)))
        yield plans.forward(arch, n, 8 * ceil_div(d, 8), vocab, draw.choice((sms, 8, sms - 1)), window)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_windows_cover_the_vocabulary_exactly_once(arch: str):
    for plan in sweep(arch):
        tiles = ceil_div(plan.vocab, plan.config.cluster_columns)
        spans = [schedule.run_tiles(w, plan.tiles_per_window, tiles) for w in range(plan.windows)]
        assert spans[0][0] == 0
        assert spans[-1][1] == tiles
        assert all(end == following for (_, end), (following, _) in pairwise(spans))
        assert all(first < end for first, end in spans), f"{plan}: a window without tiles"
        assert (plan.windows - 1) * plan.window < plan.vocab <= plan.windows * plan.window


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_groups_and_clusters_are_in_bounds(arch: str):
    for plan in sweep(arch):
        rows = ceil_div(plan.n, plan.config.cluster_rows)
        assert 1 <= plan.group_m <= rows
        assert 1 <= plan.clusters <= rows * plan.windows
        assert plan.clusters * plan.config.cluster_m * plan.config.cluster_n <= DEVICES[arch].sms
        # The rows of H of a group fit where the plan wants them, unless a single row of clusters does not.
        panel = 2 * plan.d * plan.config.cluster_rows * plan.group_m
        assert plan.group_m == 1 or panel <= DEVICES[arch].panel
        assert plan.config.pace > 0 or not plan.paced


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_busiest_cluster(arch: str):
    """`rounds` is what the schedule gives: counted here run by run."""
    for plan in sweep(arch, 40):
        rows = ceil_div(plan.n, plan.config.cluster_rows)
        tiles = ceil_div(plan.vocab, plan.config.cluster_columns)
        if rows * plan.windows > 20_000:
            continue
        load = [0] * plan.clusters
        for run in range(rows * plan.windows):
            _, window = schedule.run_coord(run, rows, plan.windows, plan.group_m)
            first, end = schedule.run_tiles(window, plan.tiles_per_window, tiles)
            load[run % plan.clusters] += end - first
        assert sum(load) == rows * tiles
        # A last window that is shorter may spare the busiest cluster a few tiles.
        assert (
            max(load) <= plan.rounds < max(load) + plan.tiles_per_window * ceil_div(rows, plan.clusters) + 1
        )


@pytest.mark.parametrize("n", TOKENS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_chip_is_full(arch: str, n: int):
    """At 128 tokens as at 65536: no cluster has more than the even share rounded up to tiles, and 2%."""
    for d, vocab in ((1024, 50257), (2048, 151936), (4096, 128256), (4096, 262144), (7168, 129280)):
        plan = plans.forward(arch, n, d, vocab, DEVICES[arch].sms)
        assert plan.rounds <= math.ceil(plan.ideal_rounds) * 1.03, plan
        if plan.ideal_rounds >= 50:
            assert plan.rounds <= plan.ideal_rounds * 1.03, plan


def test_fewer_sms_than_a_cluster_are_refused():
    pingpong, single = plans.configs("sm_90a")
    assert plans.forward("sm_90a", 100, 64, 1000, 1).config == single
    for call in (
        lambda: plans.forward("sm_90a", 1000, 64, 1000, 1),
        lambda: plans.gemm(pingpong, 1000, 64, 1000, 1),
        lambda: plans.backward("sm_90a", 100, 64, 1000, 1, False, True, True, 0, 0, 0),
    ):
        with pytest.raises(ValueError, match=r"^sms: got 1, want at least the 2 of a cluster"):
            call()


def test_a_small_vocabulary_leaves_no_cluster_two_windows_while_others_have_none():
    plan = plans.forward("sm_90a", 128, 4096, 192 * 100, 132)
    assert plan.tiles_per_window == 1
    assert plan.clusters == plan.windows == 100


def test_the_callers_window():
    chosen = plans.forward("sm_90a", 4096, 4096, 128256, 132)
    columns = chosen.config.cluster_columns
    for window in (1, columns - 1, columns, columns + 1, 3000, 128256, 10**9):
        plan = plans.forward("sm_90a", 4096, 4096, 128256, 132, window)
        tiles = min(ceil_div(window, columns), ceil_div(128256, columns))
        assert plan.tiles_per_window == tiles
        assert plan.windows == ceil_div(ceil_div(128256, columns), tiles)
        assert plan.config == chosen.config


def test_the_callers_config():
    for config in (*plans.configs("sm_90a"), dataclasses.replace(plans.configs("sm_90a")[0], cluster_n=2)):
        plan = plans.forward("sm_90a", 4096, 4096, 128256, 132, config=config)
        assert plan.config is config
        assert plan.clusters == 132 // (config.cluster_m * config.cluster_n)


def test_a_config_is_chosen_by_the_number_of_tokens():
    pingpong, single = plans.configs("sm_90a")
    for n, d, config in (
        (1, 4096, single),
        (128, 4096, single),
        (129, 4096, pingpong),
        (65536, 1024, pingpong),
        (65536, 8192, pingpong),
    ):
        assert plans.forward("sm_90a", n, d, 128256, 132).config == config


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_workspace(arch: str):
    """8 bytes a row and partial, 4 a row for the target's logit, 8 a block of 32 rows, 8 for counters."""
    for plan in sweep(arch):
        partials = plan.windows * plan.config.partials_per_window
        bytes_ = 8 + 8 * plan.n * partials + 4 * plan.n + 8 * ceil_div(plan.n, 32)
        assert plan.workspace_floats * 4 == bytes_
        assert plan.config.partials_per_window == plan.config.cluster_n * (2 if plan.config.pingpong else 1)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_partials_stay_in_their_budget(arch: str):
    for n in TOKENS:
        for d, vocab in SIZES:
            plan = plans.forward(arch, n, d, vocab, DEVICES[arch].sms)
            partials = 8 * n * plan.windows * plan.config.partials_per_window
            # One window that is shorter than the others may come on top.
            assert partials <= plans.PARTIAL_BYTES + 8 * n * plan.config.partials_per_window


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_extra_memory_of_the_largest_table_row(arch: str):
    """(32768, 4096, 262144): under 100 MiB with the results, where torch's logits take 16 GiB in bf16."""
    plan = plans.forward(arch, 32768, 4096, 262144, DEVICES[arch].sms)
    results = 8 * plan.n + 16
    assert plan.workspace_floats * 4 + results < 100 << 20


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_configs_fit_the_device(arch: str):
    for config in plans.configs(arch):
        assert config.arch == arch
        assert config.shared_memory <= DEVICES[arch].shared_memory
        assert config.tmem_columns <= DEVICES[arch].tmem_columns
        # The ring is as deep as can be.
        deeper = dataclasses.replace(config, stages=config.stages + 1)
        assert deeper.shared_memory > DEVICES[arch].shared_memory


def test_hopper_configs_are_what_the_kernel_takes():
    for config in plans.configs("sm_90a"):
        assert config.tile_m % (64 * config.warpgroups // config.turns) == 0
        assert config.tile_n % 8 == 0
        assert config.tile_n <= 256
        assert config.tile_k * 2 == 128  # bytes of a row of the 128-byte swizzle
        # fp32 accumulators of a thread, of the 240 registers that it has.
        assert config.tile_m * config.tile_n * config.turns // (128 * config.warpgroups) <= 192


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_few_variants_are_compiled(arch: str):
    """One compile serves all n, d and V: what `forward` chooses is always among `configs`."""
    assert len(plans.configs(arch)) <= 2
    assert {plan.config for plan in sweep(arch)} <= set(plans.configs(arch))


def test_small_operands_are_not_paced():
    assert not plans.forward("sm_90a", 4096, 256, 8192, 132).paced
    assert plans.forward("sm_90a", 8192, 4096, 131072, 132).paced
    assert not plans.forward("sm_90a", 128, 4096, 131072, 132).paced  # nobody shares W's tiles


def test_plan_is_frozen_and_hashable():
    plan = plans.forward("sm_90a", 128, 64, 1000, 132)
    assert len({plan, dataclasses.replace(plan)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.n = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert len({KernelConfig("sm_90a"), KernelConfig("sm_90a", pace=0)}) == 2


def test_plan_needs_neither_torch_nor_cutlass():
    code = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("plan", sys.argv[1])
sys.modules["plan"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.forward("sm_90a", 4096, 4096, 128256, 132)
assert not {"torch", "cutlass", "numpy"} & set(sys.modules), set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code, plans.__file__], check=True)


BENCH = (
    (8192, 4096, 131072),
    (32768, 4096, 262144),
    (4096, 4096, 32768),
    (1024, 4096, 262144),
    (4096, 7168, 129280),
    (16384, 2048, 151936),
    (8192, 1024, 50257),
    (256, 4096, 128256),
)


def table() -> list[str]:
    """Rows of docs/kernels.md's table of Hopper's plans."""
    lines = []
    for n, d, vocab in BENCH:
        plan = plans.forward("sm_90a", n, d, vocab, DEVICES["sm_90a"].sms)
        name = ("pingpong", "single")[plans.configs("sm_90a").index(plan.config)]
        cells = (
            f"{n}, {d}, {vocab}",
            name,
            f"{plan.tiles_per_window}, {plan.windows}",
            plan.group_m,
            f"{plan.rounds}, {plan.ideal_rounds:.1f}",
            "yes" if plan.paced else "no",
            f"{plan.workspace_floats * 4 / 2**20:.1f}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


# Of a launch on Blackwell: the first loads, the last epilogue. Assumed, and said so in docs/kernels.md.
EXPOSED_CYCLES = 8000


def blackwell_table() -> list[str]:
    """Rows of docs/kernels.md's table of Blackwell's plans, and what they leave of the MMA peak."""
    lines = []
    device = DEVICES["sm_100a"]
    for n, d, vocab in BENCH:
        plan = plans.forward("sm_100a", n, d, vocab, device.sms)
        tile = 2 * 128 * plan.config.tile_n * d // device.dense_flops_per_clock  # cycles of an SM's MMAs
        least = 2 * n * d * vocab / (device.sms * device.dense_flops_per_clock)
        share = least / (plan.rounds * tile + EXPOSED_CYCLES)
        cells = (
            f"{n}, {d}, {vocab}",
            f"{plan.tiles_per_window}, {plan.windows}",
            plan.group_m,
            f"{plan.rounds}, {plan.ideal_rounds:.1f}",
            "yes" if plan.paced else "no",
            f"{share:.1%}",
            f"{0.92 * share:.0%}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


@pytest.mark.parametrize("rows", [table, blackwell_table])
def test_the_documented_plans(rows):
    text = Path(__file__).parent.parent.joinpath("docs", "kernels.md").read_text(encoding="utf-8")
    for line in rows():
        assert text.count(line) == 1, f"docs/kernels.md: python -m tests.host.test_plan prints {line}"


if __name__ == "__main__":
    print("\n".join(["Hopper", *table(), "Blackwell", *blackwell_table()]))
