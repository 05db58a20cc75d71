"""Which environment variables a submitted job gets: their names, never their values."""

from __future__ import annotations

import re
from collections.abc import Mapping

from mcore_qwen3.config import SubmitConfig
from mcore_qwen3.errors import ConfigError

# What a run reads wherever it is.
_EVERYWHERE = re.compile(
    r"HF_TOKEN|HF_ENDPOINT|HF_HUB_OFFLINE|MODELSCOPE_API_TOKEN|OMP_NUM_THREADS|PYTORCH_CUDA_ALLOC_CONF"
    r"|CUDA_DEVICE_MAX_CONNECTIONS|(NCCL|TORCH_NCCL|GLOO|UCX|NVTE)_[A-Z0-9_]+"
)
# What names places of this machine, which a container does not have.
_SAME_FILES = re.compile(
    r"PATH|LD_LIBRARY_PATH|PYTHONPATH|VIRTUAL_ENV|CONDA_PREFIX|LANG|LC_ALL|TZ|XDG_CACHE_HOME|HF_HOME|HF_HUB_CACHE"
    r"|(HTTPS?|NO)_PROXY|(https?|no)_proxy|HF_TOKEN_PATH|MODELSCOPE_CACHE|TRITON_CACHE_DIR|TORCHINDUCTOR_CACHE_DIR"
)


def passed_variables(config: SubmitConfig, environ: Mapping[str, str]) -> list[str]:
    """Names in order: those of `--env`, and of the usual ones those that are set and not empty.

    Raises:
        ConfigError: a name of `--env` is not set; for PAI-DLC, a value holds a comma, which parts its list.
    """
    missing = [name for name in config.job.env if name not in environ]
    if missing:
        raise ConfigError("--env names variables that are set here", seen=f"{missing[0]} is not set", fix="export it")
    usual = [name for name in environ if environ[name] and _EVERYWHERE.fullmatch(name)]
    if config.job.container is None:
        usual += [name for name in environ if environ[name] and _SAME_FILES.fullmatch(name)]
    names = sorted({*config.job.env, *usual})
    if config.job.platform == "dlc":
        for name in names:
            if "," in environ[name]:
                raise ConfigError(
                    "dlc parts its environment at commas", seen=f"a comma in the value of {name}", fix=f"unset {name}"
                )
    return names
