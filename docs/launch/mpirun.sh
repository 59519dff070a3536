#!/bin/bash
# Train on several hosts under Open MPI. Run from a disk that all hosts see.
#   HOSTS=host0:1,host1:1 bash docs/launch/mpirun.sh                         # train/gpt.py
#   HOSTS=host0:1,host1:1 bash docs/launch/mpirun.sh python own.py --flags   # your script
# To fill in: HOSTS. host0:1 is one process there, with all GPUs of the host; host0:8 is eight, with one GPU each.
# Process 0 runs on the first host, which is told to all as the coordinator.
set -u
HOSTS=${HOSTS:-localhost:1}
out=${OUT:-runs/gpt2-xl}
first=${HOSTS%%[:,]*}
coordinator=${JAX_COORDINATOR_ADDRESS:-$first:${PORT:-12321}}
command=("$@")
if [ $# -eq 0 ]; then
  command=(.venv/bin/python -m train.gpt --preset gpt2-xl --out "$out")
  if [ -n "$(ls "$out/checkpoints" 2>/dev/null | grep -x '[0-9]*')" ]; then command+=(--resume); fi
fi

# --bind-to none: mpirun would give each process one core. mpirun ends all processes when one ends with an error.
exec mpirun ${MPIRUN_FLAGS:-} --host "$HOSTS" --map-by slot --bind-to none --tag-output \
  -x JAX_COORDINATOR_ADDRESS="$coordinator" "${command[@]}"
