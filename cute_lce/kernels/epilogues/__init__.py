"""What is done with a tile of fp32 numbers in registers: the mathematics of the loss. Mainloops move data.

A mainloop calls, for every run (a column of tiles, a window of its rows and a split of k; schedule.py):

    state = epilogue.begin(tensors, column, staging)     # registers that live through the run
    epilogue.visit(tensors, staging, state, frag, row, column, slab, split)     # each slab of each tile
    epilogue.end(tensors, staging, state, column, partial)      # results of the run

`frag` is the thread's part of a slab of columns of a tile (fragment.Fragment), changed in place; `row` is the
row in the product of its first element, and `column` the column of its first element in the tile's first
slab. `split` is the number of the run's split of k. `staging` has the boxes of shared memory where a group's
warps merge a forward's statistics (partials.py), and through which an epilogue that `stores` does so
(store.py); the mainloop drains them at its end. `partial` is the number of the window's share that the warps
which share these tiles have seen; an epilogue whose groups of four warps have results of their own numbers
these itself. One with `scarce_registers` has many values alive beside `frag`: Hopper's mainloop then
multiplies the first k tile apart (gemm_sm90.py), which frees each element's register after its last use, but
makes tiles of few k tiles up to 4% slower where an epilogue only stores them. If one `streams`, since it
stores nothing or stores with the L2 policy evict-first, A is loaded with that policy. `words` are 32-bit
words of shared memory that each thread of an epilogue has for itself.

In the GEMMs of logits columns are tokens and rows classes, in dhidden's columns are tokens and rows features,
and in dweight's columns are features and rows classes. A token's numbers are kept by the lanes that own its
column. An epilogue is a compile-time value; the tensors that it reads and writes in global memory are in its
NamedTuple.
"""
