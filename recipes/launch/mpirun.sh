#!/bin/bash
# Two nodes with eight GPUs and Open MPI:  HOSTS=host0,host1 recipes/launch/mpirun.sh recipes/llama3_8b.py
#
# Each node runs a process (ppr:1:node). mpirun sets the rank and the number of processes, but not the coordinator
# address, which is the first name in HOSTS. The training communicates with NCCL, not with MPI.
set -euo pipefail
: "${HOSTS:?the nodes, separated by commas}"

# -x exports a variable to the other nodes.
# XLA_CLIENT_MEM_FRACTION: plans may use 90 % of the GPU memory. The default of JAX is 75 %.
# NCCL_DEBUG=WARN: log network errors of NCCL, which are silent by default.
# XLA_FLAGS is not set: `train` uses the options shown by `explain`. Add others with --xla NAME=VALUE.
# --bind-to none: let a process use all cores of its node. By default Open MPI binds it to a single core.
exec mpirun --host "$HOSTS" --map-by ppr:1:node --bind-to none \
    -x "JAX_COORDINATOR_ADDRESS=${HOSTS%%,*}:8476" \
    -x XLA_CLIENT_MEM_FRACTION=0.90 \
    -x NCCL_DEBUG=WARN \
    meshpar train "$@"
