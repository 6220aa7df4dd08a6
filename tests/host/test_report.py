"""`cute-lce bench` and `cute-lce report`: what they say of what was measured."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from cute_lce import cli
from cute_lce.commands import bench, report
from cute_lce.commands.bench import Found, Row, Shape

ROOT = Path(__file__).resolve().parents[2]
TINY = "bench --n 64 --d 32 --vocab 1000 --device cpu"
BOTH = bench.PASSES[1]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(bench, "SECONDS", 0.02)
    # No shape here is cut.
    monkeypatch.setattr(bench, "CPU_SECONDS", 1e6)


def test_a_row_for_each_loss_and_pass_and_a_verdict(capsys):
    assert cli.main([*TINY.split(), "--dtype", "bfloat16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("n = 64, d = 32, V = 1000, bfloat16, on cpu")
    for name in ("cute_lce ", "torch "):
        for timed in bench.PASSES:
            (line,) = [line for line in lines if line.startswith(name) and f" {timed}  " in line]
            ms, multiple, mib = map(float, line.removeprefix(name).strip().removeprefix(timed).split())
            assert ms > 0
            assert multiple > 0
            assert mib >= 0
    assert lines[-1].startswith("forward and backward: cute_lce takes ")
    assert "times as fast as torch" in lines[-1]


def test_memory_beyond_operands_and_gradients():
    shape = Shape(256, 32, 20000, "float32")
    rows = {(row.name, row.timed): row for row in bench.measure(shape, torch.device("cpu")).rows}
    logits = 4 * 256 * 20000 / 2**20
    assert rows["torch", "forward"].mib > 0.9 * logits
    assert rows[bench.OURS, "forward"].mib < 0.5 * logits


def test_ours_that_fails_is_said(monkeypatch, capsys):
    def broken(*arguments, **options):
        raise RuntimeError("no kernel image\nand more")

    monkeypatch.setattr(bench, "linear_cross_entropy", broken)
    assert cli.main(TINY.split()) == 1
    out = capsys.readouterr().out
    assert "cute_lce failed: RuntimeError: no kernel image" in out.splitlines()[-1]
    assert "and more" not in out


@pytest.mark.parametrize(
    ("ours", "torchs", "said"),
    [
        (
            Row("", "", 10.0, 1.0, 100.0),
            Row("", "", 25.0, 2.5, 800.0),
            "2.50 times as fast as torch (25.00 ms, 8",
        ),
        (Row("", "", 10.0, 1.0, 100.0), Row("", "", 8.0, 1.0, 80.0), "0.80 times as fast as torch"),
        (Row("", "", 10.0, 1.0, 100.0), Row("", "", failed="out of memory"), "torch cannot (out of memory)"),
        (Row("", "", failed="no"), Row("", "", 8.0, 1.0, 80.0), "cute_lce failed: no"),
    ],
)
def test_verdicts(ours: Row, torchs: Row, said: str):
    rows = [ours._replace(name=bench.OURS, timed=BOTH), torchs._replace(name="torch", timed=BOTH)]
    found = Found(Shape(1, 2, 3, "float32"), 1, "here", rows)
    assert said in found.verdict()
    assert found.verdict() == found.lines()[-1]


def test_a_cpu_takes_as_many_tokens_as_there_is_time_for(monkeypatch):
    shape = Shape(100_000, 64, 5000, "float32")
    weight = torch.randn(shape.vocab, shape.d).requires_grad_()
    assert bench._tokens_in_time(100_000, weight) == 100_000
    monkeypatch.setattr(bench, "CPU_SECONDS", 1e-9)
    assert bench._tokens_in_time(100_000, weight) == 1
    found = bench.measure(shape, torch.device("cpu"))
    assert found.shape.n == 1
    assert "(1 tokens instead of 100000: " in found.lines()[1]


def test_tokens_in_time_count_what_a_token_costs_beside_its_gemms(monkeypatch):
    """By a clock that advances 1 us for each token of a call and 100 us for the call."""
    now = 0.0

    def call(timed, loss, hidden, weight, target):
        nonlocal now
        now += 1e-4 + 1e-6 * len(target)

    monkeypatch.setattr(bench, "_call", call)
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now)
    monkeypatch.setattr(bench, "CPU_SECONDS", 35.0)
    a_call = 35.0 / bench.CPU_ROUNDS / 4
    found = bench._tokens_in_time(10_000_000, torch.randn(100, 1).requires_grad_())
    assert found == pytest.approx((a_call - 1e-4) / 1e-6, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--n 99999999999999999999", "argument --n: got 99999999999999999999, want at most 2147483647"),
        ("--workspace-mb 0", "argument --workspace-mb: got 0, want a positive number of MiB"),
        ("--workspace-mb nan", "argument --workspace-mb: got nan, want a positive number of MiB"),
    ],
)
def test_what_no_bench_takes_is_refused_at_once(options, said, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        cli.main([*TINY.split(), *options.split()])
    assert capsys.readouterr().err.splitlines()[-1] == f"cute-lce bench: error: {said}"


def refusal(arguments: Sequence[str], capsys) -> str:
    """The one line that is said."""
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert not printed.out
    (line,) = printed.err.splitlines()
    return line


def test_a_bench_that_does_not_fit_says_so(capsys):
    most = str(2**31 - 1)
    line = refusal(["bench", "--device", "cpu", "--n", "8", "--d", most, "--vocab", most], capsys)
    assert line.startswith(f"cute-lce: --n, --d, --vocab: got 8, {most}, {most}, want fewer: no memory")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_bench_of_a_gpu_that_is_not_there(capsys):
    line = refusal(["bench", "--device", "cuda"], capsys)
    assert line == "cute-lce: --device: got cuda, want cpu: there is no usable CUDA device"


def test_why_a_row_failed_is_apart_from_its_pass():
    rows = [Row(bench.OURS, BOTH, failed="no")]
    assert Found(Shape(1, 2, 3, "float32"), 1, "here", rows).lines()[2].endswith(f"{BOTH}  no")


# The report


@pytest.mark.parametrize(
    ("path", "said"), [("", "a folder, want a file"), ("none/report.json", "none does not")]
)
def test_where_no_report_can_be_is_said_first(path, said, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(report, "_sections", None)
    line = refusal(["report", "--out", str(tmp_path / path)], capsys)
    assert line.startswith(f"cute-lce: --out: got {tmp_path / path}, ")
    assert line.endswith(said)


def test_what_a_checkout_adds_on_a_gpu():
    names = [name for name, _ in report._sections(torch.device("cuda"), report.checkout(), time.monotonic())]
    tests = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("tests/gpu/test_*.py"))]
    assert len(tests) >= 7
    short = ["nvidia-smi", "doctor", "bench"]
    assert names == [*short, *(f"pytest {name}" for name in tests), "bench.run"]
    assert [name for name, _ in report._sections(torch.device("cuda"), None, 0.0)] == short
    assert [name for name, _ in report._sections(torch.device("cpu"), ROOT, 0.0)] == short[1:]


def test_every_section_is_written_whatever_the_others_do(monkeypatch, tmp_path, capsys):
    def sections(*_):
        yield "good", lambda: (True, ["fine"], {"a": 1})
        yield "bad", lambda: (False, ["FAIL  x"], None)
        assert json.loads(path.read_text())["sections"][1]["name"] == "bad"
        yield "broken", lambda: 1 / 0
        yield "last", lambda: (True, ["too"], [])

    path = tmp_path / "report.json"
    monkeypatch.setattr(report, "_sections", sections)
    assert cli.main(["report", "--out", str(path)]) == 1
    found = json.loads(path.read_text())
    assert [each["name"] for each in found["sections"]] == ["good", "bad", "broken", "last"]
    assert [each["well"] for each in found["sections"]] == [True, False, False, True]
    assert {"gpu", "versions", "date"} <= found.keys()
    summary = "\n".join(found["summary"])
    assert "NOT WELL  bad" in summary
    assert "ZeroDivisionError" in summary
    assert "not well: bad, broken" in capsys.readouterr().out
    assert [each.name for each in tmp_path.iterdir()] == ["report.json"]


def test_doctor_and_bench_are_kept_whole(monkeypatch, tmp_path):
    """What the sections give is what JSON keeps; the doctor's calls are made elsewhere."""
    shape = Shape(8, 16, 100, "float32")
    measured = bench.measure(shape, torch.device("cpu"))
    monkeypatch.setattr(report, "CPU_SHAPES", (shape, shape))
    answers = iter([measured, report.isolated.Failure("no answer within 1 s")])
    monkeypatch.setattr(report.isolated, "each", lambda *_, seconds: answers)
    well, lines, data = report._bench(torch.device("cpu"))
    assert not well
    assert measured.verdict() in lines
    assert any("no answer within 1 s" in line for line in lines)
    assert json.loads(json.dumps(data))[0]["rows"][0]["name"] == bench.OURS


@pytest.mark.parametrize(
    ("code", "minutes", "well", "said"),
    [
        ("print('a'); print('FAILED test'); print('1 failed'); raise SystemExit(1)", 1, False, "status 1"),
        ("print('1 passed')", 1, True, "status 0"),
        ("import time; print('test_x', flush=True); time.sleep(60)", 0.02, False, "was ended after 1 s"),
        ("print('never')", 0, False, "left out: out of time"),
    ],
)
def test_programs(code, minutes, well, said, tmp_path):
    found = report._program((sys.executable, "-c", code), tmp_path, time.monotonic() + 60 * minutes)
    assert found[0] == well
    assert said in found[1][-1]
    if "FAILED" in code:
        assert found[1][:2] == ["FAILED test", "1 failed"]
