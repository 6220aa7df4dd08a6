"""The CuTe DSL kernels. Only `cute_lce.compile.trace` imports these modules, in the call: they import cutlass."""
