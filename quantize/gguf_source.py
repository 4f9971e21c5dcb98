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
    architecture = field.contents() if field else None
    if architecture not in GGUF_SUPPORTED_ARCHITECTURES:
        raise QuantizeError(
            f"{gguf.name} holds the architecture {architecture!r}; from GGUF transformers reads "
            f"{', '.join(sorted(GGUF_SUPPORTED_ARCHITECTURES))}: give the HF folder instead"
        )
    counts = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
    embedded = counts.get("token_embd.weight", 0)
    num_bytes = 4 * sum(counts.values())  # as torch holds it
    form = choose_form(_config(gguf))
    return form, Size(sum(counts.values()), embedded, num_bytes, is_converted=True, form=form)


def _config(gguf: Path) -> dict[str, Any]:
    """What config.json will say, as far as the form depends on it."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        config: dict[str, Any] = load_gguf_checkpoint(gguf)["config"]
    except Exception as error:  # whatever its metadata leads to
        raise QuantizeError(f"the metadata of {gguf} cannot be used: {error!r}") from error
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.get("model_type"))
    return config | {"architectures": [architecture]}


@contextmanager
def converted(gguf: Path, scratch: Path) -> Iterator[Path]:
    """A GGUF file dequantized to an fp32 HF folder, in `scratch`."""
    import torch
    from transformers import AutoModelForCausalLM

    from .gguf_tokenizer import tokenizer_from_gguf

    tokenizer = tokenizer_from_gguf(gguf)
    folder = Path(tempfile.mkdtemp(dir=scratch, prefix="gguf-"))
    try:
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
        )
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
