#!/usr/bin/env bash
# Train on all processors of this machine with torchrun, which finds a free port by itself.
#   launch/torchrun.sh recipes/quickstart.yaml train.output=runs/two
# PROCESSES: how many (default: one a GPU; 2 without GPUs).
set -euo pipefail
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -eq 0 ]; then gpus=2; fi
exec torchrun --standalone --nproc_per_node "${PROCESSES:-$gpus}" -m hybrid train "$@"
