"""Our own kernels, their inputs and the outputs of an H100 or H200: what the emulator is compared with."""
