"""The part of `check` about text: tokenizer, end tokens and chat template, against the graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from .json_file import read_json
from .model_folder import GENAI_FILE, ModelFolder
from .report import Report

# What a tokenizer built with the wrong pre-tokenizer or normalizer gets wrong first.
_SAMPLES = {
    "digits": "In 1969, 384400 km.",
    "double spaces": "a  b   c",
    "newlines": "one\n\ntwo\n  three\t.",
    "emoji": "caf\u00e9 \U0001f680\U0001f469\u200d\U0001f52c",
}
_SYSTEM, _USER, _ANSWER = "text-of-the-system", "text-of-the-user", "text-of-the-assistant"


def check_text(folder: ModelFolder, vocab_size: int | None, report: Report) -> None:
    tokenizer = _load(folder.path, report)
    if tokenizer is None:
        return
    _check_ids(tokenizer, vocab_size, report)
    _check_round_trip(tokenizer, report)
    _check_template(tokenizer, report)
    _check_eos(folder, tokenizer, vocab_size, report)


def _load(path: Path, report: Report) -> PreTrainedTokenizerFast | None:
    if not (path / "tokenizer.json").is_file():
        report.error("tokenizer", "tokenizer.json is missing: a fast tokenizer is needed")
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever the library meets in the file
        report.error("tokenizer", f"it cannot be loaded: {error}", "tokenizer.json")
        return None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        report.error("tokenizer", f"{type(tokenizer).__name__} is no fast tokenizer")
        return None
    return tokenizer


def _check_ids(tokenizer: PreTrainedTokenizerFast, vocab_size: int | None, report: Report) -> None:
    tokens: dict[str, int] = tokenizer.get_vocab()
    if vocab_size is None:
        return
    beyond = sorted((id_, token) for token, id_ in tokens.items() if id_ >= vocab_size)
    if beyond:
        wanted = _needed_ids(tokenizer)
        needed = [pair for pair in beyond if pair[0] in wanted]
        id_, token = (needed or beyond)[0]
        text = f"{len(needed or beyond)} tokens lie beyond the graph's vocabulary of {vocab_size}"
        text += f", the first is {token!r} with id {id_}"
        if needed:
            report.error("tokenizer", text)
        else:
            report.warning("tokenizer", f"{text}; all were added, and no chat needs them")
    else:
        report.ok("tokenizer", f"{len(tokens)} tokens, all among the graph's {vocab_size}")


def _needed_ids(tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """The base vocabulary, which any text may need, tokens with a role, and those of a chat."""
    base = set(tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False).values())
    base -= set(tokenizer.added_tokens_decoder)  # byte-level vocabularies list them, too
    roles = set(tokenizer.encode(""))
    if tokenizer.pad_token_id is not None:
        roles.add(tokenizer.pad_token_id)
    if not tokenizer.chat_template:
        return base | roles
    try:
        text = _render(tokenizer, [("user", _USER), ("assistant", _ANSWER), ("user", _USER)])
    except Exception:  # told by the check of the template
        return base | roles
    return base | roles | set(tokenizer.encode(text, add_special_tokens=False))


def _check_round_trip(tokenizer: PreTrainedTokenizerFast, report: Report) -> None:
    lossy = []
    for kind, text in _SAMPLES.items():
        ids = tokenizer.encode(text, add_special_tokens=False)
        back = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if back != text:
            lossy.append(f"{kind} ({text!r} becomes {back!r})")
    if lossy:
        report.error("tokenizer", f"text does not survive encoding: {'; '.join(lossy)}")
    else:
        report.ok("tokenizer", f"{', '.join(_SAMPLES)} survive encoding and decoding")


def _check_template(tokenizer: PreTrainedTokenizerFast, report: Report) -> None:
    if not tokenizer.chat_template:
        report.warning("template", "there is no chat template: only plain prompts can be served")
        return
    turns = [("user", _USER), ("assistant", _ANSWER), ("user", _USER)]
    try:
        text = _render(tokenizer, turns)
    except Exception as error:  # a template is a program
        report.error("template", f"it cannot render a chat: {error}")
        return
    if lost := [what for what in (_USER, _ANSWER) if what not in text]:
        report.error("template", f"it leaves messages out: {', '.join(lost)}")
        return
    try:
        has_system = _SYSTEM in _render(tokenizer, [("system", _SYSTEM), *turns])
    except Exception as error:
        report.warning("template", f"system messages are not supported, it refuses them: {error}")
        return
    if has_system:
        report.ok("template", "it renders system, user and assistant; system is supported")
    else:
        report.warning("template", "system messages are not supported: it drops them in silence")


def _render(tokenizer: PreTrainedTokenizerFast, turns: list[tuple[str, str]]) -> str:
    messages = [{"role": role, "content": content} for role, content in turns]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _check_eos(
    folder: ModelFolder,
    tokenizer: PreTrainedTokenizerFast,
    vocab_size: int | None,
    report: Report,
) -> None:
    """Phi-3 names its end tokens in four places, no two of them alike; answers end at any.

    Other programs read one place only, so one had better name them all.
    """
    try:
        sources = end_tokens(folder, tokenizer)
    except ValueError as error:
        report.error("eos", str(error))
        return
    union = sorted(set().union(*sources.values()))
    if not union:
        report.error("eos", "no end token is named anywhere: no answer would end")
        return
    if beyond := [id_ for id_ in union if vocab_size is not None and id_ >= vocab_size]:
        text = f"end tokens {_ids(beyond)} lie beyond the graph's vocabulary of {vocab_size}"
        report.error("eos", text)
    each = "; ".join(f"{name} {_ids(sorted(ids))}" for name, ids in sources.items() if ids)
    if not any(ids == set(union) for ids in sources.values()):
        text = f"an answer ends at any of {_ids(union)}, but no file names them all: {each}"
        report.warning("eos", text)
    elif not beyond:
        report.ok("eos", f"an answer ends at {_ids(union)}: {each}")


def end_tokens(folder: ModelFolder, tokenizer: PreTrainedTokenizerFast) -> dict[str, set[int]]:
    """Who names which ids; an empty set for who names none. Raises ValueError for what is no id."""
    # As it is written: transformers puts defaults of its own in where a field is missing.
    config = read_json(folder.path / "config.json") if folder.config is not None else {}
    named = {
        "tokenizer": tokenizer.eos_token_id,
        "config.json": config.get("eos_token_id"),
        "generation_config.json": folder.generation.get("eos_token_id"),
        GENAI_FILE: folder.genai_model.get("eos_token_id"),
        "chat template": _turn_end(tokenizer),
    }
    return {name: _as_ids(name, ids) for name, ids in named.items()}


def _as_ids(name: str, value: Any) -> set[int]:
    """One id, a list of them, or none."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(id_, int) for id_ in ids):
        raise ValueError(f"{name} has {value!r} for eos_token_id; an id or a list of ids is needed")
    return set(ids)


def _turn_end(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """The first control token that the template writes behind an answer."""
    if not tokenizer.chat_template:
        return None
    try:
        text = _render(tokenizer, [("user", _USER), ("assistant", _ANSWER), ("user", _USER)])
    except Exception:  # told by the check of the template
        return None
    _, _, behind = text.partition(_ANSWER)
    # Not `all_special_ids`: a turn's end (Phi-3's <|end|>) often has no role.
    added = tokenizer.added_tokens_decoder
    ids = tokenizer.encode(behind, add_special_tokens=False)
    return next((id_ for id_ in ids if id_ in added and added[id_].special), None)


def _ids(ids: list[int]) -> str:
    return ", ".join(map(str, ids))
