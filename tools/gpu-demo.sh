#!/bin/sh
# `make gpu-demo`: real NCCL on this machine's GPU, its packets mirrored to a node (docs/use/gpu-demo.md).
# Whether there is a GPU is asked before anything is built. Exit status 3: there is none (make itself then ends with 2).
set -eu
cd "$(dirname "$0")/.."
if ! said=$(nvidia-smi -L 2>&1) || [ -z "$said" ]; then
    echo "NO GPU DEMO: no NVIDIA GPU with a driver is here (nvidia-smi: $said)" >&2
    echo "  remedy: run it on a machine that has one; nothing was built or installed" >&2
    exit 3
fi
make -s build
exec .venv/bin/python -P -m lab.gpu
