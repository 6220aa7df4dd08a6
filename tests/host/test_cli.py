"""The command line: what it prints is what the package does."""

import errno
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import cute_lce
from cute_lce import cli
from cute_lce.arch import ARCHITECTURES, Gpu, architecture
from cute_lce.commands import compile as compile_command
from cute_lce.compile import cache
from cute_lce.ops.select import DTYPES, implementation
from cute_lce.plan import backward, forward
from cute_lce.plan import schedule as schedules
from cute_lce.plan.kernels import BackwardKey, ForwardKey, MergeKey, kernels
from cute_lce.plan.problem import Limits, Problem
from cute_lce.streaming import STREAMING


def test_info_names_versions_and_the_cpu_path(capsys):
    assert cli.main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"cute_lce {cute_lce.__version__}".split() in [line.split() for line in lines]
    torch_line = next(line for line in lines if line.startswith("torch "))
    assert torch.__version__ in torch_line
    cpu = next(line for line in lines if line.startswith("cpu "))
    assert "streaming path" in cpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_info_says_why_there_is_no_cuda(capsys):
    cli.main(["info"])
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("cuda "))
    assert "not there: " in line


@pytest.mark.gpu
def test_info_agrees_with_the_dispatch(capsys):
    cli.main(["info"])
    lines = capsys.readouterr().out.splitlines()
    for dtype in DTYPES:
        line = next(line for line in lines if line.startswith(f"cuda:0 {str(dtype).removeprefix('torch.')} "))
        streaming = implementation(torch.device("cuda", 0), dtype) is STREAMING
        assert ("streaming path" in line) == streaming


