"""2,000 generated conversations by each official template: ids equal transformers' own, and the replies are trained."""

from __future__ import annotations

import functools
from pathlib import Path

import conversation_kit as kit
import pytest
import transformers

from mcore_qwen3.data.marks import TrainRule
from mcore_qwen3.data.template import load_tokenizer

# Folder, and whether its template writes think blocks and drops earlier ones.
VARIANTS = {"tokenizer": True, "tokenizer-thinking-2507": True, "tokenizer-instruct-2507": False}
NUMBER = 2000


@functools.cache
def made() -> list[kit.Made]:
    return [kit.make(seed) for seed in range(NUMBER)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("variant", VARIANTS)
def test_ids_equal_transformers_and_the_replies_are_trained(material_dir: Path, variant: str) -> None:
    tokenizer = load_tokenizer(material_dir / variant)
    reference = transformers.AutoTokenizer.from_pretrained(material_dir / variant)
    with_blocks = TrainRule(ignore_empty_think=False)
    everything = made()
    rendered = [tokenizer.render(one.messages, one.tools) for one in everything]
    texts = [reference.apply_chat_template(one.messages, tools=one.tools, tokenize=False) for one in everything]
    assert [ours.text for ours in rendered] == texts
    for number in (0, 1, 2):  # what tokenize=True does to that text
        one = everything[number]
        direct = reference.apply_chat_template(one.messages, tools=one.tools, tokenize=True, return_dict=False)
        assert direct == reference(texts[number], add_special_tokens=False)["input_ids"]
    expected_ids = reference(texts, add_special_tokens=False)["input_ids"]
    for number, (one, ours, (ids, mask)) in enumerate(
        zip(everything, rendered, tokenizer.encode(rendered), strict=True)
    ):
        assert ids.tolist() == expected_ids[number]
        replies = [reply.written(VARIANTS[variant]) + "<|im_end|>" for reply in one.replies]
        trained = [reply.removeprefix(kit.EMPTY_BLOCK) for reply in replies]
        assert [ours.text[start:end] for start, end in ours.spans] == trained
        decoded = tokenizer.backend.decode(ids[mask == 1].tolist(), skip_special_tokens=False)
        assert decoded == "".join(trained)
        if number % 10:
            continue
        # The empty block is trained only when the rule that leaves it out is off.
        whole = tokenizer.render(one.messages, one.tools, with_blocks)
        assert [whole.text[start:end] for start, end in whole.spans] == replies


def test_the_generator_makes_every_kind() -> None:
    everything = made()
    contents = [message["content"] for one in everything for message in one.messages]
    replies = [reply for one in everything for reply in one.replies]
    assert {sum(m["role"] == "user" for m in one.messages) for one in everything} == {1, 2, 3, 4, 5, 6}
    assert {one.messages[0]["role"] for one in everything} == {"system", "user"}
    for number, least in (
        (sum(one.tools is not None for one in everything), 600),
        (sum("<|im_start|>assistant\n" in content for content in contents), 500),
        (sum("/no_think" in content for content in contents), 500),
        (sum("你好" in content for content in contents), 500),
        (sum("🙂" in content for content in contents), 500),
        (sum(bool(reply.calls) for reply in replies), 500),
        (sum(reply.thinking == "" for reply in replies), 500),
        (sum(bool(reply.thinking) and reply.as_field for reply in replies), 200),
        (sum(not reply.opened for reply in replies), 100),
        (sum(reply.written(True).startswith(kit.EMPTY_BLOCK) for reply in replies), 500),
    ):
        assert number > least
