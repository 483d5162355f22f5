#!/bin/bash
# Two nodes of eight GPUs under Open MPI:  HOSTS=host0,host1 recipes/launch/mpirun.sh recipes/llama3_8b.py
#
# One process a node (ppr:1:node). mpirun says to each which of how many it is, and nothing about where the first runs:
# that is said here, by the first name of HOSTS. MPI carries no message of the training; NCCL does.
set -euo pipefail
: "${HOSTS:?the nodes, separated by commas}"

# -x hands a variable on to the other nodes.
# XLA_PYTHON_CLIENT_MEM_FRACTION: what a plan may fill by estimate; jax takes 0.75 of a GPU's memory unless told.
# NCCL_DEBUG=WARN: NCCL says what is wrong with a network before it hangs; its default is silence.
# No XLA_FLAGS: `train` compiles by the options that `explain` shows. --xla NAME=VALUE adds others to both.
# --bind-to none: a process needs all cores of its node, and Open MPI would give it one.
# MESHPAR_TOKEN: the secret of this run. Process 0 ignores programs that connect without it while the processes join.
MESHPAR_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export MESHPAR_TOKEN
exec mpirun --host "$HOSTS" --map-by ppr:1:node --bind-to none \
    -x "JAX_COORDINATOR_ADDRESS=${HOSTS%%,*}:8476" \
    -x XLA_PYTHON_CLIENT_MEM_FRACTION=0.90 \
    -x NCCL_DEBUG=WARN \
    -x MESHPAR_TOKEN \
    meshpar train "$@"
