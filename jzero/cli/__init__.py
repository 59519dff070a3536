"""The command line: `jzero plan`, `explain`, `verify`, `export`, `deepspeed`; `jzero.__main__` lists the commands.

Vocabulary
  job          what one command asks for, checked before anything is started (`job.py`)
  worker       the process that compiles, with devices of its own (`worker.py`, started by `process.py`)
  program      the model and the step that are compiled: a preset or the user's file (`program.py`)

What always holds
  Bad input is refused before a process is started. Standard output has the result alone.
"""
