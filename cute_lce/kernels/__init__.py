"""The CuTe DSL kernels. They import cutlass: only `compile.trace` imports them, when it is called."""
