"""What is done with a tile of fp32 numbers in registers: the mathematics of the loss. Mainloops move data.

A mainloop calls, for every run (a row of tiles and a range of the vocabulary's tiles):

    state = epilogue.begin(tensors, rows)                    # registers that live through the run
    epilogue.visit(tensors, state, frag, rows, cols, tile)   # each slab of columns of each tile, in place
    epilogue.end(tensors, state, rows, window)               # results of the run

`frag` (rows, cols) is the thread's fragment; `rows` (rows,) are its global row indices, and `cols` (cols,)
its column indices within tile number `tile`. The architecture determines only how many rows a thread has and
how many threads share a row. An epilogue is a compile-time value; the tensors that it reads and writes in
global memory are in its NamedTuple.
"""
