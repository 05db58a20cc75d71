"""Self-cognition rows: `{{NAME}}` and `{{AUTHOR}}` (or in small letters) filled in by the row's language."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from mcore_qwen3.data.forms import Conversation
from mcore_qwen3.data.marks import replaced, strings

NAMES = ("{{NAME}}", "{{name}}")
AUTHORS = ("{{AUTHOR}}", "{{author}}")
_CHINESE = re.compile(r"[\u4e00-\u9fff]")


@dataclass(frozen=True, slots=True)
class Identity:
    """What the placeholders stand for: one text, or a Chinese and an English one; empty leaves them as they are."""

    names: tuple[str, ...] = ()
    authors: tuple[str, ...] = ()

    def fill(self, conversation: Conversation) -> Conversation:
        """The conversation with its placeholders filled in; unchanged, not copied, when it has none."""
        holds = [value for value in strings(conversation.messages) if "{{" in value]
        if not holds:
            return conversation
        english = not _is_chinese(conversation)
        by: dict[str, str] = {}
        for marks, texts in ((NAMES, self.names), (AUTHORS, self.authors)):
            if texts:
                by |= dict.fromkeys(marks, texts[-1] if english else texts[0])
        return dataclasses.replace(
            conversation,
            messages=replaced(conversation.messages, by),
            rejected=replaced(conversation.rejected, by),
        )

    def open_places(self, conversation: Conversation) -> list[str]:
        """The flags that this conversation has placeholders for and that were not given."""
        wanted = (("--model_name", NAMES, self.names), ("--model_author", AUTHORS, self.authors))
        texts = [value for value in strings(conversation.messages) if "{{" in value]
        return [flag for flag, marks, given in wanted if not given and any(m in t for m in marks for t in texts)]


def _is_chinese(conversation: Conversation) -> bool:
    if conversation.tag in ("zh", "en"):
        return conversation.tag == "zh"
    return any(_CHINESE.search(value) for value in strings(conversation.messages))
