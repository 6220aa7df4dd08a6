# type: ignore  # The DSL's types are not Python's.
"""Compiles a test's host function for the emulator."""

import cutlass.cute as cute

from cute_lce.compile.trace import compile_options
from tests.tracing import not_collecting


def compile_host(function, *arguments, arch: str, folder: str, options: str = ""):
    """With its PTX, which lies in folder. arguments: those before the stream, which is torch's."""
    with not_collecting():
        return cute.compile(
            function,
            *arguments,
            cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
            options=f"{compile_options(arch)} --keep-ptx --dump-dir {folder} {options}".strip(),
        )