@pytest.mark.parametrize("argv", [[], ["no-such-command"], ["info", "--no-such-option"]])
def test_a_wrong_call_ends_with_usage_and_status_2(argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2
    assert "usage: cute-lce" in capsys.readouterr().err


def test_the_module_runs_as_a_program():
    run = subprocess.run(
        [sys.executable, "-m", "cute_lce.cli", "--help"], capture_output=True, text=True, check=True
    )
    assert "info" in run.stdout


@pytest.mark.parametrize(
    ("argv", "unbuffered"),
    [
        ("plan --n 64 --d 64 --vocab 1000 --arch sm_90a", ""),
        ("plan --n 64 --d 64 --vocab 1000 --arch sm_90a", "1"),
        ("plan --help", ""),
    ],
)
def test_a_reader_that_goes_ends_it_quietly(argv, unbuffered):
    """As `cute-lce plan ... | head -1` does; the status is what a shell reports of SIGPIPE."""
    read, write = os.pipe()
    os.close(read)
    run = subprocess.run(
        [sys.executable, "-m", "cute_lce.cli", *argv.split()],
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    os.close(write)
    assert (run.returncode, run.stderr) == (141, "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("where", "status", "said"),
    [(">&-", 0, ""), (">/dev/full", 1, f"cute-lce: {OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))}\n")],
)
def test_nowhere_to_print(where, status, said, unbuffered):
    command = f"{sys.executable} -m cute_lce.cli plan --n 64 --d 64 --vocab 1000 --arch sm_90a {where}"
    run = subprocess.run(
        ["sh", "-c", command],
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (run.returncode, run.stderr) == (status, said)


def printed_tables(capsys) -> tuple[dict[str, str], dict[str, str]]:
    """(of the forward, of the backward): printed lines as name -> value; names end where two spaces begin."""

    def table(text: str) -> dict[str, str]:
        pairs = (re.split(r"  +", line.strip(), maxsplit=1) for line in text.splitlines())
        return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}

    forward, title, backward = capsys.readouterr().out.partition("plan of the backward")
    assert title
    return table(forward), table(backward)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("options", [[], ["--window", "1000"], ["--sms", "66"]], ids=" ".join)
def test_plan_prints_the_plan_and_its_floor(arch, options, capsys):
    n, d, vocab = 1000, 512, 50257
    argv = ["plan", "--n", str(n), "--d", str(d), "--vocab", str(vocab), "--arch", arch]
    assert cli.main([*argv, *options]) == 0
    table, _ = printed_tables(capsys)
    given = dict(zip(options[::2], map(int, options[1::2]), strict=True))
    row = architecture(arch)
    sms = given.get("--sms", row.sms)
    wanted = forward.plan(Gpu(arch, sms), n, d, vocab, Limits(given.get("--window", 0)))
    # What nothing needs a gradient for is not kept.
    groups = {"config": wanted.config, "gemm": wanted.gemm, "kept": 0}
    named = {**vars(wanted), **vars(wanted.config), **wanted.gemm._asdict()}
    assert groups.keys() < named.keys()
    for name, value in named.items():
        if name not in groups:
            assert table[name] == str(value)
    assert int(table["windows"]) * int(table["window"].split()[0]) >= vocab
    assert table["arch"] == arch
    config = wanted.config
    assert table["shared memory"] == f"{config.shared_memory:,} of {row.shared_memory:,} bytes"
    columns = f"{config.tmem_columns} of 512 columns"
    assert table.get("tensor memory") == (columns if row.tmem_columns else None)
    assert table["SMs"] == f"{wanted.gemm.clusters * config.cluster_m * config.cluster_n} of {sms}"
    flops = 2 * n * d * vocab
    assert float(table["FLOP"].split()[0]) == pytest.approx(flops, rel=1e-3)
    sheet = row.data_sheets[0]
    peak = sheet.flops * sms / sheet.sms
    assert float(table["compute"].split()[0]) == pytest.approx(flops / peak * 1e3, abs=1e-3)
    assert float(table["floor"].split()[0]) >= float(table["memory"].split()[0])


@pytest.mark.parametrize(
    ("options", "dtype", "schedule", "gemms"),
    [
        ("", "bfloat16", "auto", 4),
        ("--workspace-mb 90", "bfloat16", "auto", 4),
        ("--schedule recompute", "bfloat16", "recompute", 4),
        ("--schedule keep --workspace-mb 4000 --frozen weight", "bfloat16", "keep", 2),
        ("--dtype float16 --frozen hidden --window 1000", "float16", "auto", 3),
        ("--dtype float16 --schedule keep --workspace-mb 110", "float16", "keep", 4),
    ],
)
def test_plan_prints_the_backward_that_launch_would_do(options, dtype, schedule, gemms, capsys):
    n, d, vocab = 1000, 1024, 50257
    assert cli.main(f"plan --arch sm_90a --n {n} --d {d} --vocab {vocab} {options}".split()) == 0
    _, table = printed_tables(capsys)
    given = dict(zip(*[iter(options.split())] * 2, strict=True))
    needs = given.get("--frozen") != "hidden", given.get("--frozen") != "weight"
    workspace = int(given.get("--workspace-mb", 0)) << 20
    limits = Limits(int(given.get("--window", 0)), workspace)
    problem = Problem(n, d, vocab, dtype == "float16", *needs)
    found, kept = schedules.choose(Gpu("sm_90a", 132), problem, schedule, limits)
    wanted = backward.plan(Gpu("sm_90a", 132), problem, kept, limits)
    assert table["schedule"] == found
    assert table["kept"] == f"{kept} columns"
    stripes = len(wanted.stripes) - (kept > 0)
    assert table["recomputed"] == f"{vocab - kept} columns in {stripes} stripes"
    assert float(table["workspace"].split()[0]) == pytest.approx(wanted.workspace / 2**20, abs=0.01)
    assert workspace == 0 or wanted.workspace <= workspace
    assert table["splits of dinput"] == (str(wanted.splits) if needs[0] else "none")
    for name, needed in zip(("dinput", "dweight"), needs, strict=True):
        assert (table[f"GEMM of {name}"] == "none") != needed
    flops = 2 * n * d * (gemms * vocab - kept * (gemms > 2 or stripes > 0))
    assert float(table["FLOP"].split()[0]) == pytest.approx(flops, rel=1e-3)
    assert float(table["floor"].split()[0]) >= float(table["compute"].split()[0])


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ("--n 32768 --workspace-mb 5837", 'eager calls with "mean" or "sum"'),
        ("--n 8192 --workspace-mb 358 --frozen weight", "eager calls"),
        ("--n 32768 --workspace-mb 5837 --schedule keep", None),
        ("--n 32768 --workspace-mb 5837 --window 8192", None),
        ("--n 32768 --workspace-mb 5837 --grad-weight-out", None),
        ("--n 8192 --workspace-mb 358 --frozen weight --grad-weight-out", "eager calls"),
        ("--n 1024", None),
    ],
)
def test_plan_says_where_auto_is_grad_in_forward(options, calls, capsys):
    assert cli.main(f"plan --arch sm_90a --d 4096 --vocab 262144 {options}".split()) == 0
    _, table = printed_tables(capsys)
    if calls is None:
        assert "grad_in_forward" not in table
    else:
        found, said = table["grad_in_forward"].split(": ")
        assert said == f'"auto" in {calls}'
        assert float(found.split()[0]) < float(table["both"].split()[0]) / 1.05


