"""The bench harness and the demo on shapes that a CPU does at once."""

import functools
import itertools
import json
import math
import time

import pytest
import torch
import torch.nn.functional as F

from bench import errors, host_time, providers, run, shapes, timing, yardstick
from bench.floor import Floor
from bench.inputs import Reference, make_inputs
from examples import corpus, train_lm

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
    assert [len(rows) for rows in Floor(inputs, True, "")._slices] == [2050, 2050]
    monkeypatch.setattr("bench.floor.FLOOR_TOKENS", 1000)
    assert [len(rows) for rows in Floor(inputs, True, "")._slices] == [820] * 5


# run


@pytest.mark.parametrize("rows", ["untrained", "mixed", "confident"])
def test_reference_equals_autograd_in_float64(rows):
    shape = shapes.Shape(37, 64, 151)
    inputs = make_inputs(shape, torch.float32, rows, CPU)
    reference = Reference(inputs)
    hidden, weight = inputs.hidden.double().requires_grad_(), inputs.weight.double().requires_grad_()
    losses = F.cross_entropy(hidden @ weight.T, inputs.target, reduction="none")
    losses.backward(inputs.upstream.double())
    assert hidden.grad is not None
    assert weight.grad is not None
    assert torch.allclose(reference.loss("none"), losses, rtol=1e-12)
    assert torch.allclose(reference.loss("mean"), losses.mean(), rtol=1e-12)
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
    Floor(inputs, backward=True, frozen="")()
    assert products == [
        *((2052, 8, 128), (2052, 8, 128)),
        *((2052, 128, 8), (2052, 128, 8)),
        *((128, 2052, 8), (128, 2052, 8)),
    ]
    products.clear()
    Floor(inputs, backward=True, frozen="weight")()
    assert len(products) == 4
    products.clear()
    Floor(inputs, backward=False, frozen="")()
    assert products == [(2052, 8, 128), (2052, 8, 128)]


BENCH = ("--device", "cpu", "--seconds", "0.01", "--shapes", "tiny")


def test_a_run_writes_every_key_and_prints_its_table_last(tmp_path, capsys):
    out = tmp_path / "results.json"
    argv = [*BENCH, "--pass", "fwd", "fwd_bwd", "--reduction", "mean", "none", "--out", str(out)]
    argv += ["--providers", "cute_lce", "torch_eager_fp32ce", "--schedule", "recompute", "keep"]
    assert run.main(argv) == 0
    results = json.loads(out.read_text())
    assert len(results) == 2 * 2 * (2 + 1)
    for result in results:
        assert tuple(result) == run.KEYS
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
    assert len(json.loads(out.read_text())) == len(results) + 1
    capsys.readouterr()
    assert run.main(["--show", str(out)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(results) + 1


def test_a_sustained_run_has_the_same_keys_and_says_so(tmp_path, capsys):
    out = tmp_path / "results.json"
    argv = ["--device", "cpu", "--shapes", "tiny", "--sustained", "0.002", "--pass", "fwd", "fwd_bwd"]
    argv += ["--providers", "cute_lce", "torch_eager_fp32ce", "cce", "--out", str(out)]
    assert run.main(argv) == 0
    assert "cce: left out" in capsys.readouterr().out
    results = json.loads(out.read_text())
    assert [(r["pass"], r["provider"]) for r in results] == [
        *(("fwd", "cute_lce"), ("fwd", "torch_eager_fp32ce")),
        *(("fwd_bwd", "cute_lce"), ("fwd_bwd", "torch_eager_fp32ce")),
    ]
    for result in results:
        assert tuple(result) == run.KEYS
        assert result["sustained_s"] == 0.002
        assert 0 < result["ms_min"] <= result["ms"] <= result["ms_max"]
        assert result["err_loss"] < 1e-2
        assert (result["err_dw"] is None) == (result["pass"] == "fwd")
    # All of a pass were measured beside the same floor.
    assert len({r["floor_ms"] for r in results}) == 2


def test_a_frozen_operand_has_no_gradient_and_no_product(tmp_path):
    out = tmp_path / "results.json"
    argv = ["--device", "cpu", "--seconds", "0.01", "--shapes", "48,32,517,weight", "--pass", "fwd_bwd"]
    assert run.main([*argv, "--out", str(out)]) == 0
    (result,) = json.loads(out.read_text())
    assert result["err_dw"] is None
    assert 0 < result["err_dh"] < 1e-2


def test_a_provider_that_is_wrong_shows_a_large_error(tmp_path, monkeypatch):
    def half(request):
        loss = providers.PROVIDERS["torch_eager_fp32ce"](request)
        return lambda x, w, y: 0.5 * loss(x, w, y)

    monkeypatch.setitem(providers.PROVIDERS, "half", half)
    out = tmp_path / "results.json"
    assert run.main([*BENCH, "--providers", "half", "--pass", "fwd_bwd", "--out", str(out)]) == 0
    (result,) = json.loads(out.read_text())
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
    (result,) = json.loads(out.read_text())
    assert result["err_loss"] == "nan"


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
        (["--workspace-mb", "much"], "much"),
    ):
        with pytest.raises(SystemExit):
            run.main(["--device", "cpu", *argv])
        assert named in capsys.readouterr().err


# errors


ERRORS = ("--device", "cpu", "--shapes", "60,32,403", "--regimes", "confident", "jump_100")


def test_errors_of_ours_are_within_their_bars_and_those_of_bf16_logits_are_not(tmp_path, capsys):
    out = tmp_path / "errors.json"
    argv = [*ERRORS, "--providers", "cute_lce", "torch_eager_bf16ce", "cce", "--out", str(out)]
    assert errors.main(argv) == 0
    printed = capsys.readouterr().out
    assert printed.rstrip().endswith("ours are within their bars")
    results = json.loads(out.read_text())
    assert all(tuple(result) == errors.KEYS for result in results)
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
    assert not train_lm.Verdict.of(one([5.0] * 30, 5.5), one([5.0] * 30, 5.5)).good


# host_time


def test_host_time_writes_every_key_and_a_line_for_each_provider(tmp_path, capsys):
    out = tmp_path / "host_time.json"
    argv = ["--device", "cpu", "--shape", "8,16,64", "--groups", "1"]
    argv += ["--providers", "cute_lce", "torch_eager_bf16ce", "cce", "--out"]
    assert host_time.main([*argv, str(out)]) == 0
    printed = capsys.readouterr().out
    assert "cce: left out, Unavailable: not installed" in printed
    results = json.loads(out.read_text())
    assert len(results) == (len(host_time.OURS) + 1) * 3
    for result in results:
        assert tuple(result) == host_time.KEYS
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
