"""Plans of the forward: windows, budgets, and a chip that is full at every number of tokens.

python -m tests.host.test_plan        prints the table of docs/kernels.md
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from cute_lce.arch import ARCHITECTURES, Gpu, KernelConfig, architecture
from cute_lce.kernels import schedule
from cute_lce.plan import backward, forward, gemm
from cute_lce.plan.forward import ForwardPlan
from cute_lce.plan.problem import NO_LIMITS, Limits, Problem, ceil_div

H100 = Gpu("sm_90a", 132)
TOKENS = (1, 37, 128, 129, 256, 257, 1000, 1024, 4096, 8192, 32768, 65536)
SIZES = ((64, 7), (256, 1000), (1024, 50257), (2048, 151936), (4096, 32768), (4096, 262144), (7168, 129280))


def whole(arch: str) -> Gpu:
    """A GPU none of whose SMs is taken."""
    return Gpu(arch, architecture(arch).sms)


def sweep(arch: str, count: int = 150) -> Iterator[ForwardPlan]:
    """Plans of the usual sizes and of random ones."""
    sms = architecture(arch).sms
    for n in TOKENS:
        for d, vocab in SIZES:
            yield forward.plan(Gpu(arch, sms), n, d, vocab)
    draw = random.Random(7)
    for _ in range(count):
        n, d, vocab = (int(2 ** draw.uniform(0, top)) for top in (17, 13, 19))
        window = draw.choice((0, 0, draw.randint(1, vocab)))
        gpu = Gpu(arch, draw.choice((sms, 8, sms - 1)))
        yield forward.plan(gpu, n, 8 * ceil_div(d, 8), vocab, Limits(window))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_windows_cover_the_vocabulary_exactly_once(arch: str):
    for plan in sweep(arch):
        windows, tiles_per_window = plan.sweep.gemm.windows, plan.sweep.tiles_per_window
        tiles = ceil_div(plan.vocab, plan.config.cluster_columns)
        spans = [schedule.run_tiles(window, tiles_per_window, tiles) for window in range(windows)]
        assert spans[0][0] == 0
        assert spans[-1][1] == tiles
        assert all(end == following for (_, end), (following, _) in pairwise(spans))
        assert all(first < end for first, end in spans), f"{plan}: a window without tiles"
        assert (windows - 1) * plan.window < plan.vocab <= windows * plan.window


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_groups_and_clusters_are_in_bounds(arch: str):
    row = architecture(arch)
    for plan in sweep(arch):
        grid, config = plan.sweep.gemm, plan.config
        rows = ceil_div(plan.n, config.cluster_rows)
        assert 1 <= grid.group_m <= rows
        assert 1 <= grid.clusters <= rows * grid.windows
        assert grid.clusters * config.cluster_m * config.cluster_n <= row.sms
        # The rows of H of a group fit where the plan wants them, unless a single row of clusters does not.
        panel = 2 * plan.d * config.cluster_rows * grid.group_m
        assert grid.group_m == 1 or panel <= row.panel
        assert grid.paced in (0, 1)
        assert config.pace > 0 or not grid.paced


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_busiest_cluster(arch: str):
    """`rounds` is what the schedule gives: counted here run by run."""
    for plan in sweep(arch, 40):
        tiles_per_window, (windows, group_m, clusters, _) = plan.sweep
        rows = ceil_div(plan.n, plan.config.cluster_rows)
        tiles = ceil_div(plan.vocab, plan.config.cluster_columns)
        if rows * windows > 20_000:
            continue
        load = [0] * clusters
        for run in range(rows * windows):
            _, window = schedule.run_coord(run, rows, windows, group_m)
            first, end = schedule.run_tiles(window, tiles_per_window, tiles)
            load[run % clusters] += end - first
        assert sum(load) == rows * tiles
        # A last window that is shorter may spare the busiest cluster a few tiles.
        assert max(load) <= plan.rounds < max(load) + tiles_per_window * ceil_div(rows, clusters) + 1


@pytest.mark.parametrize("n", TOKENS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_chip_is_full(arch: str, n: int):
    """At 128 tokens as at 65536: no cluster has more than the even share rounded up to tiles, and 2%."""
    for d, vocab in ((1024, 50257), (2048, 151936), (4096, 128256), (4096, 262144), (7168, 129280)):
        plan = forward.plan(whole(arch), n, d, vocab)
        assert plan.rounds <= math.ceil(plan.ideal_rounds) * 1.03, plan
        if plan.ideal_rounds >= 50:
            assert plan.rounds <= plan.ideal_rounds * 1.03, plan


def test_fewer_sms_than_a_cluster_are_refused():
    pingpong, single = H100.row.configs
    one = Gpu("sm_90a", 1)
    assert forward.plan(one, 100, 64, 1000).config == single
    for call in (
        lambda: forward.plan(one, 1000, 64, 1000),
        lambda: gemm.plan(one, pingpong, 1000, 64, 1000),
        lambda: backward.plan(one, Problem(100, 64, 1000), 0, NO_LIMITS),
    ):
        with pytest.raises(ValueError, match=r"^sms: got 1, want at least the 2 of a cluster"):
            call()


def test_a_small_vocabulary_leaves_no_cluster_two_windows_while_others_have_none():
    plan = forward.plan(H100, 128, 4096, 192 * 100)
    assert plan.sweep.tiles_per_window == 1
    assert plan.sweep.gemm.clusters == plan.sweep.gemm.windows == 100


def test_the_callers_window():
    chosen = forward.plan(H100, 4096, 4096, 128256)
    columns = chosen.config.cluster_columns
    for window in (1, columns - 1, columns, columns + 1, 3000, 128256, 10**9):
        plan = forward.plan(H100, 4096, 4096, 128256, Limits(window))
        tiles = min(ceil_div(window, columns), ceil_div(128256, columns))
        assert plan.sweep.tiles_per_window == tiles
        assert plan.sweep.gemm.windows == ceil_div(ceil_div(128256, columns), tiles)
        assert plan.config == chosen.config


def test_the_callers_config():
    for config in (*H100.row.configs, dataclasses.replace(H100.row.configs[0], cluster_n=2)):
        plan = forward.plan(H100, 4096, 4096, 128256, config=config)
        assert plan.config is config
        assert plan.sweep.gemm.clusters == 132 // (config.cluster_m * config.cluster_n)


def test_a_config_is_chosen_by_the_number_of_tokens():
    pingpong, single = H100.row.configs
    for n, d, config in (
        (1, 4096, single),
        (128, 4096, single),
        (129, 4096, pingpong),
        (65536, 1024, pingpong),
        (65536, 8192, pingpong),
    ):
        assert forward.plan(H100, n, d, 128256).config == config


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_workspace(arch: str):
    """8 bytes a row and partial, 4 a row for the target's logit, 8 a block of 32 rows, 8 for counters."""
    for plan in sweep(arch):
        partials = plan.sweep.gemm.windows * plan.config.partials_per_window
        bytes_ = 8 + 8 * plan.n * partials + 4 * plan.n + 8 * ceil_div(plan.n, 32)
        assert plan.workspace_floats * 4 == bytes_
        assert plan.config.partials_per_window == plan.config.cluster_n * (2 if plan.config.pingpong else 1)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_partials_stay_in_their_budget(arch: str):
    for n in TOKENS:
        for d, vocab in SIZES:
            plan = forward.plan(whole(arch), n, d, vocab)
            partials = 8 * n * plan.sweep.gemm.windows * plan.config.partials_per_window
            # One window that is shorter than the others may come on top.
            assert partials <= forward.PARTIAL_BYTES + 8 * n * plan.config.partials_per_window


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_extra_memory_of_the_largest_table_row(arch: str):
    """(32768, 4096, 262144): under 100 MiB with the results, where torch's logits take 16 GiB in bf16."""
    plan = forward.plan(whole(arch), 32768, 4096, 262144)
    results = 8 * plan.n + 16
    assert plan.workspace_floats * 4 + results < 100 << 20


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_configs_fit_the_device(arch: str):
    for config in architecture(arch).configs:
        assert config.arch == arch
        assert config.shared_memory <= architecture(arch).shared_memory
        assert config.tmem_columns <= architecture(arch).tmem_columns
        # The ring is as deep as can be.
        with pytest.raises(ValueError, match="bytes of shared memory"):
            dataclasses.replace(config, stages=config.stages + 1)


