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
from cute_lce.plan import backward, cost, epilogues, forward, gemm, kernels
from cute_lce.plan.forward import ForwardPlan
from cute_lce.plan.problem import NO_LIMITS, Limits, Problem, ceil_div

H200 = Gpu("sm_90a", 132)
TOKENS = (1, 37, 128, 129, 256, 257, 1000, 1024, 4096, 8192, 32768, 65536)
SIZES = ((64, 7), (256, 1000), (1024, 50257), (2048, 151936), (4096, 32768), (4096, 262144), (7168, 129280))


def whole(arch: str) -> Gpu:
    """A GPU none of whose SMs is taken."""
    return Gpu(arch, architecture(arch).sms)


def gemm_clocks(gpu: Gpu, plan: ForwardPlan, rounds: float) -> float:
    """Clocks of the GEMM of a forward that keeps nothing, in as many rounds: of its tiles, or of DRAM, the
    longer the more SMs are idle."""
    n, d, vocab = plan.n, plan.d, plan.vocab
    found = cost.Gemm(gpu, plan.config, n * d * vocab)
    moved = 2 * (n + vocab) * d / found.rates.read * (1 + cost.IDLE * (1 - plan.ideal_rounds / rounds))
    return max(rounds * found.tile(d, epilogues.STATISTICS), moved)


def sweep(arch: str, count: int = 150, model: int = 0) -> Iterator[ForwardPlan]:
    """Plans of the usual sizes and of random ones."""
    sms = architecture(arch).sms
    for n in TOKENS:
        for d, vocab in SIZES:
            yield forward.plan(Gpu(arch, sms, model=model), n, d, vocab)
    draw = random.Random(7)
    for _ in range(count):
        n, d, vocab = (int(2 ** draw.uniform(0, top)) for top in (17, 13, 19))
        window = draw.choice((0, 0, draw.randint(1, vocab)))
        gpu = Gpu(arch, draw.choice((sms, 8, sms - 1)), model=model)
        yield forward.plan(gpu, n, 8 * ceil_div(d, 8), vocab, Limits(window))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_windows_cover_the_vocabulary_exactly_once(arch: str):
    for plan in sweep(arch):
        windows, tiles_per_window = plan.gemm.windows, plan.gemm.tiles_per_window
        tiles = ceil_div(plan.vocab, plan.config.cluster_rows)
        spans = [schedule.run_tiles(window, tiles_per_window, tiles) for window in range(windows)]
        assert spans[0][0] == 0
        assert spans[-1][1] == tiles
        assert all(end == following for (_, end), (following, _) in pairwise(spans))
        assert all(first < end for first, end in spans), f"{plan}: a window without tiles"
        assert (windows - 1) * plan.window < plan.vocab <= windows * plan.window


MODELS = [(arch, model) for arch, row in ARCHITECTURES.items() for model in range(len(row.data_sheets))]


@pytest.mark.parametrize(("arch", "model"), MODELS)
def test_groups_and_clusters_are_in_bounds(arch: str, model: int):
    row = architecture(arch)
    sheet = row.data_sheets[model]
    # One group of more tokens than `panel`, in tiles of 192 classes.
    all_in_one = forward.plan(Gpu(arch, row.sms, model=model), 2789, 5376, 262208)
    for plan in (*sweep(arch, model=model), all_in_one):
        grid, config = plan.gemm, plan.config
        columns = ceil_div(plan.n, config.cluster_columns)
        assert 1 <= grid.group <= columns
        assert 1 <= grid.clusters <= columns * grid.windows
        assert grid.clusters * config.cluster_m * config.cluster_n <= row.sms
        # The tokens of a group fit where the plan wants them, unless two columns of tiles do not.
        panel = 2 * plan.d * config.cluster_columns * grid.group
        beside = config.cluster_n > 1 and not gemm.is_high(config)
        most = sheet.panel_beside if beside else sheet.panel
        if not beside and grid.group == columns:
            most = sheet.panel_of_all
        assert grid.group <= 2 or panel <= most
        assert grid.group > 1 or columns == 1
        # Each split would need its own statistics.
        assert grid.splits == 1
        assert grid.paced in (0, 1)
        assert config.pace > 0 or not grid.paced


