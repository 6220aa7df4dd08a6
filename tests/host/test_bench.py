"""The bench harness and the demo on shapes that a CPU does at once."""

import functools
import itertools
import json
import math
import sys
import time
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bench import (
    confident,
    errors,
    forwards,
    heads,
    host_time,
    kernels,
    partial,
    plot,
    providers,
    run,
    scaling,
    shapes,
    summary,
    terms,
    token_stats,
    yardstick,
)
from bench.inputs import Inputs, Reference, make_inputs
from cute_lce import reference
from cute_lce.arch import Gpu
from cute_lce.measure import records, timing
from cute_lce.measure.floor import Floor
from cute_lce.plan import kernels as plan_kernels
from examples import corpus, finetune, train_lm

CPU = torch.device("cpu")


# timing


def test_peak_counts_what_is_held_at_once_and_not_what_was_released():
    def call():
        a = torch.empty(2**20, dtype=torch.uint8)
        del a
        b = torch.empty(3 * 2**20, dtype=torch.uint8)
        c = torch.empty(2**20, dtype=torch.uint8)
        return b, c

    assert timing.peak_extra_bytes(call, CPU) == pytest.approx(4 * 2**20, rel=0.01)


def test_interleaved_times_alternate_and_tell_slow_from_fast():
    order = []
    small, large = torch.ones(8), torch.ones(3_000_000)

    def fast():
        order.append("fast")
        small.sum()

    def slow():
        order.append("slow")
        large.exp()

    quick, slow_time = timing.time_interleaved([fast, slow], CPU, budget_s=0.05)
    assert quick.ms < slow_time.ms
    assert slow_time.ms_min <= slow_time.ms <= slow_time.ms_max
    assert order == ["fast", "slow"] * (len(order) // 2)
    # Two unmeasured rounds, and three runs of at least one.
    assert len(order) >= 2 * (2 + 3)


def test_the_host_has_time_to_enqueue_a_short_call():
    # Of 5, 0.5 and 0.1 ms, for which the host takes 0.3, 0.3 and 0.05; a pass over the buffer takes 0.1 ms.
    assert timing.flushes([0.3], [5.0], 0.1) == 1
    assert timing.flushes([0.3], [0.5], 0.1) == 2
    assert timing.flushes([0.05, 0.3], [0.1, 0.4], 0.1) == 2
    assert timing.flushes([0.05], [0.1], 0.1) == 1
    assert timing.flushes([60.0], [0.1], 0.1) == timing.MOST_FLUSHES


def test_sustained_calls_are_back_to_back_and_in_random_order():
    order = []
    calls = [functools.partial(order.append, name) for name in ("a", "b", "c")]
    found = timing.time_sustained(calls, CPU, seconds=1e-3, rounds=20)
    assert len(found) == 3
    assert all(0 < t.ms_min <= t.ms <= t.ms_max for t in found)
    turns = [name for name, _ in itertools.groupby(order)]
    firsts = {tuple(turns[i : i + 3]) for i in range(3, len(turns) - 3, 3)}
    assert len(firsts) > 1, "always the same order"
    assert len(order) > 10 * len(turns), "not back to back"


def test_median_of_runs():
    assert timing.Timing.of_runs([3.0, 1.0, 2.0]) == timing.Timing(2.0, 1.0, 3.0)


def test_relative_rms_fails_for_zeros_and_for_nan():
    want = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    assert timing.relative_rms(want.float(), want) < 1e-7
    assert timing.relative_rms(torch.zeros(3), want) == pytest.approx(1.0)
    assert math.isnan(timing.relative_rms(torch.tensor([1.0, math.nan, 3.0]), want))


# single passes


@pytest.mark.parametrize(
    "shape", ["98,2880,201088", "185,4096,128256", "600,4096,50257", "8192,4096,131072", "32768,4096,262144"]
)
def test_passes_have_the_chosen_configuration_and_others_for_as_many_tokens(shape, monkeypatch):
    monkeypatch.setattr(kernels, "gpu_of", lambda device: Gpu("sm_90a", 132))
    (shape,) = shapes.parse(shape)
    calibration = kernels.Calibration(shape, CPU)
    compiled = set(plan_kernels.kernels("sm_90a", "bfloat16", "int64"))
    found = list(calibration.passes())
    names = ["forward", "keep", "dinput", "logits", "dweight"]
    # Logits of more than 12 GB are not kept.
    kept = shape.n * shape.vocab <= 6e9
    assert list(dict.fromkeys(name for name, _, _ in found)) == names[: None if kept else 1]
    assert len({(name, config) for name, config, _ in found}) == len(found)
    for name in {name for name, _, _ in found}:
        configs = [(config, chosen) for each, config, chosen in found if each == name]
        assert sum(chosen for _, chosen in configs) == 1
        assert len(configs) >= (2 if name == "dweight" else 3)
        for config, _ in configs:
            assert calibration.key(name, config) in compiled
            assert calibration.splits(config) >= 1


def test_rows_of_passes_have_the_keys_of_those_that_are_kept(monkeypatch):
    monkeypatch.setattr(kernels, "gpu_of", lambda device: Gpu("sm_90a", 132))
    monkeypatch.setattr(kernels, "Floor", lambda *arguments: lambda: time.sleep(2e-4))

    class Sleeping:
        """The passes, each another number of windows or splits."""

        def __init__(self, calibration, device):
            self.inputs = Inputs(*map(torch.zeros, (1, 1, 1, 1)))
            self.saved, self.parts = None, itertools.count(1)

        def forward(self, kind, config, windows=0):
            def run():
                time.sleep(1e-4)
                if kind == "keep":
                    self.saved = object()

            return run, windows or next(self.parts)

        def backward(self, kind, config):
            assert self.saved is not None, "no forward has kept anything"
            return self.forward(kind, config)

    monkeypatch.setattr(kernels, "Timed", Sleeping)
    (shape,) = shapes.parse("98,2880,201088")
    calibration = kernels.Calibration(shape, CPU)
    found: list[dict[str, Any]] = list(kernels.rows(calibration, CPU, 1e-4))
    passes = list(calibration.passes())
    assert [(row["pass"], row["tile_m"], row["tile_n"], row["chosen"]) for row in found] == [
        (name, config.tile_m, config.tile_n, chosen) for name, config, chosen in passes
    ]
    assert [row["parts"] for row in found] == list(range(1, len(passes) + 1))
    path = Path(kernels.__file__).parent / "results" / "tuning" / "h200_kernels.json"
    measured = records.read([path])
    origin = {"gpu", "versions", "date", "command"}
    for row in found:
        assert set(row) | origin == {*measured[0], "tile_m"}
        assert (row["n"], row["d"], row["vocab"]) == (98, 2880, 201088)
        assert row["ms"] > 0.1
        assert row["logits_floor_ms"] > 0.2
    assert all(set(row) == set(measured[0]) for row in measured)

    # What dlinear_weight's passes need beside them is the chosen forward that keeps.
    gradients = kernels.Calibration(shape, CPU, asked=("dweight",))
    found = list(kernels.rows(gradients, CPU, 1e-4, cool=True))
    assert [(row["pass"], row["chosen"]) for row in found if row["pass"] != "dweight"] == [("keep", True)]
    wanted = [each for each in passes if each[0] == "dweight"]
    assert [row["tile_n"] for row in found[1:]] == [config.tile_n for _, config, _ in wanted]
    for row in found:
        assert row["cool_ms"] > 0.1
        assert row["cool_logits_floor_ms"] > 0.2

    windows = kernels.Calibration(shape, CPU, (36, 1, 66))
    found = list(kernels.rows(windows, CPU, 1e-4, sustained=1e-3))
    assert all(row["sustained_ms"] > 0.1 and row["sustained_logits_floor_ms"] > 0.2 for row in found)
    # 1 is the plan's own number here.
    assert [(row["pass"], row["parts"], row["chosen"]) for row in found] == [
        ("forward", 1, True),
        ("forward", 36, False),
        ("forward", 66, False),
    ]


def test_forwards_times_changed_plans(monkeypatch):
    gpu = Gpu("sm_90a", 132).serving((), "forward")
    (shape,) = shapes.parse("32768,4096,262144")
    plan = forwards.planned(gpu, shape, {})
    changed = forwards.planned(gpu, shape, forwards.tried("tile=192x1,length=64,group=14,paced=0"))
    assert (changed.config.tile_n, changed.config.tile_m, changed.config.cluster_n) == (192, 128, 1)
    assert changed.gemm == plan.gemm._replace(windows=16, tiles_per_window=64, group=14, paced=0)
    assert forwards.planned(gpu, shape, {"group": "9"}).gemm == plan.gemm._replace(group=9)
    with pytest.raises(ValueError, match=r"got tile=193x1, want one of .*128x2x192"):
        forwards.planned(gpu, shape, {"tile": "193x1"})
    whole = forwards.planned(gpu, shape, {"length": "99999", "group": "99999"}).gemm
    assert (whole.windows, whole.tiles_per_window, whole.group) == (1, 1024, 158)
    for text, want in {
        "windows=3": "some of tile, length, group, paced, each once",
        "group=3,group=5": "some of tile, length, group, paced, each once",
        "group": "got group= in group, want a positive number",
        "length=0": "got length=0 in length=0, want a positive number",
        "group=-3": "got group=-3 in group=-3, want a positive number",
        "paced=7": "got paced=7 in paced=7, want 0 or 1",
    }.items():
        with pytest.raises(ValueError, match=want):
            forwards.tried(text)

    class Sleeping:
        def __init__(self, operands, loss, request, plan):
            self.statistics = lambda *operands: time.sleep(1e-4 * plan.gemm.group)

    monkeypatch.setattr(forwards, "KernelForward", Sleeping)
    monkeypatch.setattr(forwards, "Floor", lambda *arguments: lambda: time.sleep(2e-4))
    monkeypatch.setattr(forwards, "make_inputs", lambda *arguments: Inputs(*map(torch.zeros, (1, 1, 1, 1))))
    tries = {}, {"group": "40"}, {"group": "2", "paced": "0"}
    plans = [forwards.planned(gpu, shape, changes) for changes in tries]
    found: list[dict[str, Any]] = list(forwards.rows(shape, plans, CPU, 0.02, 3, 1e-3))
    assert [(row["group"], row["paced"], row["chosen"]) for row in found] == [
        (plan.gemm.group, 1, True),
        (40, 1, False),
        (2, 0, False),
    ]
    assert found[0]["ratio"] == 1.0
    assert found[1]["ratio"] > 1.5 > found[0]["ratio"] > found[2]["ratio"] > 0
    assert all(row["sustained_ms"] > 0.1 and row["sustained_floor_ms"] > 0.1 for row in found)


@pytest.mark.parametrize("module", [run, kernels, errors])
def test_results_go_to_a_file_in_a_folder_that_exists(module, tmp_path, monkeypatch, capsys):
    """Before anything is measured."""
    missing = tmp_path / "none"
    for path, want in (
        (tmp_path, "a folder, want a file"),
        (missing / "a.json", f"want a file in a folder that exists: {missing} does not"),
    ):
        monkeypatch.setattr("sys.argv", ["bench", "--out", str(path)])
        with pytest.raises(SystemExit) as stopped:
            module.main()
        assert stopped.value.code == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert f"--out: got {path}" in last
        assert last.endswith(want)


def test_passes_are_written_where_the_caller_says(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench.kernels"])
    with pytest.raises(SystemExit) as stopped:
        kernels.main()
    assert stopped.value.code == 2
    assert "--out" in capsys.readouterr().err.splitlines()[-1]


# shapes


def test_shapes_are_read_by_table_and_by_number():
    assert shapes.parse("forward") == shapes.FORWARD
    assert shapes.parse("3,4,5") == (shapes.Shape(3, 4, 5),)
    assert shapes.parse("3,4,5,weight")[0].frozen == "weight"
    assert str(shapes.parse("3,4,5,hidden")[0]) == "3,4,5,hidden"
    for text in ("big", "3,4", "3,4,0", "3,4,5,6", "3,4,x"):
        with pytest.raises(ValueError, match=r"^shape must"):
            shapes.parse(text)


def test_random_shapes_repeat_and_are_not_rounded():
    drawn = shapes.parse("random:7:400")
    assert drawn == shapes.parse("random:7:400")
    assert drawn[:40] == shapes.parse("random:7:40")
    assert drawn != shapes.parse("random:8:400")
    assert {(shape.d, shape.vocab) for shape in drawn} == set(shapes.ZOO.values())
    tokens = [shape.n for shape in drawn]
    assert shapes.LEAST_TOKENS <= min(tokens) <= 24
    assert 16384 < max(tokens) <= shapes.MOST_TOKENS
    # Log-uniformly: as many in each of the 11 doublings, and few that a tile divides.
    assert all(
        400 / 11 / 2 < sum(low <= n < 2 * low for n in tokens) < 400 / 11 * 2 for low in (16, 512, 8192)
    )
    assert sum(n % 128 == 0 for n in tokens) < 40


def test_the_floor_slices_tokens_evenly(monkeypatch):
    inputs = make_inputs(shapes.Shape(4100, 16, 70), torch.float32, "untrained", CPU)
    assert [len(rows) for rows in Floor(inputs.hidden, inputs.weight, True)._slices] == [2050, 2050]
    monkeypatch.setattr("cute_lce.measure.floor.FLOOR_TOKENS", 1000)
    assert [len(rows) for rows in Floor(inputs.hidden, inputs.weight, True)._slices] == [820] * 5


# run


@pytest.mark.parametrize("rows", ["untrained", "mixed", "confident"])
def test_reference_equals_autograd_in_float64(rows):
    shape = shapes.Shape(37, 64, 151)
    inputs = make_inputs(shape, torch.float32, rows, CPU)
    reference, every = Reference(inputs), torch.ones(37, dtype=torch.bool)
    hidden, weight = inputs.hidden.double().requires_grad_(), inputs.weight.double().requires_grad_()
    losses = F.cross_entropy(hidden @ weight.T, inputs.target, reduction="none")
    losses.backward(inputs.upstream.double())
    assert hidden.grad is not None
    assert weight.grad is not None
    assert torch.allclose(reference.loss("none", every), losses, rtol=1e-12)
    assert torch.allclose(reference.loss("mean", every), losses.mean(), rtol=1e-12)
    for got, want in (
        (reference.dh(inputs.upstream), hidden.grad[reference.rows]),
        (reference.dw(inputs.upstream), weight.grad[reference.columns]),
    ):
        assert timing.relative_rms(got, want) < 1e-10
    confident = (losses.detach() < 0.1).float().mean().item()
    assert confident == pytest.approx({"untrained": 0, "mixed": 0.5, "confident": 1}[rows], abs=0.1)


def test_floor_multiplies_every_token_with_the_padded_vocabulary(monkeypatch):
    shape = shapes.Shape(4096 + 8, 8, 70)
    inputs = make_inputs(shape, torch.float32, "untrained", CPU)
    products = []
    mm = torch.mm

    def counted(a, b, out):
        products.append((a.shape[0], a.shape[1], b.shape[1]))
        return mm(a, b, out=out)

    monkeypatch.setattr(torch, "mm", counted)
    Floor(inputs.hidden, inputs.weight, backward=True)()
    assert products == [
        *((2052, 8, 128), (2052, 8, 128)),
        *((2052, 128, 8), (2052, 128, 8)),
        *((128, 2052, 8), (128, 2052, 8)),
    ]
    products.clear()
    Floor(inputs.hidden, inputs.weight, backward=True, frozen="weight")()
    assert len(products) == 4
    products.clear()
    Floor(inputs.hidden, inputs.weight, backward=False)()
    assert products == [(2052, 8, 128), (2052, 8, 128)]


BENCH = ("--device", "cpu", "--seconds", "0.01", "--shapes", "tiny")


def test_a_run_writes_every_key_and_prints_its_table_last(tmp_path, capsys):
    out = tmp_path / "results.json"
    argv = [*BENCH, "--pass", "fwd", "fwd_bwd", "--reduction", "mean", "none", "--out", str(out)]
    argv += ["--providers", "cute_lce", "torch_eager_fp32ce", "--schedule", "recompute", "keep"]
    assert run.main(argv) == 0
    results = records.read([out])
    assert len(results) == 2 * 2 * (2 + 1)
    for result in results:
        assert sorted(result) == sorted(run.KEYS)
        assert 0 < result["ms_min"] <= result["ms"] <= result["ms_max"]
        assert result["floor_ms"] > 0
        assert result["sustained_s"] is None
        assert 0 < result["err_loss"] < 1e-2
        backward = result["pass"] == "fwd_bwd"
        for key in ("err_dh", "err_dw"):
            assert (0 < result[key] < 1e-2) if backward else result[key] is None
        assert (result["schedule"] is None) == (result["provider"] != "cute_lce")
        assert result["command"].endswith(" ".join(argv))
    asked = itertools.product(("fwd", "fwd_bwd"), ("mean", "none"))
    assert [(r["pass"], r["reduction"]) for r in results[::3]] == list(asked)
    assert capsys.readouterr().out.rstrip().endswith(run.table(results))

    assert run.main([*BENCH, "--append", "--out", str(out)]) == 0
    assert len(records.read([out])) == len(results) + 1
    capsys.readouterr()
    assert run.main(["--show", str(out)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(results) + 1


def test_a_sustained_run_has_the_same_keys_and_says_so(tmp_path, capsys):
    out = tmp_path / "results.json"
    argv = ["--device", "cpu", "--shapes", "tiny", "--sustained", "0.002", "--pass", "fwd", "fwd_bwd"]
    argv += ["--providers", "cute_lce", "torch_eager_fp32ce", "cce", "--out", str(out)]
    assert run.main(argv) == 0
    assert "cce: left out" in capsys.readouterr().out
    kept = records.read([out])
    missing = [r for r in kept if r["provider"] == "cce"]
    assert [r["pass"] for r in missing] == ["fwd", "fwd_bwd"]
    assert all(r["failed"].startswith("Unavailable: not installed") for r in missing)
    results = [r for r in kept if r["failed"] is None]
    assert [(r["pass"], r["provider"]) for r in results] == [
        *(("fwd", "cute_lce"), ("fwd", "torch_eager_fp32ce")),
        *(("fwd_bwd", "cute_lce"), ("fwd_bwd", "torch_eager_fp32ce")),
    ]
    for result in results:
        assert sorted(result) == sorted(run.KEYS)
        assert result["sustained_s"] == 0.002
        assert 0 < result["ms_min"] <= result["ms"] <= result["ms_max"]
        assert result["err_loss"] < 1e-2
        assert (result["err_dw"] is None) == (result["pass"] == "fwd")
    # All of a pass were measured beside the same floor.
    assert len({r["floor_ms"] for r in results}) == 2


def test_a_buffer_and_a_frozen_operand_are_measurements_of_their_own(tmp_path, capsys):
    """dW is in the buffer after one call; --resume tells these from each other."""
    out = tmp_path / "results.json"
    argv = [*BENCH, "--pass", "fwd_bwd", "--out", str(out), "--resume"]
    assert run.main([*argv, "--grad-weight-out", "none", "fp32", "bf16"]) == 0
    results = records.read([out])
    assert [result["grad_weight_out"] for result in results] == [None, "fp32", "bf16"]
    assert all(0 < result[key] < 1e-2 for result in results for key in ("err_dh", "err_dw"))
    assert "adds to fp32" in capsys.readouterr().out
    shape = f"{results[0]['n']},{results[0]['d']},{results[0]['vocab']}"
    frozen = ["--shapes", f"{shape},weight", "--grad-weight-out", "none", "fp32"]
    for _ in range(2):
        assert run.main([*argv, *frozen]) == 0
        kept = records.read([out])
        assert [(r["frozen"], r["grad_weight_out"]) for r in kept[3:]] == [
            ("weight", None),
            ("weight", "fp32"),
        ]
        assert all(result["err_dw"] is None for result in kept[3:])


def test_a_frozen_operand_has_no_gradient_and_no_product(tmp_path):
    out = tmp_path / "results.json"
    argv = ["--device", "cpu", "--seconds", "0.01", "--shapes", "48,32,517,weight", "--pass", "fwd_bwd"]
    assert run.main([*argv, "--out", str(out)]) == 0
    (result,) = records.read([out])
    assert result["err_dw"] is None
    assert 0 < result["err_dh"] < 1e-2


def test_a_provider_that_is_wrong_shows_a_large_error(tmp_path, monkeypatch):
    def half(request):
        loss = providers.PROVIDERS["torch_eager_fp32ce"](request)
        return lambda x, w, y: 0.5 * loss(x, w, y)

    monkeypatch.setitem(providers.PROVIDERS, "half", half)
    out = tmp_path / "results.json"
    assert run.main([*BENCH, "--providers", "half", "--pass", "fwd_bwd", "--out", str(out)]) == 0
    (result,) = records.read([out])
    for key in ("err_loss", "err_dh", "err_dw"):
        assert result[key] == pytest.approx(0.5, abs=0.01)


def test_a_provider_that_is_missing_or_fails_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    def broken(request):
        def loss(x, w, y):
            raise RuntimeError("no such kernel")

        return loss

    def missing(request):
        raise ImportError("no module")

    def nan(request):
        return lambda x, w, y: (x.sum() + w.sum()) * math.nan

    for make in (broken, missing, nan):
        monkeypatch.setitem(providers.PROVIDERS, make.__name__, make)
    out = tmp_path / "results.json"
    assert run.main([*BENCH, "--providers", "broken", "missing", "nan", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "broken: FAILED, RuntimeError: no such kernel" in printed
    assert "missing: left out, not installed" in printed
    first, second, measured = results = records.read([out])
    assert all(sorted(result) == sorted(run.KEYS) for result in results)
    assert first["failed"] == "RuntimeError: no such kernel"
    assert second["failed"] == "Unavailable: not installed (no module)"
    assert first["ms"] is first["floor_ms"] is first["err_loss"] is None
    assert measured["failed"] is None
    assert measured["err_loss"] == "nan"
    # The table says it again, and nothing measured is a failure of the run.
    assert run.main(["--show", str(out)]) == 0
    assert "broken: RuntimeError: no such kernel" in capsys.readouterr().out
    assert run.main([*BENCH, "--providers", "broken"]) == 1


def test_cases_that_are_timed_together_alternate_and_one_that_fails_is_left_out(
    tmp_path, monkeypatch, capsys
):
    """A provider that works when it is checked and fails while it is timed."""
    order = []

    def make(name, fails_at):
        def of_request(request):
            calls = itertools.count()

            def loss(x, w, y):
                order.append(name)
                if next(calls) == fails_at:
                    raise RuntimeError("out of luck")
                return (x @ w.T).logsumexp(1).mean()

            return loss

        monkeypatch.setitem(providers.PROVIDERS, name, of_request)

    for name, fails_at in (("a", None), ("b", 4), ("c", None)):
        make(name, fails_at)
    out = tmp_path / "results.json"
    argv = [
        *BENCH,
        "--quick",
        "--no-errors",
        "--repeat",
        "5",
        "--providers",
        "a",
        "b",
        "c",
        "--out",
        str(out),
    ]
    assert run.main(argv) == 0
    results = {r["provider"]: r for r in records.read([out])}
    assert results["b"]["failed"] == "RuntimeError: out of luck"
    assert results["a"]["floor_ms"] == results["c"]["floor_ms"] > 0
    assert 0 < results["a"]["ms_min"] <= results["a"]["ms"] <= results["a"]["ms_max"]
    assert "b: FAILED, RuntimeError: out of luck" in capsys.readouterr().out
    # Each is checked and weighed first. After the failure every repetition holds both that are left, in
    # either order.
    after = order[len(order) - order[::-1].index("b") :]
    timed = after[-2 * 5 * 5 :]
    turns = [tuple(timed[i : i + 2]) for i in range(0, len(timed), 2)]
    assert set(turns) == {("a", "c"), ("c", "a")}


def test_more_than_two_calls_are_timed_in_changing_order():
    order = []
    calls = [functools.partial(order.append, name) for name in "abc"]
    timing.time_interleaved(calls, CPU, budget_s=1.0, runs=2, max_reps=10)
    turns = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert all(sorted(turn) == list("abc") for turn in turns)
    assert len(turns) == 2 + 2 * 10
    assert len({turn[0] for turn in turns}) == 3


RANDOM_BENCH = ("--device", "cpu", "--quick", "--no-errors", "--shapes", "5,8,70", "6,8,70", "7,8,70")


def test_past_the_deadline_no_shape_is_begun_and_a_later_run_resumes(tmp_path, monkeypatch, capsys):
    out = tmp_path / "results.json"
    argv = [*RANDOM_BENCH, "--pass", "fwd", "fwd_bwd", "--out", str(out)]

    def kept():
        return [(r["n"], r["pass"], r["failed"]) for r in records.read([out])]

    # The clock is read at the start, and for each shape before it, at its beginning and at its end.
    clock = iter([0.0, 1.0, 2.0, 59.0, 60.0, 61.0])
    with monkeypatch.context() as patch:
        patch.setattr(run, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
        assert run.main([*argv, "--deadline", "60"]) == 0
    late = "not begun: 60 s had passed (--deadline)"
    steps = ("fwd", "fwd_bwd")
    assert kept() == [(n, step, None if n == 5 else late) for n in (5, 6, 7) for step in steps]
    assert "7,8,70 fwd mean cute_lce auto: not begun" in capsys.readouterr().out
    before = out.read_text().splitlines()[1]

    assert run.main([*argv, "--resume"]) == 0
    assert sorted(kept()) == [(n, step, None) for n in (5, 6, 7) for step in steps]
    assert out.read_text().splitlines()[1].rstrip(",") == before.rstrip(","), "it was measured again"
    whole = out.read_text()
    assert run.main([*argv, "--resume"]) == 0
    assert out.read_text() == whole
    assert run.main([*argv, "--append"]) == 0
    assert len(kept()) == 12


def test_a_run_that_is_killed_keeps_what_it_measured(tmp_path, monkeypatch):
    def ends(request):
        def loss(x, w, y):
            if len(x) == 6:
                raise KeyboardInterrupt
            return (x @ w.T).logsumexp(1).mean()

        return loss

    monkeypatch.setitem(providers.PROVIDERS, "ends", ends)
    out = tmp_path / "results.json"
    with pytest.raises(KeyboardInterrupt):
        run.main([*RANDOM_BENCH, "--providers", "ends", "--out", str(out)])
    (result,) = records.read([out])
    assert (result["n"], result["failed"]) == (5, None)
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize("lost", [False, True])
def test_what_fails_for_a_whole_shape_is_said_of_each_case(lost, tmp_path, monkeypatch):
    """A floor that does not fit; a call after which the device answers no more."""
    made = run.Floor

    def floor(hidden, weight, backward, frozen):
        if len(hidden) == 6:
            raise run.DeviceLost("illegal address") if lost else torch.OutOfMemoryError("too much")
        return made(hidden, weight, backward, frozen)

    monkeypatch.setattr(run, "Floor", floor)
    out = tmp_path / "results.json"
    assert run.main([*RANDOM_BENCH, "--providers", "cute_lce", "torch_eager_fp32ce", "--out", str(out)]) == 0
    found = {(r["n"], r["provider"]): r["failed"] for r in records.read([out])}
    for provider in ("cute_lce", "torch_eager_fp32ce"):
        assert found[5, provider] is None
        if lost:
            assert found[6, provider] == "not begun: the device was lost (illegal address)"
            assert found[7, provider] == "not begun: the device was lost (illegal address)"
        else:
            assert found[6, provider] == "OutOfMemoryError: too much"
            assert found[7, provider] is None


def test_torch_compile_has_a_graph_of_constant_sizes_for_each_shape(monkeypatch):
    graphs = []

    def backend(graph, inputs):
        assert all(isinstance(value, torch.Tensor) for value in inputs), "a size is an input"
        assert all(isinstance(size, int) for value in inputs for size in value.shape)
        graphs.append([tuple(value.shape) for value in inputs])
        return graph

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    for n in range(3, 15):  # torch would not compile a function more than eight times.
        inputs = make_inputs(shapes.Shape(n, 8, 70), torch.float32, "untrained", CPU)
        loss = providers.make("torch_compile", providers.Request(logits=n * 70))
        for _ in range(3):
            loss(inputs.hidden, inputs.weight, inputs.target)
        assert len(graphs) == n - 2
        assert (n, 8) in graphs[-1]


def test_an_ample_workspace_holds_the_logits_of_each_shape(tmp_path):
    out = tmp_path / "results.json"
    argv = ["--device", "cpu", "--quick", "--no-errors", "--shapes", "7,8,70", "900,8,7000"]
    assert run.main([*argv, "--workspace-mb", "ample", "20", "--out", str(out)]) == 0
    assert [r["workspace_mb"] for r in records.read([out])] == [513, 20, 526, 20]
    assert shapes.ample(shapes.Shape(9000, 8, 70000)) > 2 * 9000 * 70000 / 2**20 + 512
    assert shapes.ample(shapes.Shape(4096, 4096, 131072)) > 2173  # what its grad_in_forward asks for


def test_bars_of_the_tables_are_found():
    for table, name in ((shapes.FORWARD, "fwd"), (shapes.BACKWARD, "fwd_bwd")):
        for shape in table:
            for budget, wanted in shape.bars:
                result = {"provider": "cute_lce", "n": shape.n, "d": shape.d, "vocab": shape.vocab}
                result |= {"pass": name, "workspace_mb": budget}
                result["err_dw"] = None if shape.frozen or name == "fwd" else 1e-3
                assert run.bar(result) == wanted


def test_a_wrong_option_is_refused_by_name(capsys):
    for argv, named in (
        (["--shapes", "1,2"], "shape must be"),
        (["--providers", "nobody"], "'nobody'"),
        (["--append"], "--append needs --out"),
        (["--resume"], "--resume needs --out"),
        (["--repeat", "0"], "--repeat: got 0"),
        (["--repeat", "3", "--sustained", "1"], "--repeat: got 3"),
        (["--workspace-mb", "much"], "much"),
    ):
        with pytest.raises(SystemExit):
            run.main(["--device", "cpu", *argv])
        assert named in capsys.readouterr().err


# summary and plot


def result_of(step, n, times, provider="cute_lce", floor_ms=1.0, **fields):
    result = dict.fromkeys(run.KEYS) | {"gpu": "GPU", "provider": provider, "pass": step, "dtype": "bf16"}
    result |= {"reduction": "mean", "n": n, "d": 64, "vocab": 1000, "date": "2026-11-21T20:00:00+00:00"}
    result |= {"schedule": "auto" if provider == "cute_lce" else None}
    return result | {"floor_ms": floor_ms, "ms": floor_ms * times} | fields


KEPT = [
    result_of("fwd", 129, 0.9),
    result_of("fwd", 5000, 1.6, workspace_mb=300),
    # More workspace counts, wherever it stands; other schedules and dtypes do not.
    result_of("fwd", 5000, 1.0, workspace_mb=4000),
    result_of("fwd", 5000, 1.7),
    result_of("fwd", 5000, 3.0, schedule="recompute", workspace_mb=9000),
    result_of("fwd", 5000, 3.0, dtype="fp16", workspace_mb=9000),
    result_of("fwd", 5000, 3.0, sustained_s=0.4, workspace_mb=9000),
    result_of("fwd", 100, 1.101),
    result_of("fwd", 20, 1.8, floor_ms=0.1),
    result_of("fwd_bwd", 16, 1.12),
    result_of("fwd_bwd", 511, 1.2),
    result_of("fwd_bwd", 512, 1.0),
    result_of("fwd_bwd", 600, 1.04, reduction="none"),
    result_of("fwd_bwd", 700, 9.0, err_dh=1e-3, err_dw=None),
    result_of("fwd", 129, 1.0, provider="torch_compile"),
    result_of("fwd", 5000, 0.95, provider="torch_compile"),
    result_of("fwd", 20, 1.0, provider="torch_compile", floor_ms=0.1),
    result_of("fwd_bwd", 600, 1.1, provider="torch_compile"),  # of another reduction
    result_of("fwd_bwd", 511, 1.5, provider="quack_chunk4k"),
    result_of("fwd_bwd", 511, 1.25, provider="quack_chunk2k"),
    result_of("fwd_bwd", 512, 1.0, provider="quack_chunk2k")
    | {"ms": None, "floor_ms": None, "failed": "E: no"},
]


def test_the_summary_has_a_row_for_each_range_of_tokens():
    rows = {row[0]: row[1:] for row in summary.range_rows(KEPT)}
    long, short = ["0.98, 1.08", "0.95, 1.02"], ["0", "-", "-"]
    assert rows == {
        "forward, 129 and more tokens": ["2", "0.949", "1.000", "5000, 64, 1000", *long, *short, "yes"],
        "forward, 1 to 128 tokens": [
            *("1", "1.101", "1.101", "100, 64, 1000", "1.10", "1.00"),
            *("1", "80", "20, 64, 1000", "no"),
        ],
        "forward + backward, 16 to 128 tokens": [
            *("1", "1.120", "1.120", "16, 64, 1000", "1.12", "1.03", *short, "yes")
        ],
        "forward + backward, 129 to 511 tokens": [
            *("1", "1.200", "1.200", "511, 64, 1000", "1.15", "1.05", *short, "no")
        ],
        "forward + backward, 512 and more tokens": [
            *("2", "1.020", "1.040", "600, 64, 1000", "1.01, 1.06", "0.98, 1.02", *short, "no")
        ],
    }
    # 70 us above the floor are allowed, 71 are not.
    for above, met in ((0.070, "yes"), (0.0711, "no")):
        call = result_of("fwd", 20, 1.0, floor_ms=0.1, ms=0.1 + above)
        assert summary.range_rows([call])[1][-1] == met


def test_the_summary_compares_with_the_fastest_pipeline_of_each_peer():
    rows = {row[0]: row[1:] for row in summary.peer_rows(KEPT)}
    assert rows == {
        "torch_compile, forward, fewer than 512 tokens": [
            *("1", "0.900", "0.900", "129, 64, 1000", "1.05"),
            *("1", "1.800", "20, 64, 1000", "yes"),
        ],
        "torch_compile, forward, 512 and more tokens": [
            *("1", "1.053", "1.053", "5000, 64, 1000", "1.03", "0", "-", "-", "no")
        ],
        "quack, forward + backward, fewer than 512 tokens": [
            *("1", "0.960", "0.960", "511, 64, 1000", "1.05", "0", "-", "-", "yes")
        ],
    }

    # Short calls alone meet no bar and miss none.
    short = [
        result_of("fwd", 20, times, who, 0.1) for times, who in ((2.0, "cute_lce"), (1.0, "torch_compile"))
    ]
    ((*_, met),) = summary.peer_rows(short)
    assert met == "-"


def test_the_summary_prints_markdown_and_what_failed(tmp_path, capsys):
    path = tmp_path / "kept.json"
    records.write(path, KEPT)
    assert summary.main([str(path)]) == 0
    printed = capsys.readouterr().out
    assert [line[:3] for line in printed.splitlines()].count("| -") == 2
    assert "quack_chunk2k, 1 times, first at 512, 64, 1000, forward + backward: E: no" in printed
    records.write(path, [])
    assert summary.main([str(path)]) == 1


def test_the_plot_has_ours_and_the_peers_in_both_panels(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    figure = plot.draw(KEPT)
    forward, both = figure.axes
    assert [axes.get_title() for axes in (forward, both)] == ["forward", "forward + backward"]
    assert forward.get_xscale() == forward.get_yscale() == "log"
    # For each series the points of long calls, then those of short ones.
    points = [np.asarray(collection.get_offsets()).tolist() for collection in forward.collections]
    assert sorted(points[0]) == [[100, 1.101], [129, 0.9], [5000, 1.0]]
    assert points[1] == [[20, 1.8]]
    assert sorted(points[2]) == [[129, 1.0], [5000, 0.95]]
    markers = {line.get_label(): (line.get_marker(), line.get_linestyle()) for line in both.get_lines()}
    assert markers["cute_lce"] == ("o", "-")
    assert len(set(markers.values())) == len(markers)
    low, high = forward.get_ylim()
    assert low < 0.9 < 1.2 < high < 1.8
    assert [text.get_text() for text in forward.texts] == ["1.8"]
    assert "GPU, bf16, 8 shapes, 2026-11-21" in figure.get_suptitle()

    kept = tmp_path / "gpu_random.json"
    records.write(kept, KEPT)
    for name in ("a.png", "a.svg"):
        one, again = tmp_path / "one" / name, tmp_path / "again" / name
        assert plot.main([str(kept), "--out", str(one)]) == plot.main([str(kept), "--out", str(again)]) == 0
        assert len(one.read_bytes()) > 10_000
        assert one.read_bytes() == again.read_bytes()
    monkeypatch.setattr(plot, "FIGURES", tmp_path / "figures")
    capsys.readouterr()
    assert plot.main([str(kept)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "figures" / "gpu_random.png")
    with pytest.raises(ValueError, match=r"want bench\.run's of one"):
        plot.draw([*KEPT, result_of("fwd", 20, 1.0, gpu="other GPU")])


# errors


ERRORS = ("--device", "cpu", "--shapes", "60,32,403", "--regimes", "confident", "jump_100")


def test_errors_of_ours_are_within_their_bars_and_those_of_bf16_logits_are_not(tmp_path, capsys):
    out = tmp_path / "errors.json"
    argv = [*ERRORS, "--providers", "cute_lce", "torch_eager_bf16ce", "cce", "--out", str(out)]
    assert errors.main(argv) == 0
    printed = capsys.readouterr().out
    assert printed.rstrip().endswith("ours are within their bars")
    results = records.read([out])
    assert all(sorted(result) == sorted(errors.KEYS) for result in results)
    # The yardstick, ours three times, eager torch, a peer that is not there: regimes of 2 and of 3 parts.
    assert len(results) == 2 * (5 * (2 + 3) + 2)
    for result in results:
        assert result["command"].endswith(" ".join(argv))
        if result["provider"] == "cce":
            assert result["failed"].startswith("Unavailable: not installed")
            continue
        assert (result["err_dh"] is None) == (result["part"] == "no target")
        assert 0 < result["err_dw"] < 2
        if result["provider"] == "cute_lce":
            assert result["x_dw"] <= errors.BARS["err_dw"]
        elif result["provider"] == "torch_eager_bf16ce":
            assert result["x_dw"] > 2 * errors.BARS["err_dw"] or result["part"] == "others"
    kept = [result["kept"] for result in results if result["provider"] == "cute_lce"]
    assert {0 if k is None else round(2 * k / 403) for k in kept} == {0, 1, 2}

    assert errors.main(["--show", str(out)]) == 0
    table = capsys.readouterr().out.strip()
    assert table in printed
    assert "cce: Unavailable: not installed" in table
    assert errors.main(["--show", str(out), "--parts"]) == 0
    assert "no target" in capsys.readouterr().out
    # bench.run's table leaves out what is not its own.
    assert run.main(["--show", str(out)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize("fault", ["rounded", "nan", "zero dw", "raises"])
def test_errors_end_with_status_1_if_ours_are_wrong(fault, monkeypatch, capsys):
    def wrong(request):
        def loss(x, w, y):
            if fault == "raises":
                raise RuntimeError("no such kernel")
            if fault == "zero dw":
                w = w.detach() + 0 * w
            found = F.cross_entropy(F.linear(x.float(), w.float()), y, reduction=request.reduction)
            if fault == "rounded":
                return found.bfloat16().float()
            return found * math.nan if fault == "nan" else found

        return loss

    monkeypatch.setitem(providers.PROVIDERS, "cute_lce", wrong)
    assert errors.main([*ERRORS, "--providers", "cute_lce", "--reduction", "none"]) == 1
    missed = capsys.readouterr().out.partition("OURS MISS THEIR BARS")[2]
    named = {"rounded": "err_loss", "nan": "err_dh nan", "zero dw": "err_dw", "raises": "no such kernel"}
    assert named[fault] in missed
    assert fault != "rounded" or "err_dh" not in missed


def test_the_yardstick_is_fp32_logits_with_dlogits_rounded_once():
    problem = yardstick.Problem(shapes.Shape(40, 64, 131), "mixed", "none", CPU)
    hidden, weight = (t.double().requires_grad_() for t in (problem.hidden, problem.weight))
    losses = F.cross_entropy(hidden @ weight.T, problem.target, reduction="none")
    losses.backward(problem.upstream.double())
    assert hidden.grad is not None
    assert weight.grad is not None
    exact = problem.errors((losses.detach(), hidden.grad, weight.grad))["all"]
    assert all(error is not None and error < 1e-12 for error in exact.values())
    found = problem.yardstick["all"]
    assert found["err_loss"] is not None
    assert found["err_dh"] is not None
    assert found["err_dw"] is not None
    assert 1e-9 < found["err_loss"] < 1e-6
    assert 1e-3 < found["err_dh"] < 4e-3
    assert 1e-3 < found["err_dw"] < 4e-3


# the demo


TINY = "--steps 24 --batch 2 --length 16 --d 32 --layers 1 --heads 2 --vocab 400 --evaluations 2"


@pytest.fixture
def tiny_library(tmp_path, monkeypatch):
    """A standard library of sixty small files, and one folder that must not be read."""
    root = tmp_path / "lib"
    for i in range(60):
        path = root / ("pack" if i % 2 else "") / f"module_{i:02}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        body = "\n".join(f"def function_{k}(x):\n    return x + {k * i}\n" for k in range(12))
        path.write_text(body, encoding="utf-8")
    skipped = root / "site-packages" / "other.py"
    skipped.parent.mkdir()
    skipped.write_text("raise SystemExit\n", encoding="utf-8")
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(root))
    return root


def test_files_are_sorted_and_others_packages_are_left_out(tiny_library):
    files = [f.as_posix() for f in corpus.source_files(tiny_library)]
    assert files == sorted(files)
    assert len(files) == 60
    assert not any("site-packages" in f for f in files)


def test_the_vocabulary_gives_the_text_back(tiny_library):
    texts = corpus.read_texts(tiny_library, corpus.source_files(tiny_library))
    tokenizer = corpus.build_tokenizer(texts, 400)
    text = "def f(x):\n    return 'ü€' + x\n"
    assert tokenizer.decode(corpus.encode(tokenizer, [text]).tolist()[:-1]) == text
    again = corpus.build_tokenizer(texts, 400)
    assert tokenizer.get_vocab() == again.get_vocab()


def test_the_demo_agrees_with_torch_and_writes_its_files(tiny_library, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    assert train_lm.main([*TINY.split(), "--device", "cpu", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "the two runs agree" in printed
    assert str(out / "curves.png") in printed
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len((out / "losses.csv").read_text().splitlines()) == 1 + 24
    summary = json.loads((out / "summary.json").read_text())
    fused, canonical = summary["runs"]
    assert summary["verdict"]["first_losses"] <= 1e-5
    assert [step for step, _ in fused["valid"]] == [12, 24]
    assert fused["losses"][-1] < fused["losses"][0] - 0.5
    assert fused["loss_peak_mib"] > 0
    assert canonical["tokens_per_second"] > 0

    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore

    again = tmp_path / "again"
    train_lm.main([*TINY.split(), "--device", "cpu", "--out", str(again)])
    assert (again / "losses.csv").read_text() == (out / "losses.csv").read_text()


@pytest.mark.parametrize("fault", ["scaled gradient", "nan"])
def test_the_demo_fails_when_the_loss_is_wrong(fault, tiny_library, tmp_path, monkeypatch, capsys):
    right = train_lm.FusedHead.forward

    def wrong(self, input, target):
        loss = right(self, input, target)
        if fault == "nan":
            return loss * math.nan
        return loss + (0.3 * loss - (0.3 * loss).detach())

    monkeypatch.setattr(train_lm.FusedHead, "forward", wrong)
    status = train_lm.main([*TINY.split(), "--device", "cpu", "--out", str(tmp_path)])
    assert status == 1
    assert "DISAGREE" in capsys.readouterr().out


def test_verdict_bounds():
    def one(losses, valid, norm=1.0):
        return train_lm.Run("x", losses=list(losses), gradient_norms=[norm] * 30, valid=[(1, valid)])

    base = one([5.0] * 30, 4.0)
    assert train_lm.Verdict.of(base, base).good
    assert not train_lm.Verdict.of(one([5.0] * 19 + [5.0001] + [5.0] * 10, 4.0), base).good
    assert train_lm.Verdict.of(one([5.0] * 20 + [5.0001] + [5.0] * 9, 4.0), base).good
    assert not train_lm.Verdict.of(one([5.0] * 30, 4.03), base).good
    assert not train_lm.Verdict.of(one([5.0] * 30, 4.0, norm=1.02), base).good
    assert not train_lm.Verdict.of(one([5.0] * 30, math.nan), base).good
    never_fell = train_lm.Verdict.of(one([5.0] * 30, 5.5), one([5.0] * 30, 5.5))
    assert never_fell.agrees
    assert not never_fell.good


# host_time


def test_host_time_writes_every_key_and_a_line_for_each_provider(tmp_path, capsys):
    out = tmp_path / "host_time.json"
    argv = ["--device", "cpu", "--shape", "8,16,64", "--groups", "1"]
    argv += ["--providers", "cute_lce", "torch_eager_bf16ce", "cce", "--out"]
    assert host_time.main([*argv, str(out)]) == 0
    printed = capsys.readouterr().out
    assert "cce: left out, Unavailable: not installed" in printed
    results = records.read([out])
    assert len(results) == (len(host_time.OURS) + 1) * 3
    for result in results:
        assert sorted(result) == sorted(host_time.KEYS)
        assert 0 < result["us_min"] <= result["us"] <= result["us_max"]
        assert result["command"].endswith(" ".join([*argv, str(out)]))
    assert [result["pass"] for result in results[:3]] == ["fwd", "fwd_grad", "bwd"]
    table = host_time.table(results)
    assert len(table.splitlines()) == 1 + len(host_time.OURS) + 1
    assert printed.rstrip().endswith(table)
    assert host_time.main(["--show", str(out)]) == 0
    assert capsys.readouterr().out.rstrip() == table


def test_host_time_is_that_of_one_call():
    made = []

    def make(count):
        made.append(count)
        return [lambda: time.sleep(1e-3)] * count

    timing = host_time.host_microseconds(make, CPU, groups=2)
    assert 800 < timing.ms < 20_000
    assert timing.ms_min <= timing.ms <= timing.ms_max
    # A warm-up, and three runs of two groups.
    assert made == [3] + [host_time.GROUP] * 6


def test_host_times_backward_is_timed_without_its_forward():
    slept = []

    def forward():
        slept.append("forward")
        return torch.ones(())

    calls = host_time.Calls(forward, forward, lambda loss: slept.append("backward"))
    timed = calls.timed("bwd", 3)
    assert slept == ["forward"] * 3
    for call in timed:
        call()
    assert slept == ["forward"] * 3 + ["backward"] * 3


def test_host_times_bars():
    ours = {"provider": "cute_lce", "dtype": "bf16", "launches": 24}
    assert host_time.bar(ours | {"pass": "fwd"}) == 40
    assert host_time.bar(ours | {"pass": "fwd_grad"}) == 60
    assert host_time.bar(ours | {"pass": "bwd"}) == 100 + 5 * 24
    assert host_time.bar(ours | {"pass": "bwd", "launches": None}) is None
    assert host_time.bar(ours | {"pass": "fwd", "provider": "cce"}) is None
    for group in ("tp", "sp"):
        both = [host_time.bar(ours | {"group": group, "pass": name}) for name in ("fwd_grad", "bwd")]
        assert sum(each or 0 for each in both) == 400


def test_fine_tuning_on_masked_prompts_agrees_with_torch(tiny_library, capsys, tmp_path):
    sizes = "--steps 4 --batch 2 --length 32 --d 32 --heads 2 --vocab-size 700 --text-vocab-size 400"
    out = tmp_path / "finetune.json"
    assert finetune.main([*sizes.split(), "--device", "cpu", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "torch takes" in printed
    results = records.read([out])
    assert [result["provider"] for result in results] == ["fused", "torch"]
    for result in results:
        first, *_, last = result["losses"]
        said = f"{result['provider']:6} loss {first:.4f} -> {last:.4f}, {result['ms']:.2f} ms a step"
        assert said in printed
        assert (result["steps"], len(result["losses"]), result["vocab"]) == (4, 4, 700)
        assert "--out" in result["command"]
    assert finetune.main([*sizes.split(), "--device", "cpu", "--tolerance", "-1"]) == 1


def test_terms_are_measured_beside_the_call_without(tmp_path):
    out = tmp_path / "terms.json"
    given = [
        "none",
        "softcap=30",
        "entropy,logprob,temperature=0.7",
        "label_smoothing=0.1,weight,token_weight",
        "log_cap=3",
    ]
    options = (
        "--shapes 16,8,40 --pass fwd_bwd --reduction mean none --quick --device cpu --providers cute_lce"
    )
    assert run.main([*options.split(), "--terms", *given, "--out", str(out)]) == 0
    results = records.read([out])
    assert [result["terms"] for result in results] == [None, *given[1:]] * 2
    assert all(result["ms"] > 0 and result["failed"] is None for result in results)
    assert all((result["err_loss"] is None) == (result["terms"] is not None) for result in results)


def test_heads_are_timed_beside_their_gemms_and_those_of_one_pass(tmp_path, capsys):
    out = tmp_path / "heads.json"
    given = ["--shapes", "24,8,70", "--heads", "1", "3", "--seconds", "0.01", "--device", "cpu"]
    assert heads.main([*given, "--out", str(out)]) == 0
    results = records.read([out])
    assert [(r["heads"], r["pass"], r["way"]) for r in results] == list(
        itertools.product((1, 3), heads.PASSES, heads.WAYS)
    )
    assert all(0 < r["ms_min"] <= r["ms"] <= r["ms_max"] for r in results)
    assert all((r["extra_mib"] is None) == (r["way"] not in heads.OURS) for r in results)
    capsys.readouterr()
    assert heads.main(["--show", str(out)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 4
    with pytest.raises(SystemExit):
        heads.main(["--heads", "0"])
    assert "--heads: got 0, want at least 1" in capsys.readouterr().err


def test_both_ways_of_heads_are_the_sum_of_their_losses():
    hidden, weights = torch.randn(24, 8), [torch.randn(V, 8) for V in (70, 90)]
    target = torch.stack([torch.randint(70, (24,)), torch.randint(90, (24,))], 1)
    want = sum(F.cross_entropy(hidden @ w.T, y) for w, y in zip(weights, target.unbind(1), strict=True))
    for way in heads.OURS:
        found = heads.losses_of(way, {"schedule": "recompute"})(hidden, weights, target)
        torch.testing.assert_close(found, want)


def test_the_sum_of_others_gives_a_tokens_numbers():
    """Where nothing cancels: float64's autograd; where the target leads and where another class does."""
    inputs = make_inputs(shapes.Shape(40, 16, 300), torch.float64, "untrained", CPU)
    operands = 3 * inputs.hidden, inputs.weight, inputs.target
    logits = operands[0] @ operands[1].T
    operands[2][:10] = logits[:10].argmax(1)
    (numbers, gradients), (wanted, by_autograd) = (
        way(*operands, 0.8) for way in (confident.by_others, confident.by_torch)
    )
    for got, want in (
        *zip(numbers, wanted, strict=True),
        *zip(*map(dict.values, (gradients, by_autograd)), strict=True),
    ):
        torch.testing.assert_close(got, want)


def test_confident_rows_are_as_precise_by_the_sum_of_others(tmp_path, capsys):
    out = tmp_path / "confident.json"
    assert confident.main(["--shape", "24,128,2000", "--out", str(out)]) == 0
    results = records.read([out])
    assert len(results) == len(confident.TEMPERATURES) * len(confident.WAYS)
    found = {(result["temperature"], result["way"]): result for result in results}
    for name in ("err_logprob", "err_entropy", "err_dh_both"):
        assert 0 < found[0.7, "others alone"][name] < 1e-5
        assert found[0.7, "cute_lce"][name] > 100 * found[0.7, "others alone"][name]
    assert all(0 < result["err_dh_both_all"] < 1e-5 for result in results)
    capsys.readouterr()
    assert confident.main(["--show", str(out)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(results)


@pytest.mark.parametrize(
    ("main", "option"), [(confident.main, "--shape"), (partial.main, "--shape"), (scaling.main, "--overlap")]
)
@pytest.mark.parametrize("text", ["8,8", "8,8,x", "8,0,8", "forward", "8,8,8,weight"])
def test_a_wrong_shape_is_refused(main, option, text, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([option, text])
    assert stopped.value.code == 2
    assert "shape must" in capsys.readouterr().err.splitlines()[-1]


TERMS = "logprob,entropy,temperature=0.7"


LOSS_TERMS = "z_loss=0.1,label_smoothing=0.2,softcap=3,linear_bias,token_weight,weight"


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("text", [LOSS_TERMS, "token_weight,denominator=7", "label_smoothing=0.1"])
def test_torchs_loss_with_terms_is_the_references(text, reduction):
    inputs = make_inputs(shapes.Shape(23, 8, 101), torch.float32, "mixed", CPU)
    operands = inputs.hidden, inputs.weight, inputs.target
    request = providers.Request(reduction)
    found = terms.loss("torch_eager_fp32ce", text, request, *operands[:2])(*operands)
    given = terms.arguments(terms.parse(text), *operands[:2])
    want = reference.linear_cross_entropy(*operands, reduction=reduction, **given)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_peers_get_the_terms_by_their_own_names(monkeypatch, reduction):
    """What stands for each package computes the reference from what it is given."""

    def theirs(x, w, y, bias, weight, lse_square_scale, label_smoothing, reduction, softcap):
        return reference.linear_cross_entropy(
            *(x, w, y),
            linear_bias=bias,
            weight=weight,
            z_loss=lse_square_scale,
            label_smoothing=label_smoothing,
            softcap=softcap,
            reduction=reduction,
        )

    class Liger:
        @staticmethod
        def apply(x, w, y, bias, weight, ignored, z_loss, smoothing, reduction, softcap):
            assert ignored == -100
            return theirs(x, w, y, bias, weight, z_loss, smoothing, reduction, softcap), None

    def cce(x, w, y, *, bias, softcap, reduction, filter_eps="auto"):
        return theirs(x, w, y, bias, None, 0.0, 0.0, reduction, softcap)

    modules = {
        "liger_kernel.ops.fused_linear_cross_entropy": {"LigerFusedLinearCrossEntropyFunction": Liger},
        "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90": {
            "LigerFusedLinearCrossEntropySM90Function": Liger
        },
        "cut_cross_entropy": {"linear_cross_entropy": cce},
    }
    for name, members in modules.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    inputs = make_inputs(shapes.Shape(23, 8, 101), torch.float32, "mixed", CPU)
    operands, request = (inputs.hidden, inputs.weight, inputs.target), providers.Request(reduction)
    texts = dict.fromkeys(("cce", "cce_exact"), "softcap=2,linear_bias")
    every = "softcap=2,linear_bias,weight,z_loss=0.1,label_smoothing=0.2"
    for provider, text in (texts | dict.fromkeys(("liger_triton", "liger_cute_flce"), every)).items():
        if reduction == "none" and "liger" in provider:
            with pytest.raises(providers.Unavailable, match="has no reduction 'none'"):
                terms.loss(provider, text, request, *operands[:2])
            continue
        found = terms.loss(provider, text, request, *operands[:2])(*operands)
        given = terms.arguments(terms.parse(text), *operands[:2])
        want = reference.linear_cross_entropy(*operands, reduction=reduction, **given)
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize("provider", ["cute_lce", "torch_eager_fp32ce", "trl"])
@pytest.mark.parametrize(
    "text",
    [
        TERMS,
        "softcap=2",
        "entropy_read,logprob,softcap=3,logit_scale=0.5",
        "log_sum_sq_probs,mean_logit,is_top1",
    ],
)
def test_who_has_terms_computes_them(provider, text):
    inputs = make_inputs(shapes.Shape(37, 16, 301), torch.float32, "mixed", CPU)
    x, w = (t.double().requires_grad_() for t in (inputs.hidden, inputs.weight))
    exact = terms.by_logits(text, inputs.hidden, inputs.weight)(x @ w.T, inputs.target)
    hidden, weight = (t.clone().requires_grad_() for t in (inputs.hidden, inputs.weight))
    found = terms.loss(provider, text, providers.Request("none"), hidden, weight)(
        hidden, weight, inputs.target
    )
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    if exact.requires_grad:
        upstream = torch.linspace(-1, 1, 37)
        wants = torch.autograd.grad(exact, (x, w), upstream.double())
        for got, want in zip(torch.autograd.grad(found, (hidden, weight), upstream), wants, strict=True):
            assert timing.relative_rms(got, want) < 1e-4


def test_the_bench_of_terms_computes_what_the_reference_does():
    inputs = make_inputs(shapes.Shape(23, 8, 101), torch.float64, "mixed", CPU)
    text = "logprob,lse,entropy,topk=3,log_sum_sq_probs,mean_logit,argmax,is_top1,temperatures,softcap=2"
    found = terms.by_logits(text, inputs.hidden, inputs.weight)(
        inputs.hidden @ inputs.weight.T, inputs.target
    )
    given = terms.arguments(terms.parse(text), inputs.hidden, inputs.weight)
    names = [token_stats.NAMES.get(name, name) for name in terms.OUTPUTS if name in text.split(",")]
    names.append("topk_logprob")
    stats = reference.linear_logprob(inputs.hidden, inputs.weight, inputs.target, **given)
    want = sum(getattr(stats, name).double().reshape(23, -1).sum(1) for name in names)
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize(
    ("provider", "text", "says"),
    [
        ("cce", TERMS, "has no entropy, logprob, temperature"),
        ("trl", "topk=4", "has no topk"),
        ("verl", "logprob,softcap=3", "has no softcap"),
        ("trl", "logprob,linear_bias", "has no linear_bias"),
        ("cce", "softcap=3,z_loss=1", "has no z_loss"),
        ("cce", "softcap=3", "not installed"),
        ("liger_triton", "softcap=3,token_weight", "has no token_weight"),
        ("quack_base", "softcap=3", "has no softcap"),
        ("liger_cute_scaled_ce", TERMS, "not installed"),
    ],
)
def test_who_has_no_such_term_says_so(provider, text, says):
    x, w = torch.ones(3, 4), torch.ones(5, 4)
    with pytest.raises(providers.Unavailable, match=says):
        terms.loss(provider, text, providers.Request("none"), x, w)


def test_verls_kernel_is_imported_without_its_package(tmp_path, monkeypatch):
    folder = tmp_path / "verl" / "utils" / "kernel"
    folder.mkdir(parents=True)
    for package in (tmp_path / "verl", folder.parent):
        (package / "__init__.py").write_text("import ray_that_is_not_there\n")
    (folder / "__init__.py").write_text("")
    (folder / "linear_cross_entropy.py").write_text(
        "def linear_cross_entropy(x, w, y, temperature, reduction, group):\n"
        "    assert (temperature, reduction, group) == (0.5, 'none', None)\n"
        "    return x.sum(1), w.sum() * x.sum(1)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("verl", "verl.utils", "verl.utils.kernel", "verl.utils.kernel.linear_cross_entropy")
    try:
        x, w = torch.ones(3, 4), torch.ones(5, 4)
        request = providers.Request("none")
        found = terms.loss("verl", "entropy,logprob,temperature=0.5", request, x, w)(
            x, w, torch.zeros(3).long()
        )
        assert found.tolist() == [4 + 80] * 3
    finally:
        for name in names:
            sys.modules.pop(name, None)


def test_errors_of_terms_are_within_the_same_bars(tmp_path, capsys):
    out = tmp_path / "errors.json"
    options = [*ERRORS, "--reduction", "none", "--providers", "cute_lce", "torch_eager_fp32ce", "cce"]
    given = [TERMS, "topk=3,lse", "softcap=3,z_loss=0.01,linear_bias,token_weight", "label_smoothing=0.1"]
    assert errors.main([*options, "--terms", "none", *given, "--out", str(out)]) == 0
    results = records.read([out])
    assert list(dict.fromkeys(result["terms"] for result in results)) == [None, *given]
    ours = [result for result in results if result["provider"] == "cute_lce" and result["terms"]]
    assert len(ours) == len(given) * 2 * (2 + 3)
    theirs = [result for result in results if result["provider"] == "cce" and result["terms"]]
    assert all(result["failed"].startswith("Unavailable: ") for result in theirs)
    assert all(0 < result["err_dw"] < 5e-3 for result in ours)
    assert TERMS in capsys.readouterr().out
    with pytest.raises(SystemExit):
        errors.main(["--terms", "z_loss=1,weight"])
    assert "of which errors are not compared: weight" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["softcap", "entropy=1", "logits", ""])
def test_what_is_no_term_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        run.main(["--terms", text])
    assert f"--terms: got {text!r}, want" in capsys.readouterr().err
