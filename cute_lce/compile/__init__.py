"""Compiled kernels: `trace` compiles them, `cache` stores them, `frozen` makes constants of their arguments,
`driver` knows what can run here."""
