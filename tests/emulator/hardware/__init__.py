"""Our own kernels, their inputs and an H100's outputs: what the emulator is compared with."""