@pytest.mark.parametrize("frozen", [None, "hidden", "weight"])
def test_plan_of_grad_in_forward(frozen, capsys):
    options = "" if frozen is None else f" --frozen {frozen}"
    argv = f"plan --arch sm_90a --n 32768 --d 4096 --vocab 262144 --schedule grad_in_forward{options}"
    assert cli.main(f"{argv} --workspace-mb 8000".split()) == 0
    _, table = printed_tables(capsys)
    count, _, tokens, *rest = table["chunks"].split()
    assert (int(count) - 1) * int(tokens) + int(rest[-1] if "last" in rest else tokens) == 32768
    assert float(table["workspace"].split()[0]) <= 8000
    # With a frozen weight a call is measured to be as fast as cuBLAS, whose time the floor models.
    assert (0.97 if frozen == "weight" else 1) <= float(table["both"].split()[2]) < 1.2
    for name, other in (("dinput", "hidden"), ("dweight", "weight")):
        assert (table[f"GEMM of {name}"] == "none") == (f"{name} bound by" not in table) == (frozen == other)
    assert cli.main(f"{argv} --workspace-mb 10".split()) == 1
    assert "want at least" in capsys.readouterr().err
    # A gradient that is added leaves its chunks less memory, where there is one.
    assert cli.main(f"{argv} --workspace-mb 8000 --grad-weight-out".split()) == 0
    _, table = printed_tables(capsys)
    assert (int(table["chunks"].split()[0]) > int(count)) == (frozen != "weight")


def test_plan_is_that_of_the_gpu(capsys):
    plans = {}
    for gpu in ("H200", "H100"):
        argv = f"plan --arch sm_90a --gpu {gpu} --n 3000 --d 4096 --vocab 128256"
        assert cli.main(argv.split()) == 0
        plans[gpu], _, _ = capsys.readouterr().out.partition("plan of the backward")
        assert re.search(rf"^  GPU +{gpu}$", plans[gpu], re.MULTILINE)
    config = {gpu: plan.partition("what it takes")[0] for gpu, plan in plans.items()}
    assert config["H200"] != config["H100"]


def test_plan_refuses_what_the_call_would_refuse(capsys):
    base = ["plan", "--arch", "sm_90a", "--n", "4096", "--d", "1024", "--vocab", "50257"]
    for options, named in (
        (["--workspace-mb", "1"], "workspace_mb: got 1, want at least"),
        (["--workspace-mb", "inf"], "workspace_mb: got inf, want a positive number"),
        (["--workspace-mb", "nan"], "workspace_mb: got nan, want a positive number"),
        (["--workspace-mb", "0"], "workspace_mb: got 0.0, want a positive number"),
        (["--sms", "1"], "sms: got 1, want at least the 2 of a cluster"),
    ):
        assert cli.main([*base, *options]) == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("cute-lce plan: ")
        assert named in printed.err


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ("plan --n 0 --d 8 --vocab 8 --arch sm_90a", "--n"),
        ("plan --n 8 --d x --vocab 8 --arch sm_90a", "--d: got x, want a whole number of at least 1"),
        ("plan --n 8 --d 8 --vocab 0.5 --arch sm_90a", "--vocab: got 0.5, want a whole number"),
        ("plan --n 8 --d 8 --vocab 8 --arch sm_70", "--arch"),
        ("plan --n 8 --d 8 --arch sm_90a", "--vocab"),
        ("plan --n 8 --d 8 --vocab 8 --arch sm_90a --gpu B200", "--gpu: got B200, want one of H200, H100"),
        ("compile --arch sm_90a --d 8 --vocab 8 --dtype float64", "--dtype"),
        ("compile --arch sm_120a", "--arch"),
    ],
)
def test_a_wrong_option_is_refused_by_name(argv, named, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv.split())
    assert stopped.value.code == 2
    assert named in capsys.readouterr().err.splitlines()[-1]


def test_compile_takes_the_keys_as_they_are(monkeypatch, capsys):
    """Whatever `plan.kernels` lists, of any kind, is asked for and named."""

    class Sideways(NamedTuple):
        number: int

    keys = [Sideways(1), *kernels("sm_90a", "float16", "int32")]
    asked = []
    monkeypatch.setattr(compile_command, "kernels", lambda *_: keys)
    monkeypatch.setattr(cache, "get", asked.append)
    types = "--dtype float16 --target-dtype int32"
    assert cli.main(f"compile --arch sm_90a --jobs 1 {types}".split()) == 0
    assert asked == keys
    lines = capsys.readouterr().out.splitlines()[1:]
    named = [line.split()[2].partition("(")[0] for line in lines[:-1]]
    assert named == [type(key).__name__ for key in keys]
    row, most = architecture("sm_90a"), Gpu("sm_90a", 1).serving((), "keep").widths
    keeping = {config for configs in row.configs for config in configs.within(most).forwards(True)}
    found = {
        (tokens, dhidden, dweight)
        for configs in row.configs
        for (tokens, dhidden), dweight in product(configs.pairs, configs.dweight)
    }
    wanted = {
        "Sideways": 1,
        "ForwardKey": len(row.forward_configs) + len(keeping),
        "BackwardKey": len(found),
    }
    wanted["MultiplyKey"] = 1
    assert Counter(type(key).__name__ for key in set(keys)) == wanted
    assert lines[-1].startswith(f"{len(keys)} kernels in ")


