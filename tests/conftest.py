"""Markers and fixtures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import sweeps


@pytest.hookimpl(tryfirst=True)  # -m reads the marks in this hook too.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the long sweeps; and deselect, and so count in the closing line, what needs a GPU where there is
    none."""
    sweeps.mark(items)
    missing = [name for name, least in (("gpu", 1), ("gpu_multi", 2)) if torch.cuda.device_count() < least]
    needs_gpu = [item for item in items if any(map(item.get_closest_marker, missing))]
    if needs_gpu:
        config.hook.pytest_deselected(items=needs_gpu)
        items[:] = [item for item in items if item not in needs_gpu]


def pytest_addoption(parser: pytest.Parser) -> None:
    """For the Makefile, which runs tests that compare times in a process of their own, before the others."""
    parser.addoption("--reports-out", type=Path, help="write the tests' reports to this file")
    parser.addoption("--reports-in", type=Path, help="count the reports of this file in the closing line")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    hook, stats = config.hook, terminalreporter.stats
    if (path := config.getoption("--reports-out")) is not None:
        reports = [
            (outcome, hook.pytest_report_to_serializable(config=config, report=report))
            for outcome, found in stats.items()
            if outcome
            for report in found
            if isinstance(report, pytest.TestReport)
        ]
        path.write_text(json.dumps(reports, default=str), encoding="utf-8")
    if (path := config.getoption("--reports-in")) is not None and path.exists():
        for outcome, report in json.loads(path.read_text(encoding="utf-8")):
            report = hook.pytest_report_from_serializable(config=config, data=report)
            terminalreporter._add_stats(outcome, [report])


def pytest_report_header() -> str:
    if torch.cuda.is_available():
        return f"torch {torch.__version__}, {torch.cuda.get_device_name()}"
    return f"torch {torch.__version__}, no CUDA device: tests marked gpu or gpu_multi are deselected"


@pytest.fixture
def fresh_inductor() -> Iterator[None]:
    """No graph of earlier runs: inductor's key of a graph holds the public op's name, not the inner ops'
    schemas, so that a cached graph may call them as an earlier version had them."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        yield


@pytest.fixture
def poisoned_empty():
    """torch.empty and its relatives give nan, so that what is not written is seen."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    # With this mode comes torch.utils.deterministic.fill_uninitialized_memory, which is on by default.
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
