"""What a chat template does with system messages: kept, dropped in silence, or refused.

The first Phi-3 Mini dropped them, and Gemma's refuses them; whoever serves such a model should know
before a user's instructions vanish.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

_SENTINEL = "words-of-the-system"
SYSTEM_WARNING = (
    "the chat template drops or refuses system messages: put such instructions into the first "
    "user message"
)


def keeps_system_messages(tokenizer: PreTrainedTokenizerBase) -> bool | None:
    """Whether a system message reaches the model; None without a chat template."""
    if tokenizer.chat_template is None:
        return None
    turns = [{"role": "system", "content": _SENTINEL}, {"role": "user", "content": "?"}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except Exception:  # a template is a program: `raise_exception`, or an error of its own
        return False
    return _SENTINEL in str(text)
