"""What a call decides before anything is launched. Integers only: no torch, no cutlass.

schedule: where the backward obtains its logits, and how many columns are kept. forward, backward: windows,
stripes, grids. memory: the bytes that each of them takes. problem: what a plan depends on.
"""