def test_compile_takes_the_merge_where_there_are_groups(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(cache, "get", asked.append)
    argv = "compile --arch sm_100a --jobs 1 --target-dtype int32 int64"
    for extra, wanted in (("", set()), (" --tp-group", {MergeKey("sm_100a", "int32"), MergeKey("sm_100a")})):
        asked.clear()
        assert cli.main((argv + extra).split()) == 0
        assert {key for key in asked if isinstance(key, MergeKey)} == wanted
    capsys.readouterr()


def test_compile_takes_the_terms_of_a_job(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(cache, "get", asked.append)
    plain, given, kept = (), ("coefficients",), "kept_logits"
    bias, scale, cap = ("linear_bias",), ("logit_scale",), ("softcap",)
    added, capped = "bias_gradient", (*cap, "row_scale")
    for options, of_forward, of_backward, *of_kept in (
        ("", plain, plain, plain, plain),
        ("--logit-scale", scale, scale, scale, scale),
        ("--z-loss", plain, given, ("proportion",), plain),
        ("--z-loss --logit-scale", scale, (*scale, *given), (*scale, "proportion"), plain),
        ("--softcap", cap, (*cap, *given), cap, plain),
        ("--softcap --logit-scale --z-loss", cap, (*cap, *given), (*cap, "proportion"), plain),
        ("--softcap --label-smoothing", (*cap, "total"), (*cap, *given, "uniform")),
        (
            "--softcap --linear-bias",
            (*bias, *cap),
            (*bias, *cap, *given, added),
            (*bias, *cap),
            (*given, added),
        ),
        ("--entropy", ("entropy",), (*given, "gap"), ("entropy", kept), (*given, "gap", kept)),
        ("--entropy --dtype float16", ("entropy",), (*given, "gap")),
        ("--lse", plain, given, (kept,), (*given, kept)),
        ("--lse --dtype float16", plain, given),
        ("--argmax --mean-logit", ("logits", "argmax"), given, ("logits", "argmax"), plain),
        (
            "--topk --argmax",
            ("argmax", "topk"),
            (*given, "topk"),
            ("argmax", kept, "topk"),
            (*given, "topk", kept),
        ),
        (
            "--topk --entropy",
            ("entropy", "topk"),
            (*given, "gap", "topk"),
            ("entropy", kept, "topk"),
            (*given, "gap", "topk", kept),
        ),
        (
            "--lse --linear-bias",
            bias,
            (*bias, *given, added),
            (*bias, kept),
            (*bias, *given, kept, added),
        ),
        (
            "--log-sum-sq-probs --entropy --argmax",
            ("entropy", "squares", "argmax"),
            (*given, "gap"),
            ("entropy", "squares", "argmax", kept),
            (*given, "gap", kept),
        ),
        (
            "--entropy --linear-bias",
            (*bias, "entropy"),
            (*bias, *given, "gap", added),
            (*bias, "entropy", kept),
            (*bias, *given, "gap", kept, added),
        ),
        ("--linear-bias", bias, (*bias, *given, "bias_gradient"), bias, (*given, "bias_gradient")),
        ("--label-smoothing", ("total",), (*given, "uniform"), ("total", kept), (*given, "uniform", kept)),
        ("--label-smoothing --dtype float16", ("total",), (*given, "uniform")),
        (
            "--label-smoothing --linear-bias",
            (*bias, "total"),
            (*bias, *given, "uniform", "bias_gradient"),
            (*bias, "total", kept),
            (*bias, *given, "uniform", kept, "bias_gradient"),
        ),
        ("--temperatures", ("row_scale",), ("row_scale", *given), ("row_scale",), plain),
        ("--temperatures --softcap", capped, (*capped, *given), capped, plain),
        (
            "--label-smoothing --class-weights",
            ("class_weight", "total"),
            (*given, "uniform", "class_weight"),
            ("class_weight", "total", kept),
            (*given, "uniform", "class_weight", kept),
        ),
    ):
        forwards = {(False, of_forward), *((True, terms) for terms in of_kept[:1])}
        asked.clear()
        assert cli.main(f"compile --arch sm_90a --jobs 1 {options}".split()) == 0
        assert {(key.keeps, key.terms) for key in asked if isinstance(key, ForwardKey)} == forwards
        backwards = {of_backward, *of_kept[1:]}
        assert {key.terms for key in asked if isinstance(key, BackwardKey)} == backwards
        for key in asked:
            if isinstance(key, ForwardKey):
                widths = Gpu("sm_90a", 132).serving(key.terms, "keep" if key.keeps else "forward").widths
                assert widths is None or widths.holds(key.config.tile_m, key.config.tile_n)
        widest = max(key.config.tile_n for key in asked if isinstance(key, ForwardKey) and not key.keeps)
        together = {*bias, *cap}, {*cap, "total"}
        narrow = {"entropy", "logits", "argmax", "row_scale"}.intersection(of_forward)
        narrow = narrow or any(each <= {*of_forward} for each in together)
        assert (widest > 192) == (not narrow)


def test_compile_says_why_it_refuses_a_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUTE_LCE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache, "_functions", {})
    tmp_path.chmod(0o777)
    for jobs in ("1", "2"):
        assert cli.main(["compile", "--arch", "sm_90a", "--jobs", jobs]) == 1
        assert f"cute-lce compile: {tmp_path}: got owner" in capsys.readouterr().err


def test_compile_says_what_is_in_the_folders_place(tmp_path, monkeypatch, capsys):
    path = tmp_path / "file"
    path.write_text("")
    monkeypatch.setenv("CUTE_LCE_CACHE_DIR", str(path))
    monkeypatch.setattr(cache, "_functions", {})
    assert cli.main(["compile", "--arch", "sm_90a", "--jobs", "1"]) == 1
    message = f"cute-lce compile: {path}: got {path}, which is no folder, want a folder"
    assert capsys.readouterr().err.startswith(message)


def cached(capsys) -> str:
    """What `info` says of the cache."""
    capsys.readouterr()
    assert cli.main(["info"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("compiled kernels"))
    return line.partition("  ")[2]


def test_info_survives_whatever_is_in_the_cache(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUTE_LCE_CACHE_DIR", str(tmp_path))
    (tmp_path / "good.so").write_bytes(bytes(2**20))
    (tmp_path / "gone.so").write_bytes(bytes(2**20))
    (tmp_path / "dangling.so").symlink_to(tmp_path / "nowhere")
    stat = Path.stat

    def removed_meanwhile(self, **options):
        if self.name == "gone.so":
            self.unlink(missing_ok=True)
        return stat(self, **options)

    monkeypatch.setattr(Path, "stat", removed_meanwhile)
    assert cached(capsys) == f"1 in {tmp_path}, 1.0 MiB"
    for path, said in (
        (tmp_path / "good.so", "none: {} is no folder"),
        (tmp_path / "dangling.so", "none: {} is no folder"),
        (tmp_path / "good.so" / "below", "0 in {}, 0.0 MiB"),
        (tmp_path / ("x" * 300), "0 in {}, 0.0 MiB"),
        (tmp_path / "not yet", "0 in {}, 0.0 MiB"),
    ):
        monkeypatch.setenv("CUTE_LCE_CACHE_DIR", str(path))
        assert cached(capsys) == said.format(path)


@pytest.mark.skipif(sys.platform != "linux", reason="the DSL is for Linux")
def test_compile_fills_the_cache_without_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUTE_LCE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache, "_functions", {})
    every = kernels("sm_90a", "bfloat16", "int64")
    few = [*every[:2], next(key for key in every if isinstance(key, BackwardKey))]
    monkeypatch.setattr(compile_command, "kernels", lambda *names: few)
    argv = ["compile", "--arch", "sm_90a", "--d", "64", "--vocab", "1000"]
    assert cli.main([*argv, "--jobs", "2"]) == 0
    # The narrowest tiles' forward, the one that keeps, and the backward.
    assert sorted(
        line.split()[2].partition("(")[0] for line in capsys.readouterr().out.splitlines()[1:-1]
    ) == [
        "BackwardKey",
        "ForwardKey",
        "ForwardKey",
    ]
    assert len(list(tmp_path.glob("*.so"))) == 3
    cli.main(["info"])
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("compiled kernels"))
    assert f"3 in {tmp_path}" in line

    def no_second_compile(*args):
        raise AssertionError("compiled again")

    monkeypatch.setattr(cache, "_functions", {})
    monkeypatch.setattr(cache, "trace", no_second_compile)
    assert cli.main([*argv, "--jobs", "1"]) == 0
