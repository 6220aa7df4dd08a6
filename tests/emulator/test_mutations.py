"""Synchronisation removed or altered in the kernels' PTX is found, except where docs/emulator-mutations.md
says why not."""

from __future__ import annotations

import pytest

from tests.emulator import (
    backward_kernels,
    compaction_kernels,
    forward_kernels,
    kept_logits_kernels,
    mutate,
    term_kernels,
)
from tests.emulator.mutation_kernels import KERNELS

BACKWARD = backward_kernels.subjects()
COMPACTION = compaction_kernels.subjects()
KEPT_LOGITS = kept_logits_kernels.subjects()
TERMS = term_kernels.subjects()
HOPPER_FORWARDS = [subject for subject in KERNELS if subject.name.startswith("the Hopper forward")]
LONG = [*HOPPER_FORWARDS, *forward_kernels.subjects(), *BACKWARD, *COMPACTION, *KEPT_LOGITS, *TERMS]
SHORT = [subject for subject in KERNELS if subject not in HOPPER_FORWARDS]
# A GEMM that counts its tokens or adds is sampled of Hopper: Blackwell's others have its pipelines, and what
# keeps in whole boxes those of half ones. Of kept logits the kernel with all terms takes long to compile.
VARIANTS = ("counts its tokens, Blackwell", "that adds, Blackwell", f"{backward_kernels.HALF_BOXES}, Hopper")
SAMPLED = [
    *HOPPER_FORWARDS,
    *(subject for subject in BACKWARD if not subject.name.endswith(VARIANTS)),
    *COMPACTION,
    *KEPT_LOGITS[1:],
]


@pytest.mark.parametrize(
    "subject",
    [*SHORT, *(pytest.param(subject, marks=pytest.mark.emulator_full) for subject in LONG)],
    ids=lambda s: s.name,
)
def test_every_mutation_is_found_or_explained(subject, tmp_path):
    emulated = subject.build(str(tmp_path))
    for seed in subject.seeds:
        assert subject.check(emulated, seed), f"the kernel itself fails with seed {seed}"
    verdicts = mutate.survey(
        emulated, subject.check, subject.seeds, subject.mutates(emulated.ptx), subject.rules
    )
    assert len(verdicts) >= subject.least_mutations
    missed = [v.mutation for v in verdicts if not v.found]
    unexplained = [m for m in missed if subject.reason(m) is None]
    assert not unexplained, unexplained
    # A reason must not come to cover a mutation that used to be found.
    assert len(missed) <= subject.missed


@pytest.mark.parametrize("subject", SAMPLED, ids=lambda s: s.name)
def test_some_mutations_of_long_surveys(subject, tmp_path):
    """Two of those without a reason to go unfound, each found by one of the first schedules."""
    emulated = subject.build(str(tmp_path))
    # That the arithmetic is right otherwise is what the tests of tests/emulated say that these checks are.
    if subject.rules is mutate.RULES:
        assert subject.check(emulated, 1), "the kernel itself fails"
    mine = subject.mutates(emulated.ptx)
    some = [m for m in mutate.mutations(emulated.ptx, subject.rules) if mine(m) and subject.reason(m) is None]
    some = some[3 :: max(min(16, len(some) - 4), -(-len(some) // 3))][:2]
    assert len(some) == 2
    verdicts = mutate.survey(emulated, subject.check, range(4), lambda m: m in some, subject.rules)
    assert len(verdicts) == len(some)
    assert not [v.mutation for v in verdicts if not v.found]


def test_mutations_change_one_statement_and_leave_the_rest():
    text = """	bar.sync 	1, 128;
	@%p1 mbarrier.arrive.expect_tx.shared.b64 %rd1, [%r1], %r2;
	wgmma.wait_group.sync.aligned 1;
"""
    found = mutate.mutations(text)
    assert [m.what for m in found] == [
        "barrier removed", "16 bytes more", "16 bytes fewer", "wait removed", "one group fewer waited for",
    ]  # fmt: skip
    assert mutate.apply(text, found[0]).split("\n")[0].strip() == ""
    altered = mutate.apply(text, found[1]).split("\n")[1]
    assert "add.s32 mutated, %r2, 16;" in altered
    assert "@%p1 mbarrier.arrive.expect_tx.shared.b64 %rd1, [%r1], mutated;" in altered
    assert mutate.apply(text, found[4]).split("\n")[2].strip() == "wgmma.wait_group.sync.aligned 2;"
