"""The parts of benchmarks/gpu.py.

A *part* answers one question; it is a module with

- `TITLE`, `ASKED`: its heading on the page, and in a sentence what is asked and how it is measured;
- `WEIGHT`: its share of the time, relative to the other parts;
- `FRESH`: on a GPU every case has a process of its own, so that its peak of memory is its own;
- `SIDE_BY_SIDE`: no time is measured, so that on a GPU several processes may run at once;
- `XLA`: flags of XLA for its processes, on top of what the user has set;
- `cases(config)`: the names of its cases, the most important first;
- `SHORT`: those that the short form runs, which is one of each kind;
- `run(case, config)`: measures one case and yields a *row* as soon as it is measured.

A row is a dict of columns and values (str, int, float, bool, None), with the unit in the name of the column.
"table" names the table that it belongs to; "ok" is True or False where something was asked. A row {"cannot":
text} is something that this machine cannot show. `config` is a plain dict (`machine.config_of`), since it
travels to other processes.
"""

PARTS = {
    "peak": "gpu_parts.peaks",
    "donation": "gpu_parts.donation",
    "numbers": "gpu_parts.numeric",
    "cost": "gpu_parts.cost",
    "rate": "gpu_parts.rate",
    "offload": "gpu_parts.host",
    "streams": "gpu_parts.streams",
    "codes": "gpu_parts.codes",
}
"""The parts by name, in the order of importance."""
