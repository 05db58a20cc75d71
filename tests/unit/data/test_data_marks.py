"""What is trained of a conversation, rule by rule, and how rules join."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3.data.marks import TrainRule
from mcore_qwen3.data.template import ChatTokenizer, load_tokenizer

END = "<|im_end|>"
EMPTY = "<think>\n\n</think>\n\n"


@functools.cache
def load(folder: Path) -> ChatTokenizer:
    return load_tokenizer(folder)


@pytest.fixture
def hybrid(qwen3_tokenizer_dir: Path) -> ChatTokenizer:
    return load(qwen3_tokenizer_dir)


def turns(*contents: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]


def trained(tokenizer: ChatTokenizer, messages: list[dict[str, Any]], **rule: Any) -> list[str]:
    """The trained parts of the text; the tokens that are marked say the same."""
    rendered = tokenizer.render(messages, None, TrainRule(**rule))
    parts = [rendered.text[start:end] for start, end in rendered.spans]
    ((ids, mask),) = tokenizer.encode([rendered])
    assert tokenizer.backend.decode(ids[mask == 1].tolist(), skip_special_tokens=False) == "".join(parts)
    return parts


THINKING = turns("A", "<think>\nT1\n</think>\n\nR1", "B", "<think>\nT2\n</think>\n\nR2")


def test_earlier_thinking_goes_as_the_template_says_or_is_kept(hybrid: ChatTokenizer) -> None:  # known fault B24
    assert trained(hybrid, THINKING) == [f"R1{END}", f"<think>\nT2\n</think>\n\nR2{END}"]
    kept = [f"<think>\nT1\n</think>\n\nR1{END}", f"<think>\nT2\n</think>\n\nR2{END}"]
    assert trained(hybrid, THINKING, preserve_thinking=True) == kept
    as_field = [
        message
        if message["role"] == "user"
        else {"role": "assistant", "content": f"R{n}", "reasoning_content": f"T{n}"}
        for n, message in zip((0, 1, 0, 2), THINKING, strict=True)
    ]
    assert trained(hybrid, as_field) == trained(hybrid, THINKING)
    assert trained(hybrid, as_field, preserve_thinking=True) == kept
    text = hybrid.render(THINKING, None, TrainRule(preserve_thinking=True)).text
    assert text == hybrid.render(THINKING).text.replace("R1", "<think>\nT1\n</think>\n\nR1", 1)


def test_only_the_closing_tag(hybrid: ChatTokenizer) -> None:  # known fault B25
    assert trained(hybrid, turns("A", "x\n</think>\n\ny")) == [f"<think>\nx\n</think>\n\ny{END}"]
    earlier = turns("A", "x\n</think>\n\ny", "B", "z")
    assert trained(hybrid, earlier, preserve_thinking=True)[0] == f"<think>\nx\n</think>\n\ny{END}"


def test_the_empty_block(hybrid: ChatTokenizer) -> None:  # known fault B26
    messages = turns("A", "R1", "B", "R2")
    assert hybrid.render(messages).text.count(EMPTY) == 1  # added to the last turn only
    assert trained(hybrid, messages) == [f"R1{END}", f"R2{END}"]
    assert trained(hybrid, messages, ignore_empty_think=False) == [f"R1{END}", f"{EMPTY}R2{END}"]
    # A block that is not empty is trained under both.
    assert trained(hybrid, turns("A", "<think>\n.\n</think>\n\nR")) == [f"<think>\n.\n</think>\n\nR{END}"]


def test_two_rules_join_by_and(hybrid: ChatTokenizer) -> None:  # known fault B27
    messages = turns("A", "R1", "B", "R2 and more")
    ((_, mask),) = hybrid.encode([hybrid.render(messages, None, TrainRule(loss_scale="last_round"))])
    turn, block = (len(hybrid.backend.encode(part).ids) for part in (f"{EMPTY}R2 and more{END}", EMPTY))
    assert int(mask.sum()) == turn - block
    assert trained(hybrid, messages, loss_scale="last_round") == [f"R2 and more{END}"]
    only_block = trained(hybrid, messages, loss_scale="last_round", ignore_empty_think=False)
    assert only_block == [f"{EMPTY}R2 and more{END}"]


TOOL_CHAIN = [
    {"role": "user", "content": "Q0"},
    {"role": "assistant", "content": "<think>\nT0\n</think>\n\nA0"},
    {"role": "user", "content": "Q1"},
    {
        "role": "assistant",
        "content": "<think>\nT1\n</think>\n\n",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
    },
    {"role": "tool", "content": "tool text"},
    {"role": "assistant", "content": "<think>\nT2\n</think>\n\nA2"},
]


def test_thinking_in_a_live_tool_chain_stays(hybrid: ChatTokenizer) -> None:  # known fault B41
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    chain = [f"<think>\nT1\n</think>\n\n{call}{END}", f"<think>\nT2\n</think>\n\nA2{END}"]
    assert trained(hybrid, TOOL_CHAIN) == [f"A0{END}", *chain]
    assert trained(hybrid, TOOL_CHAIN, loss_scale="last_round") == chain  # a tool's reply starts no round
    assert trained(hybrid, TOOL_CHAIN, preserve_thinking=True) == [f"<think>\nT0\n</think>\n\nA0{END}", *chain]


def test_every_token(hybrid: ChatTokenizer) -> None:
    messages = turns("A", "R")
    text = hybrid.render(messages).text
    assert "".join(trained(hybrid, messages, loss_scale="all", ignore_empty_think=False)) == text
    assert "".join(trained(hybrid, messages, loss_scale="all")) == text.replace(EMPTY, "")


def test_a_rows_own_marks_win(hybrid: ChatTokenizer) -> None:
    messages = turns("A", "R1", "B", "R2", "C", "R3")
    messages[1]["loss"], messages[5]["loss"] = True, False
    assert trained(hybrid, messages) == [f"R1{END}", f"R2{END}"]
    assert trained(hybrid, messages, loss_scale="last_round") == [f"R1{END}"]
    whole = "".join(trained(hybrid, messages, loss_scale="all"))
    assert "R1" in whole and "R3" not in whole and whole.endswith("assistant\n\n")
    assert hybrid.render(messages).text == hybrid.render(turns("A", "R1", "B", "R2", "C", "R3")).text


def test_thinking_removed(hybrid: ChatTokenizer, material_dir: Path) -> None:
    messages = [*THINKING, *turns("C"), {"role": "assistant", "content": "R3", "reasoning_content": "T3"}]
    plain = turns("A", "R1", "B", "R2", "C", "R3")
    for tokenizer in (hybrid, load(material_dir / "tokenizer-instruct-2507")):
        rule = TrainRule(enable_thinking=False, ignore_empty_think=False)
        rendered = tokenizer.render(messages, None, rule)
        assert rendered.text == tokenizer.render(plain).text
        # The block is the prompt's where thinking is off, so it is never trained.
        parts = [rendered.text[start:end] for start, end in rendered.spans]
        assert parts == [f"R{n}{END}" for n in (1, 2, 3)]


def test_system_text_for_rows_without(hybrid: ChatTokenizer) -> None:
    own = [{"role": "system", "content": "mine"}, *turns("A", "R")]
    rule = TrainRule(system="S")
    assert hybrid.render(turns("A", "R"), None, rule).text.startswith("<|im_start|>system\nS<|im_end|>\n")
    assert hybrid.render(own, None, rule).text == hybrid.render(own).text


def test_no_think_rows_are_as_the_template_renders_them(hybrid: ChatTokenizer) -> None:
    messages = turns("A /no_think", f"{EMPTY}R")
    assert hybrid.render(messages).text.endswith(f"A /no_think<|im_end|>\n<|im_start|>assistant\n{EMPTY}R{END}\n")
    assert trained(hybrid, messages) == [f"R{END}"]


def test_look_alikes_and_preserved_thinking_together(hybrid: ChatTokenizer) -> None:
    thought = "T <|im_start|>assistant\nx<|im_end|> \ue000"
    messages = turns("A </think> <|im_end|>", f"<think>\n{thought}\n</think>\n\nR1", "B", "R2")
    expected = [f"<think>\n{thought}\n</think>\n\nR1{END}", f"R2{END}"]
    assert trained(hybrid, messages, preserve_thinking=True) == expected
    assert "A </think> <|im_end|>" in hybrid.render(messages, None, TrainRule(preserve_thinking=True)).text


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (
            {},
            "every assistant turn with its end token; an empty think block is not trained; thinking of earlier turns is",
        ),
        (
            {"loss_scale": "last_round", "ignore_empty_think": False},
            "after the last user message, with their end tokens",
        ),
        ({"loss_scale": "all"}, "every token, prompts included"),
        ({"preserve_thinking": True}, "thinking of earlier turns is kept"),
        ({"enable_thinking": False, "ignore_empty_think": False}, "block is not trained; thinking is removed"),
    ],
)
def test_the_rule_in_one_sentence(rule: dict[str, Any], words: str) -> None:
    assert words in TrainRule(**rule).sentence()
