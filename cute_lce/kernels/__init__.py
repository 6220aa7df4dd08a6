"""The CuTe DSL kernels, which import cutlass; only `compile.trace` imports them, when it is called."""
