"""The long sweep of the tests in FOLDERS (`make test-emulator-full`), besides what is marked `emulator_full`
where it stands.

By default a test has those of its cases that bring a value of a parameter which no case before has: each
value is in one, with values of the others in turn. The remaining cases find a fault that needs two values at
once, such as a row that jumps in stripes of float16.

LONG has cases that alone compile kernels of their own, which takes 6 to 17 s of a core each.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

FOLDERS = (
    *("tests/compiled/", "tests/emulated/"),
    # In these each case of a product takes a second.
    *("tests/host/test_doctor.py", "tests/host/test_memory_streaming.py"),
)
LONG = {
    # Emulated backwards, and gradients of forwards.
    r"emulated/test_backward.py::test_shapes\[(33-127-136-32-|41-200-129-112-)": (
        "What is wrong in tiles of 32 or of 112 tokens alone."
    ),
    r"emulated/test_backward.py::test_tiles_that_ask_little_of_l2\[160": (
        "What is wrong in tiles that share an operand, where logits are computed again."
    ),
    r"emulated/test_backward.py::test_what_is_kept_in_tiles_that_end_with_half_a_box\[56": (
        "A half box behind another number of whole ones."
    ),
    r"emulated/test_backward.py::test_what_is_kept_where_statistics_are_in_shared_memory\[\(192": (
        "float16's references in CTAs that share tokens."
    ),
    r"emulated/test_backward.py::test_paced\[recompute": (
        "Steps that are not counted where a backward has one stripe; by default it has two, and a kept one."
    ),
    r"emulated/test_backward.py::test_an_ignore_index_beyond_int32": (
        "An int32 target that is taken for the low half of ignore_index."
    ),
    r"emulated/test_backward.py::test_epilogues_hide_behind_the_mmas": (
        "An epilogue of Blackwell's that issues more than docs/kernels.md has: slower, not wrong."
    ),
    r"emulated/test_accumulate.py::test_logit_scale": "A scale that a chunk applies twice, or not at all.",
    r"emulated/test_accumulate.py::test_schedules_of_warps": "A sum that is read before it is stored.",
    r"emulated/test_accumulate.py::test_dweight_is_added\[.*keep-to bf16-sm_100a": (
        "Blackwell's sums of bfloat16; by default they are of float32, as Hopper's are of both."
    ),
    r"emulated/test_multiply.py::test_dweight_is_added\[.*(bf16-sm_100a|fp16-sm_90a)": (
        "A type of sums that only one architecture rounds well."
    ),
    # Emulated shards and terms.
    r"emulated/test_shards.py::test_ignored_rows_are_not_read\[recompute": (
        "What reads ignored rows where no column is kept; by default some are, and all."
    ),
    r"emulated/test_shards.py::test_dweight_beside_a_collective\[kept1": "What float16 scales too late.",
    r"emulated/test_shard_terms.py::test_topk_of_shards": "Given classes under a cap, in another's columns.",
    r"emulated/test_kept_logits.py::test_tiles_that_end_with_half_a_box": "Logits kept in half a box.",
    r"emulated/test_kept_logits.py::test_dlogits_beside_dweight\[entropy": "Spare warps of Blackwell's.",
    r"emulated/test_kept_logits.py::test_tokens_and_classes_of_many_pieces\[sm_90a": "The same of Hopper's.",
    r"emulated/test_kept_logits.py::test_errors_beside_recomputing": "Lost precision, not a wrong value.",
    r"emulated/test_kept_logits.py::test_numbers_of_classes_in_stripes\[given ids-sm_100a": (
        "Given classes of a stripe on Blackwell; by default Hopper has all terms at once."
    ),
    r"emulated/test_terms.py::test_entropy_of_confident_rows\[keep": "An entropy's digits.",
    r"emulated/test_terms.py::test_numbers_without_a_gradient": (
        "A number that needs an entropy beside it: test_numbers_of_tiles_between has all of these with one."
    ),
    r"emulated/test_terms.py::test_numbers_beside_what_is_kept": "Numbers beside kept exponentials.",
    r"emulated/test_terms.py::test_a_term_of_ones_own\[": (
        "A LogitTerm alone; by default it is beside other terms, and kept."
    ),
    r"emulated/test_terms.py::test_what_keeps_a_term_of_ones_own\[sm_90a-(Tanh|SoftPlus)": (
        "A function that a LogitTerm may call and Knee does not."
    ),
    r"emulated/test_terms.py::test_a_term_of_ones_own_of_masked_classes": "A slope at minus infinity.",
    r"emulated/test_terms.py::test_topk\[sm_100a": "Given classes of float16 on Blackwell.",
    r"emulated/test_terms.py::test_topk_in_slabs": "Given classes in the slabs of a tile of 96 tokens.",
    r"emulated/test_terms.py::test_linear_bias\[stripes": (
        "A bias beside a scale alone; by default it is beside other terms, kept and smoothed."
    ),
    r"emulated/test_terms.py::test_what_tensor_cores_lose.*sm_100a": "What Blackwell's lose of an offset.",
    r"emulated/test_terms.py::test_all_numbers_of_wide_tiles": "Numbers in tiles of 160 tokens.",
    # Emulated forwards.
    r"emulated/test_pace.py::test_(pace|clusters).*(side by side|every fourth|single|shared|100a, pair)": (
        "Clusters that wait for steps nobody counts, of kinds besides those of one CTA and two pairs."
    ),
    r"emulated/test_sm90.py::test_chosen_config\[tiles(0|3|7)-": "What is wrong in one width alone.",
    r"emulated/test_sm90.py::test_shared_memory_is_what_the_plan_says\[\(32, 1\)": "The narrowest's.",
    r"emulated/test_sm90.py::test_other_configs\[(one warpgroup|three warpgroups)": (
        "Turns of warpgroups that no plan chooses."
    ),
    r"emulated/test_sm100.py::test_cluster\[.*(64 tokens|192 columns|224 tokens)": (
        "What is wrong in one of these widths alone."
    ),
    r"emulated/test_sm100.py::test_statistics_equal_hopper\[ragged, fp16": "Bits of float16.",
    # Compiled.
    r"compiled/test_backward.py::.*sm_90a-(1x112|2x144|1x192-float16-keep)": (
        "Spills in widths between the narrowest, two side by side and the widest."
    ),
    r"compiled/test_backward.py::.*sm_100a-1x64-bfloat16-keep": "Those of Blackwell's narrowest that keeps.",
    r"compiled/test_backward.py::test_no_dweight_spills\[sm_90a-256x192-1x2": "Those beside shared tokens.",
    r"compiled/test_backward.py::test_tall_tiles_of_dhidden\[136": "Those of a second tall tile.",
    r"compiled/test_sm90.py::.*\[(two|high|cluster of 2 x 2|one warpgroup)": (
        "Those of tiles side by side, of 192 classes, and of what only a caller chooses."
    ),
    r"compiled/test_sm100.py::.*(128 tokens|192 tokens|single|two pairs|sm_100f)": "Those of more clusters.",
    r"compiled/test_terms.py::test_terms_of_wide_tiles_spill_nothing\[(1x192|2x128)": "Those of two tiles.",
    r"compiled/test_terms.py::test_no_wide_tile_of_terms_spills\[(softcap|total)": "Those of two more terms.",
    r"compiled/test_terms.py::test_what_spare_warps_do_spills_nothing\[sm_\w+-\d-coefficients": (
        "Those of fewer terms at once."
    ),
}
"""Regular expressions of ids, behind tests/: what the cases are there to find."""


def is_long(nodeid: str) -> bool:
    """Whether LONG has a case."""
    return any(re.match(f"tests/{each}", nodeid) for each in LONG)


def beyond_each_value(items: Sequence[pytest.Function]) -> list[pytest.Function]:
    """Of the cases of some tests, those without which each value of each parameter is still in one."""
    tests: dict[tuple[Path, str], list[pytest.Function]] = {}
    for item in items:
        tests.setdefault((item.path, item.originalname), []).append(item)
    found = []
    for cases in tests.values():
        values = {case: set(enumerate(map(repr, case.callspec.params.values()))) for case in cases}
        left = set().union(*values.values())
        used: Counter[tuple[int, str]] = Counter()
        while left and cases:
            # The first of those that bring most, with values of the others that few have.
            chosen = max(
                cases,
                key=lambda case: (len(values[case] & left), -sum(used[each] for each in values[case])),
            )
            left -= values[chosen]
            used.update(values[chosen])
            cases = [case for case in cases if case is not chosen]
        found += cases
    return found


def mark(items: Sequence[pytest.Item]) -> None:
    """Mark the cases of the long sweep among those in FOLDERS."""
    short = []
    for item in items:
        if item.nodeid.startswith(FOLDERS) and not item.get_closest_marker("emulator_full"):
            if is_long(item.nodeid):
                item.add_marker(pytest.mark.emulator_full)
            elif isinstance(item, pytest.Function) and hasattr(item, "callspec"):
                short.append(item)
    for item in beyond_each_value(short):
        item.add_marker(pytest.mark.emulator_full)