def test_hopper_configs_are_what_the_kernel_takes():
    for config in H100.row.configs:
        assert config.tile_m % (64 * config.warpgroups // config.turns) == 0
        assert config.tile_n % 8 == 0
        assert config.tile_n <= 256
        assert config.tile_k * 2 == 128  # bytes of a row of the 128-byte swizzle
        # fp32 accumulators of a thread, of the 240 registers that it has.
        assert config.tile_m * config.tile_n * config.turns // (128 * config.warpgroups) <= 192


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_few_variants_are_compiled(arch: str):
    """One compile serves all n, d and V: what `forward` chooses is always among `configs`."""
    assert len(architecture(arch).configs) <= 2
    assert {plan.config for plan in sweep(arch)} <= set(architecture(arch).configs)


def test_small_operands_are_not_paced():
    assert not forward.plan(H100, 4096, 256, 8192).sweep.gemm.paced
    assert forward.plan(H100, 8192, 4096, 131072).sweep.gemm.paced
    assert not forward.plan(H100, 128, 4096, 131072).sweep.gemm.paced  # nobody shares W's tiles


def test_plan_is_frozen_and_hashable():
    plan = forward.plan(H100, 128, 64, 1000)
    assert len({plan, dataclasses.replace(plan)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.n = 3  # pyright: ignore[reportAttributeAccessIssue]
    config = H100.row.configs[0]
    assert isinstance(config, KernelConfig)
    assert len({config, dataclasses.replace(config), dataclasses.replace(config, pace=0)}) == 2


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
        plan = forward.plan(whole("sm_90a"), n, d, vocab)
        name = ("pingpong", "single")[H100.row.configs.index(plan.config)]
        cells = (
            f"{n}, {d}, {vocab}",
            name,
            f"{plan.sweep.tiles_per_window}, {plan.sweep.gemm.windows}",
            plan.sweep.gemm.group_m,
            f"{plan.rounds}, {plan.ideal_rounds:.1f}",
            "yes" if plan.sweep.gemm.paced else "no",
            f"{plan.workspace_floats * 4 / 2**20:.1f}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


# Of a launch on Blackwell: the first loads, the last epilogue. Assumed, and said so in docs/kernels.md.
EXPOSED_CYCLES = 8000


def blackwell_table() -> list[str]:
    """Rows of docs/kernels.md's table of Blackwell's plans, and what they leave of the MMA peak."""
    lines = []
    device = architecture("sm_100a")
    for n, d, vocab in BENCH:
        plan = forward.plan(whole("sm_100a"), n, d, vocab)
        tile = 2 * 128 * plan.config.tile_n * d // device.dense_flops_per_clock  # cycles of an SM's MMAs
        least = 2 * n * d * vocab / (device.sms * device.dense_flops_per_clock)
        share = least / (plan.rounds * tile + EXPOSED_CYCLES)
        cells = (
            f"{n}, {d}, {vocab}",
            f"{plan.sweep.tiles_per_window}, {plan.sweep.gemm.windows}",
            plan.sweep.gemm.group_m,
            f"{plan.rounds}, {plan.ideal_rounds:.1f}",
            "yes" if plan.sweep.gemm.paced else "no",
            f"{share:.1%}",
            f"{0.92 * share:.0%}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


@pytest.mark.parametrize("rows", [table, blackwell_table])
def test_the_documented_plans(rows):
    text = Path(__file__).parents[2].joinpath("docs", "kernels.md").read_text(encoding="utf-8")
    for line in rows():
        assert text.count(line) == 1, f"docs/kernels.md: python -m tests.host.test_plan prints {line}"


if __name__ == "__main__":
    print("\n".join(["Hopper", *table(), "Blackwell", *blackwell_table()]))
