"""What is done with a tile of fp32 numbers in registers: the mathematics of the loss. Mainloops move data.

A mainloop calls, for every run (a column of tiles and a range of its rows' tiles):

    state = epilogue.begin(tensors, column)                         # registers that live through the run
    epilogue.visit(tensors, state, frag, row, column, slab, split)  # each slab of each tile, in place
    epilogue.end(tensors, state, column, partial)                   # results of the run

`frag` is the thread's part of a slab of columns of a tile (fragment.Fragment); `row` is the row in the
product of its first element, and `column` the column of its first element in the tile's first slab. `split`
is the split of k that the tile is of. In the logits' GEMMs rows are classes and columns tokens: per-token
numbers are kept by the lanes that own the columns. An epilogue is a compile-time value; the tensors that it
reads and writes in global memory are in its NamedTuple.
"""
