"""``python -m mcore_qwen3`` is the script ``megatron``."""

import sys

from mcore_qwen3.cli.main import main

# The guard is needed: writing a checkpoint spawns processes that import this file again.
if __name__ == "__main__":
    sys.exit(main())
