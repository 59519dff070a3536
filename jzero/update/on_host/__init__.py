"""Updates outside of the compiled program: the optimizer runs on the CPU, on state that never enters a GPU's program.

Vocabulary: the *host mesh* has the shape of the plan's, with the CPU devices of the same processes; a *handle* stands
in an optimizer state for an array that a *store* keeps; a *unit* is the arrays that one program updates.

    handles.py       what the user's state holds: handles, and the stamp that says which store at which generation
    chain.py         the optax chain as the host runs it
    units.py         its update as one program per unit (`update_graph.py`: as a graph)
    store.py         who keeps the arrays and runs the units
    disk_tier.py     the same with the arrays in files (`file_layout.py`: which are where; `small_leaves.py`: the rest)
    disk/            units on a local disk; a whole generation survives any crash; does not use JAX
    initial.py       a new state in files
    running.py       a store in use: its updates in order, one step late or not
    landing.py       gradients to shards, new params to their stored layouts
    host_arrays.py   small leaves and params to the host mesh and back
    update.py        `tx.init` and `tx.update` of a state with handles
"""
