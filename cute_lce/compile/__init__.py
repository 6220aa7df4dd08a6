"""Compiled kernels: `trace` compiles them, for a `baseline` of CPUs, `cache` stores them, `frozen` makes
constants of their arguments, `driver` knows what can run here."""
