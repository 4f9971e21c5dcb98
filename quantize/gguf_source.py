"""A GGUF file as a source: checked by its metadata, then dequantized to an fp32 HF folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import QuantizeError
from .forms import Form, choose_form
from .space import Size

# GGUF's name of an architecture -> the model type that transformers makes of it, if another.
_MODEL_TYPES = {"gemma3": "gemma3_text", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}

# Where one is missing, transformers would take the size of a default model.
_SIZES = ("block_count", "embedding_length")


def check_gguf(gguf: Path) -> tuple[Form, Size]:
    """Raises QuantizeError if the file is not whole, transformers cannot read its model, or neither
    form of graph can be made of it."""
    # Imported here: they take seconds, and a wrong MODEL should be told at once.
    from gguf import GGUFReader
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    try:
        reader = GGUFReader(gguf)
    except (ValueError, IndexError, KeyError) as error:
        raise QuantizeError(f"{gguf} is not a whole GGUF file: {error}") from error
    field = reader.fields.get("general.architecture")
    architecture = str(field.contents()) if field else "none"
    model_type = _MODEL_TYPES.get(architecture, architecture)
    if not {architecture, model_type} & set(GGUF_SUPPORTED_ARCHITECTURES):
        raise QuantizeError(
            f"{gguf.name} holds the architecture {architecture!r}; from GGUF transformers reads "
            f"{', '.join(sorted(GGUF_SUPPORTED_ARCHITECTURES))}: give the HF folder instead"
        )
    for name in _SIZES:
        if (size := f"{architecture}.{name}") not in reader.fields:
            raise QuantizeError(
                f"{gguf.name} lacks {size}: it is no whole model. Give the HF folder instead"
            )
    counts = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
    embedded = counts.get("token_embd.weight", 0)
    num_bytes = 4 * sum(counts.values())  # as torch holds it
    form = choose_form(_config(model_type))
    return form, Size(sum(counts.values()), embedded, num_bytes, is_converted=True, form=form)


def _config(model_type: str) -> dict[str, Any]:
    """What config.json will say, as far as the metadata's first field tells; transformers' own
    reading of all fields takes as long as the conversion."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    return {"model_type": model_type, "architectures": [named]}


@contextmanager
def converted(gguf: Path, scratch: Path) -> Iterator[Path]:
    """A GGUF file dequantized to an fp32 HF folder, in `scratch`. Raises QuantizeError if
    something is missing in it."""
    import torch
    from transformers import AutoModelForCausalLM

    from .gguf_tokenizer import tokenizer_from_gguf

    tokenizer = tokenizer_from_gguf(gguf)
    folder = Path(tempfile.mkdtemp(dir=scratch, prefix="gguf-"))
    try:
        try:
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
            )
        except Exception as error:  # KeyError and more, for what the file lacks
            raise QuantizeError(
                f"transformers cannot read {gguf.name}: {error!r}. Give the HF folder instead"
            ) from error
        for config in (model.config, model.generation_config):
            config.bos_token_id = tokenizer.bos_token_id
            config.eos_token_id = tokenizer.eos_token_id
            config.pad_token_id = tokenizer.pad_token_id
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        del model
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
