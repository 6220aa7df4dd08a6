"""Compiled kernels: what compiles them (trace), what keeps them (cache), what can run here (driver)."""
