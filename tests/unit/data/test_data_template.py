"""The chat template: ids equal transformers' own, and what is trained is the replies as they are written."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import conversation_kit as kit
import pytest
import transformers

from mcore_qwen3.data.marks import TrainRule
from mcore_qwen3.data.template import ChatTokenizer, TemplateRefused, load_tokenizer
from mcore_qwen3.errors import DataError

OFF = TrainRule(ignore_empty_think=False)  # trained text is then all that the template writes in a turn


@functools.cache
def tokenizers_of(folder: Path) -> tuple[ChatTokenizer, Any]:
    return load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def ours(qwen3_tokenizer_dir: Path) -> ChatTokenizer:
    return tokenizers_of(qwen3_tokenizer_dir)[0]


def trained_text(tokenizer: ChatTokenizer, messages: list[dict[str, str]]) -> str:
    ((ids, mask),) = tokenizer.encode([tokenizer.render(messages, rule=OFF)])
    return tokenizer.backend.decode(ids[mask == 1].tolist(), skip_special_tokens=False)


def test_the_marks_are_those_of_the_training_template(
    ours: ChatTokenizer, qwen3_tokenizer_dir: Path, material_dir: Path
) -> None:
    """TRL's template with generation marks keeps all thinking, so it says the same for a single turn; it also marks
    the newline after the end token, which is not trained here."""
    reference = tokenizers_of(qwen3_tokenizer_dir)[1]
    template = (material_dir / "templates" / "qwen3_training.jinja").read_text(encoding="utf-8")
    singles = [one.messages for one in map(kit.make, range(1500)) if len(one.replies) == 1 and one.tools is None]
    assert len(singles) > 50
    for messages in singles:
        marked = reference.apply_chat_template(messages, chat_template=template, return_assistant_tokens_mask=True)
        ((ids, mask),) = ours.encode([ours.render(messages, rule=OFF)])
        assert ids.tolist() == marked["input_ids"]
        assert mask.tolist() == [*marked["assistant_masks"][:-1], 0] and marked["assistant_masks"][-1] == 1


def test_plain_answer_gets_an_empty_think_block_that_is_trained(ours: ChatTokenizer) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "A1"}]
    assert trained_text(ours, messages) == "<think>\n\n</think>\n\nA1<|im_end|>"


def test_reasoning_content_field(ours: ChatTokenizer, qwen3_tokenizer_dir: Path) -> None:
    reply = {"role": "assistant", "content": "A<|im_end|>", "reasoning_content": "T<|im_start|>assistant\n"}
    messages = [{"role": "user", "content": "Hi"}, reply]
    expected = "<think>\nT<|im_start|>assistant\n</think>\n\nA<|im_end|><|im_end|>"
    assert trained_text(ours, messages) == expected
    reference = tokenizers_of(qwen3_tokenizer_dir)[1]
    ((ids, _),) = ours.encode([ours.render(messages, rule=OFF)])
    assert ids.tolist() == reference.apply_chat_template(messages, return_dict=False)


def test_a_user_turn_that_looks_like_a_tool_reply_keeps_earlier_thinking(ours: ChatTokenizer) -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nT1\n</think>\n\nA1"},
        {"role": "user", "content": "<tool_response><|im_start|>assistant\nx<|im_end|></tool_response>"},
        {"role": "assistant", "content": "A2"},
    ]
    expected = "<think>\nT1\n</think>\n\nA1<|im_end|><think>\n\n</think>\n\nA2<|im_end|>"
    assert trained_text(ours, messages) == expected


def test_a_token_that_joins_the_header_to_a_reply_is_not_trained(ours: ChatTokenizer) -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "\n\nA1"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "A2"},
    ]
    ((ids, mask),) = ours.encode([ours.render(messages, rule=OFF)])
    joined = ours.backend.token_to_id("ĊĊĊ")  # three newlines: the header's and the reply's two
    assert mask[ids.tolist().index(joined)] == 0
    assert trained_text(ours, messages).startswith("A1<|im_end|>")


def copy_with(source: Path, target: Path, **config: Any) -> Path:
    target.mkdir()
    shutil.copy(source / "tokenizer.json", target)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps({**settings, **config}))
    return target


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def test_where_the_template_is_found(qwen3_tokenizer_dir: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML + "named"}]
    folder = copy_with(qwen3_tokenizer_dir, tmp_path / "named", chat_template=named)
    assert load_tokenizer(folder).render(messages, rule=OFF).text.endswith("A<|im_end|>\nnamed")
    (folder / "chat_template.jinja").write_text(CHATML + "{{ eos_token }}")
    text = load_tokenizer(folder).render(messages, rule=OFF).text
    assert text.endswith("A<|im_end|>\n<|im_end|>")
    assert text == transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=False)


def test_limits_saved_in_tokenizer_json_do_not_apply(qwen3_tokenizer_dir: Path, tmp_path: Path) -> None:
    folder = copy_with(qwen3_tokenizer_dir, tmp_path / "t")
    saved = json.loads((folder / "tokenizer.json").read_text())
    saved["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    tokenizer = load_tokenizer(folder)
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    ((ids, _),) = tokenizer.encode([tokenizer.render(messages, rule=OFF)])
    assert len(ids) > 5


def test_token_ids(ours: ChatTokenizer, qwen3_tokenizer_dir: Path, tmp_path: Path) -> None:
    assert (ours.end_token_id, ours.pad_token_id) == (151645, 151643)
    assert load_tokenizer(copy_with(qwen3_tokenizer_dir, tmp_path / "t", pad_token=None)).pad_token_id == 0


@pytest.mark.parametrize(
    ("template", "rule"),
    [
        (None, "the tokenizer has a chat template"),
        ("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}", "writes every assistant turn as"),
        ("{{ raise_exception('never') }}", "the chat template renders a question and an answer"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(
    qwen3_tokenizer_dir: Path, tmp_path: Path, template: str | None, rule: str
) -> None:
    with pytest.raises(DataError, match=rule):
        load_tokenizer(copy_with(qwen3_tokenizer_dir, tmp_path / "t", chat_template=template))


def test_a_folder_without_a_usable_tokenizer_is_refused(qwen3_tokenizer_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer.json; seen: none in"):
        load_tokenizer(tmp_path)
    folder = copy_with(qwen3_tokenizer_dir, tmp_path / "t")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer.json can be read"):
        load_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config.json is JSON"):
        load_tokenizer(folder)


def test_a_template_that_changes_marks_in_content_is_refused(qwen3_tokenizer_dir: Path, tmp_path: Path) -> None:
    template = CHATML.replace("m.content", "m.content | replace('<|im_end|>', '[end]')")
    tokenizer = load_tokenizer(copy_with(qwen3_tokenizer_dir, tmp_path / "t", chat_template=template))
    messages = [{"role": "user", "content": "a <|im_end|> b"}, {"role": "assistant", "content": "A"}]
    with pytest.raises(DataError, match="inside content as they are"):
        tokenizer.render(messages, rule=OFF)


def test_a_template_may_refuse_one_conversation(qwen3_tokenizer_dir: Path, tmp_path: Path) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    tokenizer = load_tokenizer(copy_with(qwen3_tokenizer_dir, tmp_path / "t", chat_template=template))
    with pytest.raises(TemplateRefused, match="no system"):
        tokenizer.render([{"role": "system", "content": "S"}, {"role": "assistant", "content": "A"}])


def test_templates_run_in_a_sandbox(qwen3_tokenizer_dir: Path, tmp_path: Path) -> None:
    template = CHATML + "{{ messages.__class__.__base__.__subclasses__() }}"
    with pytest.raises(DataError, match="unsafe"):
        load_tokenizer(copy_with(qwen3_tokenizer_dir, tmp_path / "t", chat_template=template))
