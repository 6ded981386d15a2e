"""Which rows run in a step, padded to a bucket and captured as a CUDA graph.

A *row* is a member with an alpha for each slot. A slot holds *parts* one behind the other: what was folded
into the host (its residual block first), then the seed. A *station* is one position of one slot; an *entry*
is a row that runs a part at a station; a *group* is the entries of a station whose parts have the same
architecture. A *bucket* is the capacity of a captured step; plans are padded to it.

    rows.py      which rows train and which are measured
    packing.py   the index tensors of these rows, padded to a bucket
    graphs.py    an epoch and a validation over them, captured for each bucket
"""
