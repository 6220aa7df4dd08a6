"""The CuTe DSL kernels. Only `cute_lce.compiled` imports these modules: they import cutlass."""
