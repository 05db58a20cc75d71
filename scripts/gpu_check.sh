#!/usr/bin/env bash
# Run the tests that need a CUDA GPU; where there is none, say so and end well. Called by `make gpu-check`.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! .venv/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu-check: torch sees no CUDA GPU on this machine, nothing was run"
    exit 0
fi
exec .venv/bin/python -m pytest tests/gpu
