#!/usr/bin/env bash
# Every table at scale mini on a GPU, with five seeds, and what the full tables would cost: within 40 minutes.
#   make reproduce-gpu DATA=folder-of-ESC-10
# A run that is finished is not run again, so that what the time did not suffice for goes on with the same command.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
minutes=${MINUTES:-40}

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "make reproduce-gpu: there is no CUDA device here; make reproduce runs the same tables on the CPU" >&2
    exit 1
fi

export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
"$python" -m modeling_supclap.recipes.reproduce all --scale full --dry_run true --output_dir outputs/reproduce "$@"
timeout --signal=INT "$((minutes * 60 - 60))" \
    "$python" -m modeling_supclap.recipes.reproduce all --seeds 0 1 2 3 4 --output_dir outputs/reproduce-gpu "$@" \
    || echo "make reproduce-gpu: stopped after $minutes minutes or by an error; the same command goes on" >&2