@pytest.mark.parametrize("model", range(2))
def test_clusters_are_not_spread_over_many_groups(model: int):
    """25047 tokens of 5120 features would take the fewest rounds with one window, in which each cluster has a
    column of its own, 130 MB of tokens at once: 1.48 times the GEMM on an H100."""
    gpu = H200._replace(model=model)
    for n, d, vocab in ((25047, 5120, 131072), (25023, 7168, 129280), (16350, 5376, 262208)):
        plan = forward.plan(gpu, n, d, vocab)
        config, grid = plan.config, plan.gemm
        at_once = min(ceil_div(n, config.cluster_columns), ceil_div(grid.clusters, grid.windows))
        assert at_once <= 2 * grid.group
        assert plan.rounds <= 1.02 * plan.ideal_rounds


def test_groups_have_no_small_rest_and_divide_the_clusters():
    assert cost.grouped(0, 4, 66) == cost.grouped(1, 4, 66) == 1
    assert cost.grouped(15, 15, 66) == 15  # all
    assert cost.grouped(43, 14, 66) == 11  # 11, 11, 11, 10
    assert cost.grouped(45, 14, 66) == 12  # instead of a fifth group of one
    assert cost.grouped(158, 14, 66) == 11  # and a fifteenth of four
    assert cost.grouped(128, 27, 74) == 26  # 37 does not fit, and 2 is far less
    for columns in range(1, 300):
        for clusters in (1, 33, 65, 66, 74):
            for most in range(2, 60):
                group = cost.grouped(columns, most, clusters)
                assert min(columns, 2) <= group <= min(columns, most)
                left = columns % group
                many = clusters % group == 0 and columns > cost.MANY_GROUPS * group
                assert not left or 2 * left >= group or many or group == -(-columns // -(-columns // most))


@pytest.mark.parametrize("model", range(2))
def test_few_tokens_have_all_sms(model: int):
    """Although fewer suffice by their tiles' own time: 86 to 104 SMs of an H200 read the weight of 20 to 35
    tokens at 94 to 97% of the rate of 126 to 132."""
    gpu = H200._replace(model=model)
    for n, d, vocab in ((20, 5376, 262208), (22, 3584, 256000), (95, 4096, 151936), (133, 2880, 201088)):
        grid = forward.plan(gpu, n, d, vocab).gemm
        assert grid.clusters >= 63, grid


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_busiest_cluster(arch: str):
    """`rounds` is what the schedule gives: counted here run by run."""
    for plan in sweep(arch, 40):
        windows, tiles_per_window, _, group, clusters, _ = plan.gemm
        columns = ceil_div(plan.n, plan.config.cluster_columns)
        tiles = ceil_div(plan.vocab, plan.config.cluster_rows)
        if columns * windows > 20_000:
            continue
        load = [0] * clusters
        for run in range(columns * windows):
            _, window = schedule.run_coord(run, columns, windows, group)
            first, end = schedule.run_tiles(window, tiles_per_window, tiles)
            load[run % clusters] += end - first
        assert sum(load) == columns * tiles
        # A last window that is shorter may spare the busiest cluster a few tiles.
        assert max(load) <= plan.rounds < max(load) + tiles_per_window * ceil_div(columns, clusters) + 1


@pytest.mark.parametrize("n", TOKENS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_chip_is_full(arch: str, n: int):
    """At 128 tokens as at 65536: the busiest cluster takes 3% longer than the even share rounded up to tiles,
    or than DRAM does, if that is the longer; of many rounds, no more than 5% longer than the even share with
    the time in which partials are merged.

    Except for products so small that windows of more than one tile save more time of merging.
    """
    gpu = whole(arch)

    def merging(plan: ForwardPlan, windows: int) -> int:
        return windows * plan.config.partials_per_window * ceil_div(plan.n, 8192) * cost.PARTIAL_CLOCKS

    def fullest(plan: ForwardPlan, most: float) -> float:
        """The least clocks, merging included, of windows with which the GEMM takes at most `most`."""
        tiles = ceil_div(plan.vocab, plan.config.cluster_rows)
        columns = ceil_div(plan.n, plan.config.cluster_columns)
        clusters = gpu.sms // plan.config.cluster_size
        found = []
        for length in range(1, tiles + 1):
            windows = ceil_div(tiles, length)
            clocks = gemm_clocks(gpu, plan, ceil_div(columns * windows, clusters) * length)
            if clocks <= most:
                found.append(clocks + merging(plan, windows))
        return min(found)

    for d, vocab in ((1024, 50257), (2048, 151936), (4096, 128256), (4096, 262144), (7168, 129280)):
        plan = forward.plan(gpu, n, d, vocab)
        taken, even, rounded_up = (
            gemm_clocks(gpu, plan, rounds)
            for rounds in (plan.rounds, plan.ideal_rounds, math.ceil(plan.ideal_rounds))
        )
        if even < 30_000:
            assert plan.rounds <= 2 * math.ceil(plan.ideal_rounds), plan
            continue
        merged = merging(plan, plan.gemm.windows)
        if taken > 1.03 * rounded_up:
            assert taken <= 1.13 * rounded_up, plan
            assert taken + merged <= fullest(plan, 1.03 * rounded_up), plan
        if plan.ideal_rounds >= 50:
            assert taken + merged <= 1.05 * even, plan


def test_fewer_sms_than_a_cluster_are_refused():
    one = Gpu("sm_90a", 1)
    for call in (
        lambda: forward.plan(one, 1, 64, 1000),
        lambda: forward.plan(one, 1000, 64, 1000),
        lambda: gemm.plan(one, H200.row.configs[-1].dweight[0], 1000, 64, 1000),
        lambda: backward.plan(one, Problem(100, 64, 1000), 0, NO_LIMITS),
    ):
        with pytest.raises(ValueError, match=r"^sms: got 1, want at least the 2 of a cluster"):
            call()


def test_a_small_vocabulary_leaves_no_cluster_two_windows_while_others_have_none():
    plan = forward.plan(H200, 128, 4096, 256 * 60)
    assert plan.gemm.tiles_per_window == 1
    assert plan.gemm.clusters == plan.gemm.windows == 60


def test_the_callers_window():
    """Whole tiles of it, and the tiles of few tokens, of which one width is chosen."""
    chosen = forward.choose_config(H200, 4096, 4096, 128256, keeps=False, window=1)
    assert chosen in H200.row.configs[0].tokens
    rows = chosen.cluster_rows
    for window in (1, rows - 1, rows, rows + 1, 3000, 128256, 10**9):
        plan = forward.plan(H200, 4096, 4096, 128256, Limits(window))
        tiles = min(ceil_div(window, rows), ceil_div(128256, rows))
        assert plan.gemm.tiles_per_window == tiles
        assert plan.gemm.windows == ceil_div(ceil_div(128256, rows), tiles)
        assert plan.config == chosen


def test_the_callers_config():
    widest = H200.row.configs[0].tokens[-1]
    for config in (*H200.row.forward_configs, dataclasses.replace(widest, cluster_n=2)):
        plan = forward.plan(H200, 4096, 4096, 128256, config=config)
        assert plan.config == config
        assert plan.gemm.clusters == 132 // (config.cluster_m * config.cluster_n)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tiles_fit_the_number_of_tokens(arch: str, keeps: bool):
    """Every number of tokens: all are covered, and no other tiles for so many take fewer clocks."""
    gpu = whole(arch)
    epilogue = epilogues.EXPONENTIALS if keeps else epilogues.STATISTICS
    widest = gpu.serving((), "keep" if keeps else "forward").widths
    for n in range(1, 5001):
        configs = forward.configs_for(gpu, n, keeps, 0)
        chosen = forward.ranked(gpu, n, 4096, 1000, keeps, 0)[0]
        assert chosen in configs
        assert forward.choose_config(gpu, n, 4096, 1000, keeps, 0) in configs
        columns = ceil_div(n, chosen.cluster_columns)
        assert 0 <= columns * chosen.cluster_columns - n < chosen.cluster_columns
        # Of all columns of tiles, for each of the vocabulary's rows.
        clocks = {
            config: ceil_div(n, config.cluster_columns)
            * cost.Gemm(gpu, config, n * 4096 * 1000).tile(4096, epilogue)
            / config.cluster_rows
            for config in configs
        }
        assert clocks[chosen] == min(clocks.values())
        if n <= (widest.columns if widest else gpu.row.configs[0].tokens[-1].cluster_columns):
            # The weight is then read once, by the narrowest tile that holds all tokens.
            assert chosen == next(config for config in configs if config.cluster_columns >= n)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("d", [8, 64, 512, 16384])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_of_equally_fast_tiles_those_side_by_side_the_widest_or_the_narrowest_that_holds_all_tokens(
    arch: str, d: int, keeps: bool
):
    """At depths where epilogues decide, columns of several widths may take the same clocks."""
    gpu = whole(arch)
    epilogue = epilogues.EXPONENTIALS if keeps else epilogues.STATISTICS
    for n in range(1, 2001, 7):
        configs = forward.configs_for(gpu, n, keeps, 0)
        columns = {config: ceil_div(n, config.cluster_columns) for config in configs}
        clocks = {
            config: columns[config]
            * cost.Gemm(gpu, config, n * d * 1000).tile(d, epilogue)
            / config.cluster_rows
            for config in configs
        }
        tied = [config for config in configs if clocks[config] == min(clocks.values())]
        most = max(config.cluster_n for config in tied)
        tied = [config for config in tied if config.cluster_n == most]
        several = [config for config in tied if columns[config] > 1]
        wanted = max(several, key=lambda config: config.tile_n) if several else tied[0]
        assert forward.ranked(gpu, n, d, 1000, keeps, 0)[0] == wanted, n


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_ranked_tiles_are_planned_to_be_faster(arch: str, keeps: bool):
    """With their windows; and what is chosen pads tokens of several columns by less than a fifth."""
    gpu, draw = whole(arch), random.Random(7)
    for _ in range(40):
        problem = Problem(
            round(1.01 ** draw.randint(350, 1040)), *draw.choice([(768, 50257), (4096, 128256)])
        )
        n, d, vocab = problem[:3]
        chosen = forward.choose_config(gpu, n, d, vocab, keeps, 0)
        ranked = forward.ranked(gpu, n, d, vocab, keeps, 0)[: forward.COMPARED]
        columns = ceil_div(n, chosen.cluster_columns)
        assert columns == 1 or columns * chosen.cluster_columns < 1.2 * n + 128
        seconds = {}
        for config in ranked:
            plan = forward.plan(gpu, n, d, vocab, config=config, kept=vocab if keeps else 0)
            seconds[config] = cost.forward_seconds(gpu, problem, plan)
        if n > ranked[0].cluster_columns:
            assert seconds[chosen] == min(seconds.values())


def test_what_bounds_a_large_forward_is_no_epilogue():
    n, d, vocab = 8192, 4096, 131072
    for gpu in (H200, H200._replace(model=1)):
        for config in gpu.row.configs_for(n, 0).forwards(False):
            bound = cost.Gemm(gpu, config, n * d * vocab).bound(vocab, n, d, epilogues.STATISTICS)
            assert bound.startswith(("MMAs", "L2")), bound


@pytest.mark.parametrize("keeps", [False, True])
def test_ragged_numbers_of_tokens_waste_little(keeps: bool):
    """On Hopper: at most a tenth over what the tokens would take in whole tiles of the best width, and a
    third of a column of the narrowest; of many tokens a twentieth, and of few one granule of tiles."""
    epilogue = epilogues.EXPONENTIALS if keeps else epilogues.STATISTICS
    for n in range(1, 5001):
        chosen = forward.ranked(H200, n, 4096, 1000, keeps, 0)[0]
        columns = ceil_div(n, chosen.cluster_columns)
        if n <= 192:
            assert columns * chosen.cluster_columns - n < 32
            continue
        configs = H200.row.configs_for(n, window=0).forwards(keeps)
        gemms = [cost.Gemm(H200, config, n * 4096 * 1000) for config in configs]
        # For each of the vocabulary's rows.
        clocks = {gemm.config: gemm.tile(4096, epilogue) / gemm.rows for gemm in gemms}
        least = min(clocks[gemm.config] / gemm.columns for gemm in gemms)
        narrowest = clocks[gemms[0].config]
        assert columns * clocks[chosen] <= 1.1 * n * least + narrowest / 3, n
        if n > 2000:
            assert columns * clocks[chosen] <= 1.05 * n * least, n


@pytest.mark.parametrize("n", [64, 96, 112, 128, 192, 256, 384, 512, 1024, 2048, 3000, 4096])
def test_few_tokens_fill_an_h100(n: int):
    """66 clusters: of the time that the forward's GEMM takes, at most a tenth is idle, unless DRAM takes as
    long; and of the gradients' rounds no more."""
    plan = forward.plan(H200, n, 4096, 128256)
    assert gemm_clocks(H200, plan, plan.rounds) <= 1.1 * gemm_clocks(H200, plan, plan.ideal_rounds)
    backward_plan = backward.plan(H200, Problem(n, 4096, 128256), 0, NO_LIMITS)
    for stripe in backward_plan.stripes[:1]:
        for grid, config, tokens in (
            (stripe.logits, backward_plan.tokens, n),
            (stripe.dhidden, backward_plan.dhidden, n),
            (stripe.dweight, backward_plan.dweight, 4096),
        ):
            runs = grid.windows * ceil_div(tokens, config.cluster_columns) * grid.splits
            assert ceil_div(runs, 66) <= 1.1 * runs / 66, grid


# ----------------------------------------------------------------------------------------------------------
# Tiles for few tokens, and for many


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_number_of_tokens_decides_between_tiles_for_few_and_for_many(arch: str):
    row = architecture(arch)
    few, many = row.configs[0], row.configs[-1]
    holds = few.tokens[-1].tile_n
    for n in (1, holds - 1, holds):
        assert row.configs_for(n, 0) is few
    for n in (holds + 1, 1000, 1 << 20):
        assert row.configs_for(n, 0) is many
    for n in (1, holds, holds + 1, 1 << 20):
        assert row.configs_for(n, 1) is row.configs_for(n, 1 << 30) is few
    # One tile of few tokens, which the CTAs of a cluster share; of many, two side by side or again one.
    sides = [{config.cluster_n for config in configs.tokens} for configs in row.configs]
    assert sides == ([{1}, {1, 2}] if arch == "sm_90a" else [{1}])
    for configs in row.configs:
        for side in (1, 2):
            widths = [config.tile_n for config in configs.tokens if config.cluster_n == side]
            assert widths == sorted(set(widths))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_calls_choose_among_the_configurations_for_their_number_of_tokens(arch: str):
    gpu, draw = whole(arch), random.Random(31)
    for _ in range(300):
        n, d, vocab = (int(2 ** draw.uniform(0, top)) for top in (16, 12, 18))
        window = draw.choice((0, 0, draw.randint(1, vocab)))
        problem, limits = Problem(n, 8 * ceil_div(d, 8), vocab), Limits(window)
        configs = gpu.row.configs_for(n, window)
        for kept in (0, vocab):
            widths = gpu.serving((), "keep" if kept else "forward").widths
            forwards = gpu.row.configs_for(n, window, widths).forwards(kept > 0)
            assert forward.plan(gpu, *problem[:3], limits, kept=kept).config in forwards
            plan = backward.plan(gpu, problem, kept, limits)
            assert plan.tokens in configs.tokens
            assert (plan.tokens, plan.dhidden) in configs.pairs
            assert plan.dweight in configs.dweight


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_with_the_callers_window_the_order_of_additions_does_not_depend_on_the_number_of_tokens(arch: str):
    """Windows, stripes, splits, and whatever of a tile says where a row's partials come from."""
    gpu = whole(arch)
    for d, vocab, window in ((64, 1000, 1), (4096, 128256, 3000), (2048, 151936, 10**9), (512, 50257, 700)):
        limits, seen = Limits(window), set()
        for n in (1, 31, 128, 192, 193, 257, 1000, 4096, 20480):
            problem = Problem(n, d, vocab)
            plans = [forward.plan(gpu, n, d, vocab, limits, kept=kept) for kept in (0, vocab)]
            stripes = backward.plan(gpu, problem, 0, limits)
            assert stripes.splits == 1
            assert not stripes.chunks
            seen.add(
                (
                    *((plan.gemm.windows, plan.gemm.tiles_per_window) for plan in plans),
                    tuple((stripe.first, stripe.columns) for stripe in stripes.stripes),
                    *(
                        dataclasses.replace(config, tile_n=32, stages=2)
                        for config in (*(plan.config for plan in plans), stripes.tokens)
                    ),
                )
            )
        assert len(seen) == 1, (d, vocab, window)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_workspace(arch: str):
    """8 bytes a row and partial, 4 a row for the target's logit, 8 a block of 8 rows, 8 for counters."""
    for plan in sweep(arch):
        partials = plan.gemm.windows * plan.config.partials_per_window
        bytes_ = 8 + 8 * plan.n * partials + 4 * plan.n + 8 * ceil_div(plan.n, 8)
        assert plan.workspace_floats * 4 == bytes_
        # One of each warpgroup, in each CTA of a cluster.
        assert plan.config.partials_per_window == plan.config.cluster_m * plan.config.warpgroups


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_partials_stay_in_their_budget(arch: str):
    for n in TOKENS:
        for d, vocab in SIZES:
            plan = forward.plan(whole(arch), n, d, vocab)
            partials = 8 * n * plan.gemm.windows * plan.config.partials_per_window
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
    for config in architecture(arch).token_configs:
        assert config.arch == arch
        assert config.shared_memory <= architecture(arch).shared_memory
        assert config.tmem_columns <= architecture(arch).tmem_columns


def test_hopper_configs_are_what_the_kernel_takes():
    for config in {*H200.row.token_configs, *H200.row.forward_configs}:
        assert config.tile_m % (64 * config.warpgroups // config.turns) == 0
        assert config.tile_n % 8 == 0
        assert config.tile_n <= 256
        assert config.tile_k * 2 == 128  # bytes of a row of the 128-byte swizzle
        # fp32 accumulators of a thread, of the 240 registers that it has.
        most = 192 if config in H200.row.token_configs else 208
        assert config.tile_m * config.tile_n * config.turns // (128 * config.warpgroups) <= most


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_few_variants_are_compiled(arch: str):
    """One compile serves all n, d and V: what `forward` chooses is always among `forward_configs`."""
    row = architecture(arch)
    assert all(len(configs.tokens) <= 9 for configs in row.configs)
    assert len(set(row.token_configs)) <= 15
    assert len(set(row.forward_configs)) <= 24
    assert {plan.config for plan in sweep(arch)} <= set(row.forward_configs)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_kernel_is_listed_twice(arch: str):
    """Configurations that serve few tokens and many are those of one kernel."""
    for dtype in ("bfloat16", "float16"):
        keys = kernels.kernels(arch, dtype, "int64")
        assert len(set(keys)) == len(keys)


def test_small_operands_are_not_paced():
    assert not forward.plan(H200, 4096, 256, 8192).gemm.paced
    assert forward.plan(H200, 8192, 4096, 131072).gemm.paced
    assert not forward.plan(H200, 128, 4096, 131072).gemm.paced  # nobody shares W's tiles


def test_short_stored_tiles_are_not_paced():
    """But in forwards that store nothing, in tiles of 128 x 128, which ask most of L2, and of two k tiles."""
    for d, keeps, paced in ((768, True, 0), (1016, True, 0), (1024, True, 1), (768, False, 1)):
        plan = forward.plan(H200, 3000, d, 151936, kept=151936 if keeps else 0)
        assert plan.gemm.paced == paced, (d, keeps)
    tilings = {(each.tile_m, each.tile_n): each for each in architecture("sm_90a").dweight_configs}
    for tile, n, paced in (
        ((128, 192), 300, 0),
        ((128, 192), 129, 0),
        ((128, 192), 128, 1),
        ((256, 192), 2559, 0),
        ((256, 192), 2560, 1),
        ((128, 128), 300, 1),
    ):
        assert gemm.plan_dweight(H200, tilings[tile], 128256, 4096, n).paced == paced, (tile, n)
    # dinput's k is all classes.
    assert gemm.plan(H200, tilings[256, 192], 768, 2458, 2000).paced == 0
    assert gemm.plan(H200, tilings[256, 192], 768, 2458, 50257).paced == 1


def test_plan_is_frozen_and_hashable():
    plan = forward.plan(H200, 128, 64, 1000)
    assert len({plan, dataclasses.replace(plan)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.n = 3  # pyright: ignore[reportAttributeAccessIssue]
    config = H200.row.token_configs[0]
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
        cells = (
            f"{n}, {d}, {vocab}",
            f"{plan.config.tile_m} x {plan.config.tile_n}",
            f"{plan.gemm.tiles_per_window}, {plan.gemm.windows}",
            plan.gemm.group,
            f"{plan.rounds}, {plan.ideal_rounds:.1f}",
            "yes" if plan.gemm.paced else "no",
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
            plan.config.tile_n,
            f"{plan.gemm.tiles_per_window}, {plan.gemm.windows}",
            plan.gemm.group,
            f"{plan.rounds}, {plan.ideal_rounds:.1f}",
            "yes" if plan.gemm.paced else "no",
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
