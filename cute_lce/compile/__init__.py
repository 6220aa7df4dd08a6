"""Compiled kernels: `trace` compiles them, `cache` stores them, `driver` knows what can run here."""
