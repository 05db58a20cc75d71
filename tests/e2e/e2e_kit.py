"""The command line as a user starts it: real processes, a tiny model, own rows.

Nothing of the project is imported here but its checkpoint readers: what runs is `python -m mcore_qwen3`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
MARK = "MCORE_QWEN3_E2E_MARK"  # every process below a job inherits it
LIMIT = 600.0  # seconds; only ends what would hang where no test has its own limit
# What the machine that runs the tests may have set, and what would change the answers here.
_UNSET = ("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")
_UNSET_FAMILIES = ("SLURM_", "KUBERNETES_CONTAINER_", "GLOO_", "PET_")

Done = subprocess.CompletedProcess[str]


def wait_until(
    condition: Callable[[], object], what: Callable[[], str], limit: float = LIMIT, pause: float = 0.05
) -> None:
    """Return once the condition holds, looking after each pause; `what` says what did not happen, and what did."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(pause)


class Job:
    """A started command: stdout and stderr in one file, in the order in which they were written."""

    def __init__(self, words: Sequence[str], folder: Path, environ: dict[str, str]) -> None:
        self.mark = uuid.uuid4().hex
        self._screen = folder / f"screen-{self.mark}"
        with self._screen.open("wb") as screen:
            self.process = subprocess.Popen(
                words, cwd=folder, env={**environ, MARK: self.mark}, stdout=screen, stderr=subprocess.STDOUT
            )

    @property
    def screen(self) -> str:
        return self._screen.read_text(encoding="utf-8")

    @property
    def last_line(self) -> str:
        return self.screen.splitlines()[-1]

    def end(self) -> int:
        """Wait for the exit code."""
        wait_until(lambda: self.process.poll() is not None, lambda: f"it does not end:\n{self.screen}")
        return self.process.returncode

    def running(self) -> list[psutil.Process]:
        """Every living process of the job."""
        return [process for process in psutil.process_iter() if self._belongs(process)]

    def _belongs(self, process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False

    def rank(self, number: int) -> psutil.Process:
        """The process of one rank: it leads its session, its helpers do not."""
        (found,) = [
            process
            for process in self.running()
            if process.environ().get("RANK") == str(number) and os.getsid(process.pid) == process.pid
        ]
        return found

    def wait_for_step(self, save: Path, step: int) -> None:
        """Until the log holds this step."""
        wait_until(
            lambda: self.process.poll() is not None or len(steps_of(save)) >= step,
            lambda: f"no step {step}:\n{self.screen}",
        )
        assert self.process.poll() is None, self.screen

    def assert_nothing_left(self) -> None:
        """Every process of the job has ended (a helper of a process that has just exited may take a moment)."""
        wait_until(lambda: not self.running(), lambda: f"still running: {self.running()}", limit=10)

    def kill(self) -> None:
        """Clean up after a test that failed."""
        for process in self.running():
            process.kill()
        self.process.wait()


class Site:
    """A folder to work in, with caches of its own, and commands started there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs: list[Job] = []
        kept = {name for name in os.environ if name not in _UNSET and not name.startswith(_UNSET_FAMILIES)}
        self.environ = {name: os.environ[name] for name in kept} | {
            "HOME": str(folder),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }

    def start(self, *words: object, prefix: Sequence[str] = (), **environ: str) -> Job:
        """Start `megatron <words>`; keyword arguments are environment variables, `prefix` a command that becomes it."""
        job = Job([*prefix, *self._command(words)], self.folder, self.environ | environ)
        self.jobs.append(job)
        return job

    def run(self, *words: object, **environ: str) -> Done:
        """Run `megatron <words>` to its end, stdout and stderr apart."""
        return subprocess.run(
            self._command(words),
            cwd=self.folder,
            env=self.environ | environ,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )

    @staticmethod
    def _command(words: Sequence[object]) -> list[str]:
        return [sys.executable, "-m", "mcore_qwen3", *map(str, words)]


def steps_of(save: Path) -> list[dict[str, Any]]:
    """The records of finished steps in a run's log, as far as it has been written."""
    log = save / "train_log.jsonl"
    lines = log.read_text(encoding="utf-8").split("\n")[:-1] if log.exists() else []
    return [record for record in map(json.loads, lines) if "loss" in record]


def write_rows(path: Path, number: int, first: int = 0) -> Path:
    """Chat rows of uneven length, English and Chinese in turn; row n of every file is the same."""
    english = ["the", "gradient", "of", "every", "expert", "is", "summed", "over", "ranks", "before", "the", "update"]
    chinese = ["每个", "专家", "的", "梯度", "在", "更新", "之前", "求和", "然后", "保存", "模型", "权重", "，", "数据"]
    rows = []
    for index in range(first, first + number):
        words, space = (english, " ") if index % 2 == 0 else (chinese, "")
        asked, answered = 1 + index % 5, 1 + index * 7 % 41
        question, answer = (
            space.join(words[(index * stride + place * place) % len(words)] for place in range(length))
            for stride, length in ((3, asked), (5, answered))
        )
        rows.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_model(folder: Path, tokenizer: Path, vocab_size: int) -> Path:
    """A random Qwen3-MoE as transformers writes it (8 experts, top 2), with a Base model's end token."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    end = json.loads((tokenizer / "generation_config.json").read_text())["bos_token_id"]
    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=1024,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        norm_topk_prob=True,
        rope_theta=1e6,
        bos_token_id=end,
        eos_token_id=end,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tokenizer / name).read_bytes())
    generation = {"bos_token_id": end, "eos_token_id": end, "max_new_tokens": 2048}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def cut_tokenizer(source: Path, target: Path, size: int) -> int:
    """The real tokenizer with its first `size` tokens and its added ones; returns the number of tokens.

    Logits over all of Qwen3's 151,936 tokens are most of the work of a tiny model.
    """
    target.mkdir()
    files = {name: json.loads((source / name).read_text(encoding="utf-8")) for name in _TOKENIZER_FILES}
    tokenizer, config, generation = files.values()
    model = tokenizer["model"]
    model["vocab"] = {token: number for token, number in model["vocab"].items() if number < size}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    numbers = {token["id"]: size + place for place, token in enumerate(tokenizer["added_tokens"])}
    for token in tokenizer["added_tokens"]:
        token["id"] = numbers[token["id"]]
    decoder = config["added_tokens_decoder"]
    config["added_tokens_decoder"] = {str(numbers[int(number)]): token for number, token in decoder.items()}
    generation["bos_token_id"] = numbers[generation["bos_token_id"]]
    for name, content in files.items():
        (target / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return size + len(numbers)


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
