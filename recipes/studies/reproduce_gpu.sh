#!/usr/bin/env bash
# Run all tables at scale mini on a GPU with five seeds, and estimate the cost of the full tables, within 40 minutes.
#   make reproduce-gpu DATA=folder-of-ESC-10
# Finished runs are not repeated, so the same command continues after the time limit.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=.venv/bin/python
minutes=${MINUTES:-40}

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "make reproduce-gpu: no CUDA device found; make reproduce runs tables on the CPU" >&2
    exit 1
fi

export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
"$python" -m modeling_supclap.recipes.reproduce all --scale full --dry_run true --output_dir outputs/reproduce "$@"
timeout --signal=INT "$((minutes * 60 - 60))" \
    "$python" -m modeling_supclap.recipes.reproduce all --output_dir outputs/reproduce-gpu "$@" \
    || echo "make reproduce-gpu: stopped after $minutes minutes or by an error; run the same command to continue" >&2
