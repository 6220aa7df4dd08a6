"""The CuTe DSL kernels. Only `compile.trace` imports these modules, when it is called: they import cutlass."""
