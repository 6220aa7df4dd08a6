"""tcgen05 (PTX ISA 9.7.16)."""
