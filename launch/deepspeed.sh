#!/usr/bin/env bash
# Train on all processors of this machine with DeepSpeed's launcher.
#   launch/deepspeed.sh recipes/quickstart.yaml train.output=runs/two
# PROCESSES: how many (default: one a GPU; 2 without GPUs).  PORT: where they meet (default: a free one).
set -euo pipefail
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -eq 0 ]; then gpus=2 && export DS_ACCELERATOR=cpu; fi
port=${PORT:-$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')}
exec deepspeed --quiet --num_gpus "${PROCESSES:-$gpus}" --master_port "$port" --module hybrid train "$@"
