"""What ranks are told that do not run the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock


def agreement_of_ranks(
    code: list[dict[str, str]], hosts: list[str], values: list[dict[str, Any]], hf_files: str
) -> str:
    """What each rank is told, given the code, the host and the settings of its place."""
    import torch.distributed as dist

    from mcore_qwen3.cli import agreement
    from mcore_qwen3.config import RunConfig, with_values
    from mcore_qwen3.errors import ConfigError

    rank = dist.get_rank()
    with (
        mock.patch.object(agreement, "code_facts", lambda: code[rank]),
        mock.patch.object(agreement.socket, "gethostname", lambda: hosts[rank]),
    ):
        try:
            return agreement.check_agreement(with_values(RunConfig(), values[rank]), Path(hf_files))
        except ConfigError as error:
            return str(error)
