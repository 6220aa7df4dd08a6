"""What happens to a tile of fp32 logits in registers: the mathematics of the loss. Mainloops move data.

A mainloop calls, for every run (a row of tiles and a range of the vocabulary's tiles):

    state = epilogue.begin(tensors, rows)              # registers that live through the run
    epilogue.visit(tensors, state, frag, cols, tile)   # each slab of columns of each tile, in place
    epilogue.end(tensors, state, rows, window)         # results of the run

`rows` (rows,) and `cols` (cols,) are the thread's coordinates: its global row indices and, inside the tile,
its column indices. The architecture shows only in how many rows a thread has and over how many threads a
row is spread. An epilogue is a compile-time value; what it reads and writes in global memory is in its
NamedTuple of tensors.
"""
