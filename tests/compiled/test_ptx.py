"""What is said of two versions of a kernel's PTX; tests/compiled/ptx.py writes and compares them."""

from __future__ import annotations

import pytest

from cute_lce.arch import ARCHITECTURES
from cute_lce.plan.kernels import kernels
from tests.compiled import ptx

KERNEL = """//
.visible .entry kernel_int32(
	.param .u64 kernel_int32_param_0
)
{
	.reg .b32 	%r<3>;
	ld.param.b32 	%r1, [kernel_int32_param_0];
	add.s32 	%r2, %r1, 1;
}
.visible .entry kernel_int32_2(
)
{
	mov.b32 	%r1, 0;
}
"""


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "same"),
        ({"kernel_int32": "kernel_group"}, "same but for names"),
        ({"%r1": "%r7", "<3>": "<8>"}, "same but for names and registers"),
        ({"%r1, 1;": "%r2, 1;"}, "differs: 0 of 12 lines removed, 0 added, apart from registers"),
        ({"add.s32": "sub.s32"}, "differs: 1 of 12 lines removed, 1 added, apart from registers"),
        ({"\tmov.b32 \t%r1, 0;\n": ""}, "differs: 1 of 12 lines removed, 0 added, apart from registers"),
        ({"_param_0]": "_param_0+4]"}, "differs: 1 of 12 lines removed, 1 added, apart from registers"),
    ],
    ids=["nothing", "names", "registers", "another register", "an opcode", "a line", "an offset"],
)
def test_compare(changes: dict[str, str], verdict: str):
    changed = KERNEL
    for old, new in changes.items():
        assert old in changed
        changed = changed.replace(old, new)
    assert ptx.compare(KERNEL, changed) == verdict


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_has_a_file_of_its_own(arch: str):
    keys = set(kernels(arch, "bfloat16", "int64"))
    assert len({ptx.pass_of(key) for key in keys}) == len(keys)


def test_compare_folders(tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    with pytest.raises(FileNotFoundError, match=r"got no \.ptx file"):
        ptx.compare_folders(before, after)
    (before / "a.ptx").write_text(KERNEL)
    (after / "a.ptx").write_text(KERNEL)
    (before / "b.ptx").write_text(KERNEL)
    assert ptx.compare_folders(before, after) == {"a.ptx": "same", "b.ptx": f"only in {before}"}
