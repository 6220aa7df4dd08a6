"""Fixtures of the emulated tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cute_lce.plan import memory
from tests.device import forget_plans
from tests.emulated.backward import narrow_plans


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """narrow_plans, and none of these plans afterwards."""
    narrow_plans(monkeypatch)
    yield
    forget_plans()


@pytest.fixture
def compacting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are compacted in small calls too. Behind `narrow`, which forgets the plans."""
    monkeypatch.setattr(memory, "LEAST_VOCAB", 0)
    monkeypatch.setattr(memory, "LEAST_COMPACTED", 0)
    forget_plans()
