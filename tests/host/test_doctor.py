"""`cute-lce doctor`, and that what is wrong fails it."""

from __future__ import annotations

import importlib.metadata
import sys
import time

import pytest
import torch

from cute_lce import cli
from cute_lce.commands import calls, doctor
from cute_lce.compile import cache, driver
from cute_lce.measure import isolated


@pytest.fixture(scope="module")
def wanted() -> dict[tuple[str, calls.Numbers], list[torch.Tensor]]:
    """By the kind of a bfloat16 call, the definition's results and torch's."""
    return {}


@pytest.fixture
def found_once(wanted, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wanted of a kind is found once for all that is spoilt of ours: it takes most of the time."""
    results = calls._results

    def once(kind: calls.Kind, numbers: calls.Numbers, given: calls.Given) -> list[torch.Tensor]:
        if numbers is calls._ours:
            return results(kind, numbers, given)
        (name,) = (name for name, each in calls.KINDS.items() if each is kind)
        if (name, numbers) not in wanted:
            wanted[name, numbers] = results(kind, numbers, given)
        return wanted[name, numbers]

    monkeypatch.setattr(calls, "_results", once)


def states(lines) -> dict[str, str]:
    return {line.subject: line.state for line in lines}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_the_streaming_path_is_checked(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("CUTE_LCE_CACHE_DIR", str(tmp_path / "cache"))
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "all is well"
    assert any(line.startswith("note  no GPU") for line in lines)
    for dtype in ("bfloat16", "float32"):
        for kind in calls.KINDS:
            (line,) = [line for line in lines if f"cpu {dtype} {kind} " in line]
            assert line.startswith("PASS")
            assert "streaming path" in line
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.usefixtures("found_once")
@pytest.mark.parametrize("kind", calls.KINDS)
@pytest.mark.parametrize("how", ["as it is", "two per cent", "zeros", "nan", "one row"])
def test_wrong_results_are_seen(kind: str, how: str, monkeypatch):
    def spoil(name: str) -> None:
        right = getattr(calls, name)

        def wrong(*arguments, **options):
            found = right(*arguments, **options)
            if torch.is_tensor(found):
                name, loss = "", found
            else:
                name, loss = next((name, each) for name, each in found._asdict().items() if each is not None)
            factor = {"two per cent": 1.02, "zeros": 0.0, "nan": float("nan")}.get(how, 1.0)
            loss = loss * factor
            if how == "one row":
                loss = loss + (torch.arange(loss.numel()) == loss.numel() - 1).view(loss.shape) * 0.5 * loss
            return loss if torch.is_tensor(found) else found._replace(**{name: loss})

        monkeypatch.setattr(calls, name, wrong)

    spoil("linear_cross_entropy")
    spoil("linear_logprob")
    found = calls.answer(calls.Call("cpu", "bfloat16", kind))
    assert found.by == "streaming path"
    assert found.right == (how == "as it is"), found


@pytest.mark.usefixtures("found_once")
@pytest.mark.parametrize(
    ("kind", "name", "changed"),
    [
        ("softcap", "linear_cross_entropy", {"softcap": None}),
        ("softcap", "linear_cross_entropy", {"z_loss": 0.0}),
        ("LogitTerm", "linear_cross_entropy", {"softcap": calls.Squashed(2.2)}),
        ("linear_bias", "linear_cross_entropy", {"linear_bias": None}),
        ("class weights", "linear_cross_entropy", {"weight": None}),
        ("label_smoothing", "linear_cross_entropy", {"label_smoothing": 0.19}),
        ("grad_weight_out, float32", "linear_cross_entropy", {"grad_weight_out": None}),
        ("grad_weight_out, bfloat16", "linear_cross_entropy", {"grad_weight_out": None}),
        ("entropy", "linear_logprob", {"entropy_grad": False}),
        ("entropy", "linear_logprob", {"temperature": 0.72}),
        ("topk_ids", "linear_logprob", {"topk_ids": torch.zeros(calls.N, calls.TOPK, dtype=torch.int64)}),
    ],
)
def test_a_term_that_is_left_out_is_seen(kind, name, changed, monkeypatch):
    right = getattr(calls, name)
    monkeypatch.setattr(calls, name, lambda *operands, **options: right(*operands, **{**options, **changed}))
    assert not calls.answer(calls.Call("cpu", "bfloat16", kind)).right


@pytest.mark.usefixtures("found_once")
@pytest.mark.parametrize("name", calls.KINDS["statistics"].outputs)
def test_a_number_that_is_wrong_is_seen(name, monkeypatch):
    """In every row: an argmax is the next class."""
    right = calls.linear_logprob

    def wrong(*operands, **options):
        found = right(*operands, **options)
        value = getattr(found, name)
        spoilt = {"argmax": lambda: (value + 1) % calls.VOCAB, "is_top1": lambda: ~value}
        return found._replace(**{name: spoilt.get(name, lambda: value * 1.02)()})

    monkeypatch.setattr(calls, "linear_logprob", wrong)
    assert not calls.answer(calls.Call("cpu", "bfloat16", "statistics")).right


def test_what_is_not_written_is_nan():
    with calls._nan_memory():
        assert torch.empty(1).isnan()
    assert not torch.are_deterministic_algorithms_enabled()


def test_every_requirement_is_understood():
    required = importlib.metadata.requires("cute-lce")
    assert required
    found = {wanted[0]: wanted[1:] for wanted in map(doctor.requirement, required) if wanted}
    assert found["torch"] == (">=", "2.9")
    assert "matplotlib" not in found
    if sys.platform == "linux":
        assert found["nvidia-cutlass-dsl"][0] == "=="
    assert doctor.requirement("a==1.0; sys_platform == 'nowhere'") is None
    with pytest.raises(ValueError, match="requirement: got 'a<2'"):
        doctor.requirement("a<2")


@pytest.mark.parametrize(
    ("name", "there", "state"),
    [
        ("torch", "2.9.0+cu130", "PASS"),
        ("torch", "2.11.0", "PASS"),
        ("torch", "2.8.1", "FAIL"),
        ("nvidia-cutlass-dsl", "4.9.0", "FAIL"),
        ("cuda-python", None, "FAIL"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="requirements of Linux")
def test_versions_that_differ_fail(name, there, state, monkeypatch):
    version = importlib.metadata.version

    def found(package: str) -> str:
        if package == name and there is None:
            raise importlib.metadata.PackageNotFoundError
        return there if package == name else version(package)

    monkeypatch.setattr(importlib.metadata, "version", found)
    assert states(doctor.packages())[name] == state


def test_a_cache_that_others_may_write_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("CUTE_LCE_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o777)
    line = doctor._cache()
    assert line.state == "FAIL"
    assert f"chmod go-w {tmp_path}" in line.text
    tmp_path.chmod(0o700)
    assert doctor._cache().state == "PASS"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUTE_LCE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(OSError, match="is no folder"):
        cache.check()


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler -O1")
    assert "no-such-compiler: not found" in doctor._compiler().text
    monkeypatch.setattr(driver, "_toolkits", dict)
    found = states(doctor._cuda())
    assert found["DSL's runtime library"] == ("FAIL" if sys.platform == "linux" else "note")


def test_a_failure_ends_the_command_with_1(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda seconds, jobs: iter([doctor.Line("FAIL", "a", "b")]))
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 FAILED"


def test_processes_that_fail_are_results_among_others():
    """An exception, an end and a hang; what comes next is done, in a new process."""
    process = "__import__('os').getpid()"
    hang, end = "__import__('time').sleep(60)", "__import__('os')._exit(3)"
    started = time.monotonic()
    found = list(isolated.each(eval, [process, process, "1/0", process, end, hang, "2 + 2"], seconds=2))
    assert time.monotonic() - started < 60
    assert found[0] == found[1] != found[3]
    assert found[2] == isolated.Failure("ZeroDivisionError: division by zero")
    assert found[4] == isolated.Failure("the process ended with status 3")
    assert found[5] == isolated.Failure("no answer within 2 s")
    assert found[6] == 4


def test_several_processes_work_at_once_and_results_are_in_order(tmp_path):
    """The first waits for the second, and the third for the fourth; the fifth fails."""

    def file(i: int) -> str:
        return f"__import__('pathlib').Path({str(tmp_path / str(i))!r})"

    def wait(i: int) -> str:
        return f"next(i for i in __import__('itertools').count() if {file(i)}.exists() or {pause})"

    pause = "__import__('time').sleep(0.01)"
    items = [wait(0), f"{file(0)}.touch()", wait(1), f"{file(1)}.touch()", "1/0", "2 + 2"]
    found = list(isolated.each(eval, items, seconds=60, jobs=2))
    assert [type(each) for each in found] == [int, type(None), int, type(None), isolated.Failure, int]
    assert list(isolated.each(eval, [], seconds=1, jobs=2)) == []
    assert list(isolated.each(eval, ["1"], seconds=60, jobs=9)) == [1]
