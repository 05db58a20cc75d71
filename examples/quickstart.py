"""Train a small Qwen3-MoE with expert parallelism on two CPU ranks, and check what comes out.

Run it with `make quickstart`. It does what a user does, in five steps:

1. write a random Hugging Face checkpoint of about 25 M parameters with the real Qwen3 tokenizer;
2. write real English and Chinese instruction rows as jsonl;
3. run `megatron sft` on two ranks, each holding half of the experts;
4. load the exported checkpoint in transformers, and let it write a few words;
5. compare its logits with those of our own model.

Everything lands in ./quickstart_output; a second run keeps the checkpoint and the rows and trains anew.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MATERIAL = ROOT / ".material"
OUTPUT = Path("quickstart_output")
MODEL, ROWS, RUN = OUTPUT / "model", OUTPUT / "rows.jsonl", OUTPUT / "run"

STEPS = 100
RANKS = 2
REQUIRED_DROP_NATS = 3.0
LOGIT_TOLERANCE = 1e-4
COMPARED_TEXTS = ["Machine learning is fun. " * 8, "机器学习很有趣，因为它从数据里学习。" * 8]

# The official spelling of config.json (transformers 5 writes other names): 8 experts, 2 a token.
SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 384,
    "max_position_embeddings": 4096,
    "max_window_layers": 4,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 384,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def main() -> int:
    """Run the five steps; return 0 when the loss fell and the logits agree."""
    started = time.monotonic()
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    OUTPUT.mkdir(exist_ok=True)
    write_model()
    write_rows()
    train()
    drop = loss_drop()
    text = generate("Give three tips for staying healthy.")
    difference = largest_logit_difference()  # last: our model makes this process a rank, with megatron's CPU stand-ins

    print(
        f"\nThe loss fell by {drop:.2f} nats: first step minus the mean of the last ten (at least {REQUIRED_DROP_NATS} expected)"
    )
    print(
        f"Largest logit difference, transformers against our model: {difference:.1e} (under {LOGIT_TOLERANCE} expected)"
    )
    print(f"It writes (after {STEPS} steps it knows which tokens are common, little more): {text!r}")
    print(
        f"Loss curve:    {RUN / 'loss.png'}\nHugging Face:  {export_folder()}\nTook {time.monotonic() - started:.0f} s"
    )
    if drop < REQUIRED_DROP_NATS or difference >= LOGIT_TOLERANCE:
        print("quickstart: FAILED, see the two numbers above", file=sys.stderr)
        return 1
    print(NEXT)
    return 0


def write_model() -> None:
    """Step 1: a random checkpoint as transformers writes it, with the official config.json and tokenizer files."""
    if MODEL.is_dir():
        print(f"1/5 random Qwen3-MoE checkpoint: kept {MODEL}")
        return
    print("1/5 random Qwen3-MoE checkpoint, with the real Qwen3 tokenizer", flush=True)
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE))
    # Renamed when whole, so that an interrupted run leaves no folder that looks complete.
    partial = OUTPUT / "model.partial"
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    for file in (MATERIAL / "tokenizer").iterdir():
        shutil.copy(file, partial / file.name)
    (partial / "config.json").write_text(json.dumps(SHAPE, indent=2), encoding="utf-8")
    partial.rename(MODEL)
    print(f"    {sum(value.numel() for value in model.parameters()) / 1e6:.1f} M parameters in {MODEL}")


def write_rows() -> None:
    """Step 2: the alpaca rows, English and Chinese in turn, as one jsonl file."""
    print(f"2/5 real English and Chinese instruction rows: {ROWS}", flush=True)
    english, chinese = (
        json.loads((MATERIAL / "data" / f"alpaca_{language}_demo.json").read_text(encoding="utf-8"))
        for language in ("en", "zh")
    )
    rows = [row for pair in zip(english, chinese, strict=False) for row in pair]
    ROWS.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def training_command() -> tuple[dict[str, str], list[str]]:
    """Step 3: the command a user would type, as (environment variables, words after `megatron`)."""
    flags: dict[str, object] = {
        "config": "tiny-moe-sft",
        "load": MODEL,
        "dataset": ROWS,
        "data_cache_path": OUTPUT / "cache",
        "train_iters": STEPS,
        "save": RUN,
        "save_interval": STEPS,
        "save_hf": "true",
    }
    variables = {"NPROC_PER_NODE": str(RANKS), "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // RANKS))}
    return variables, ["sft", *(word for name, value in flags.items() for word in (f"--{name}", str(value)))]


def train() -> None:
    """Print the command and run it. Clears the run folder of an earlier quickstart first."""
    shutil.rmtree(RUN, ignore_errors=True)
    variables, arguments = training_command()
    print(f"3/5 {STEPS} steps on {RANKS} ranks, half of the experts on each:")
    print("    " + " ".join(f"{name}={value}" for name, value in variables.items()), end=" ")
    print("megatron " + shlex.join(arguments).replace(" --", " \\\n        --"), flush=True)
    megatron = Path(sys.executable).parent / "megatron"
    done = subprocess.run([str(megatron), *arguments], env={**os.environ, **variables})
    if done.returncode != 0:
        sys.exit(f"quickstart: FAILED, the training above ended with exit code {done.returncode}")


def loss_drop() -> float:
    """First loss minus the mean of the last ten, in nats a token, from the run's own log."""
    lines = (RUN / "train_log.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if "iteration" in record and "loss" in record]
    losses = [record["loss"] for record in records]
    if len(losses) != STEPS:
        sys.exit(f"quickstart: FAILED, {RUN / 'train_log.jsonl'} holds {len(losses)} losses, not {STEPS}")
    return losses[0] - sum(losses[-10:]) / 10


def export_folder() -> Path:
    """Where `--save_hf true` put the Hugging Face checkpoint of the last step."""
    return RUN / f"iter_{STEPS:07d}-hf"


def largest_logit_difference() -> float:
    """Step 5: transformers on the export against our model on the checkpoint it was exported from, in fp32."""
    print("5/5 compare the export in transformers with our own model", flush=True)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from mcore_qwen3.cli.logits import checkpoint_logits

    tokenizer = AutoTokenizer.from_pretrained(export_folder())
    sequences = [tokenizer.encode(text) for text in COMPARED_TEXTS]
    model = AutoModelForCausalLM.from_pretrained(export_folder(), dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = [model(torch.tensor([sequence])).logits[0] for sequence in sequences]
    ours = checkpoint_logits(RUN, sequences)
    return max(float((mine - other).abs().max()) for mine, other in zip(ours, theirs, strict=True))


def generate(question: str) -> str:
    """Step 4: a few tokens from the exported model, through its own chat template."""
    print("4/5 generate a few tokens", flush=True)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(export_folder())
    model = AutoModelForCausalLM.from_pretrained(export_folder(), dtype=torch.float32)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        enable_thinking=False,
        return_dict=True,
        return_tensors="pt",
    )
    torch.manual_seed(0)
    output = model.generate(**inputs, max_new_tokens=32)  # sampled as generation_config.json says
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


NEXT = """
What to try next (source .venv/bin/activate first):
  megatron sft --help                          every flag, grouped
  the command of step 3 with --dry_run true    what would run, and what each rank would hold
  NPROC_PER_NODE=4 with --tensor_model_parallel_size 2: tensor, sequence and expert parallelism together
  --pipeline_model_parallel_size 2, or your own --dataset FILE.jsonl
  README.md                                    how the code is laid out, and in which order to read it"""


if __name__ == "__main__":
    sys.exit(main())
