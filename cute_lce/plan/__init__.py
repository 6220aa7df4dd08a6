"""What a call decides before anything is launched. Numbers only: no torch, no cutlass.

schedule: how the backward obtains the logits, how many columns are kept, and what workspace is enough.
candidates: what a backward may do. forward, backward: windows, stripes, chunks, grids. plans: what they
return. gemm: the grid of one GEMM. cost: what plans are predicted to take. memory: the bytes that each of
them takes. kernels: the keys of what is compiled. problem: what a plan depends on.
"""
