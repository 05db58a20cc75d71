"""Which hub a name without prefix is on: the one that the user fixed, or Hugging Face and then ModelScope."""

from __future__ import annotations

from collections.abc import Callable, Mapping

HUGGING_FACE, MODELSCOPE = "hf", "ms"
TITLES = {HUGGING_FACE: "Hugging Face", MODELSCOPE: "ModelScope"}


class NotOnAHubError(Exception):
    """No hub gave what was asked for; the text says in one line what each one answered."""


def hubs_to_ask(use_hf: bool | None) -> tuple[str, ...]:
    """The hubs of a name without prefix, in order; `use_hf` None: both."""
    return {None: (HUGGING_FACE, MODELSCOPE), True: (HUGGING_FACE,), False: (MODELSCOPE,)}[use_hf]


def first_answer[Found](fetch: Mapping[str, Callable[[], Found]]) -> tuple[str, Found]:
    """Ask hubs one after the other.

    Args:
        fetch: hub -> what asks it; in the order in which they are asked.

    Returns:
        (title of the hub that answered, its answer).

    Raises:
        NotOnAHubError: every one failed.
    """
    problems = []
    for hub, ask in fetch.items():
        try:
            return TITLES[hub], ask()
        except Exception as error:  # each library has its own kinds
            text = " ".join(str(error).split("\n\n")[0].split())
            problems.append(f"{TITLES[hub]}: {type(error).__name__}: {text}")
    raise NotOnAHubError("; ".join(problems))
