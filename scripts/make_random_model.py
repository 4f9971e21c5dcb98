"""Write a Hugging Face folder with random weights at a real model's size. Nothing is downloaded.

    python scripts/make_random_model.py --output DIR [--like phi3-mini|phi3-tiny] [--layers N]
        [--dtype bfloat16|float16|float32] [--seed 0] [--shard-mb 2000]

phi3-mini has the config of Phi-3 Mini 4k Instruct (3.8 billion parameters, 7.6 GB in bfloat16), the
ids of its special tokens and its chat template; phi3-tiny is the same in small. The tokenizer knows
syllables instead of English, and the answers are noise; times, memory and file sizes are those of
the real model. The weights are drawn and written one tensor at a time, so little memory is needed.
"""

import itertools
import json
import math
import shutil
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import click
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # torch's name, safetensors'
NUM_SPECIALS = 64  # ids behind the plain pieces; most have no token, as in Phi-3's own files
SPECIALS = [
    *("<|endoftext|>", "<|assistant|>"),
    *(f"<|placeholder{number}|>" for number in range(1, 5)),
    *("<|system|>", "<|end|>", "<|placeholder5|>", "<|placeholder6|>", "<|user|>"),
]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}"
    "{% else %}{{ eos_token }}{% endif %}"
)
PHI3_MINI: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "use_cache": True,
    "bos_token_id": 1,
    "vocab_size": 32064,
}
PHI3_TINY = PHI3_MINI | {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "original_max_position_embeddings": 512,
    "sliding_window": 127,
    "initializer_range": 0.15,  # as large a part of 1/sqrt(hidden_size) as in the true size
    "vocab_size": 1064,
}
MODELS = {"phi3-mini": PHI3_MINI, "phi3-tiny": PHI3_TINY}


@dataclass(frozen=True)
class Weight:
    name: str  # as Phi3ForCausalLM has it
    shape: tuple[int, ...]
    std: float  # 0: all ones, a norm

    def num_bytes(self, dtype: torch.dtype) -> int:
        return math.prod(self.shape) * dtype.itemsize


def list_weights(config: dict[str, Any]) -> Iterator[Weight]:
    """All weights, in the order of the forward pass. The standard deviations are GPT-2's: what
    adds to the residual stream is scaled down, so that its size does not grow with the depth."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = hidden // config["num_attention_heads"]
    qkv = (config["num_attention_heads"] + 2 * config["num_key_value_heads"]) * head_dim
    std = config["initializer_range"]
    residual_std = std / math.sqrt(2 * config["num_hidden_layers"])
    yield Weight("model.embed_tokens.weight", (config["vocab_size"], hidden), std)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield Weight(f"{prefix}.input_layernorm.weight", (hidden,), 0)
        yield Weight(f"{prefix}.self_attn.qkv_proj.weight", (qkv, hidden), std)
        yield Weight(f"{prefix}.self_attn.o_proj.weight", (hidden, hidden), residual_std)
        yield Weight(f"{prefix}.post_attention_layernorm.weight", (hidden,), 0)
        yield Weight(f"{prefix}.mlp.gate_up_proj.weight", (2 * inner, hidden), std)
        yield Weight(f"{prefix}.mlp.down_proj.weight", (hidden, inner), residual_std)
    yield Weight("model.norm.weight", (hidden,), 0)
    yield Weight("lm_head.weight", (config["vocab_size"], hidden), std)


def split_into_shards(
    weights: Iterator[Weight], dtype: torch.dtype, max_bytes: int
) -> list[list[Weight]]:
    shards: list[list[Weight]] = []
    room = 0
    for weight in weights:
        room -= weight.num_bytes(dtype)
        if room < 0:
            shards.append([])
            room = max_bytes - weight.num_bytes(dtype)
        shards[-1].append(weight)
    return shards


def write_shard(file: IO[bytes], shard: list[Weight], dtype: torch.dtype, rng: torch.Generator):
    """One safetensors file: length of the header, header, then the tensors as they are drawn.

    safetensors' own writer wants all tensors of a file at once.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight in shard:
        start, end = end, end + weight.num_bytes(dtype)
        header[weight.name] = {
            "dtype": DTYPES[str(dtype).removeprefix("torch.")],
            "shape": weight.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
    file.write(len(text).to_bytes(8, "little") + text)
    for weight in shard:
        file.write(draw(weight, rng).to(dtype).view(torch.uint8).numpy())


def draw(weight: Weight, rng: torch.Generator) -> torch.Tensor:
    if not weight.std:
        return torch.ones(weight.shape)
    return torch.empty(weight.shape).normal_(0, weight.std, generator=rng)


def write_weights(
    folder: Path, config: dict[str, Any], dtype: torch.dtype, seed: int, max_shard_bytes: int
) -> None:
    shards = split_into_shards(list_weights(config), dtype, max_shard_bytes)
    rng = torch.Generator().manual_seed(seed)
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        with (folder / name).open("wb") as file:
            write_shard(file, shard, dtype, rng)
        files |= {weight.name: name for weight in shard}
        click.echo(f"{name}: {(folder / name).stat().st_size / 1e6:,.1f} MB")
    total = sum(weight.num_bytes(dtype) for shard in shards for weight in shard)
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def make_tokenizer(num_pieces: int) -> PreTrainedTokenizerFast:
    """Phi-3's kind: U+2581 for a space, a byte piece for all that has no other, its special ids
    from `num_pieces` on. The pieces are syllables: every pair and triple of letters, then those
    that begin a word, until there are enough."""
    letters = string.ascii_lowercase
    pairs = [(a, b) for a, b in itertools.product(letters, repeat=2)]
    triples = [(a + b, c) for (a, b), c in itertools.product(pairs, letters)]
    syllables = [*pairs, *triples]
    starts = [("\u2581", piece) for piece in (*letters, *map("".join, syllables))]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    pieces += string.ascii_letters + string.digits + string.punctuation
    merges = [*syllables, *starts][: num_pieces - len(pieces)]
    pieces += map("".join, merges)
    if len(pieces) != num_pieces:
        raise ValueError(f"there are {len(pieces)} pieces, not {num_pieces}")
    backend = Tokenizer(
        models.BPE(
            {piece: id_ for id_, piece in enumerate(pieces)},
            merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    for token in ("<unk>", "<s>", "</s>", *SPECIALS):
        backend.add_special_tokens([AddedToken(token, special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_model(
    folder: Path,
    config: dict[str, Any],
    dtype: str = "bfloat16",
    seed: int = 0,
    max_shard_bytes: int = 2_000_000_000,
) -> None:
    """Fills `folder`, which is empty, with a model of that config."""
    num_pieces = config["vocab_size"] - NUM_SPECIALS
    ids = {token: num_pieces + position for position, token in enumerate(SPECIALS)}
    end_of_text = ids["<|endoftext|>"]
    config = config | {
        "eos_token_id": end_of_text,
        "pad_token_id": end_of_text,
        "torch_dtype": dtype,
    }
    generation = {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": [ids["<|end|>"], ids["<|assistant|>"], end_of_text],
        "pad_token_id": end_of_text,
    }
    make_tokenizer(num_pieces).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    write_weights(folder, config, getattr(torch, dtype), seed, max_shard_bytes)


@click.command()
@click.option("--output", required=True, type=click.Path(path_type=Path), help="Folder to write.")
@click.option("--like", default="phi3-mini", show_default=True, type=click.Choice(list(MODELS)))
@click.option("--layers", type=click.IntRange(1), help="Instead of the model's own number.")
@click.option("--dtype", default="bfloat16", show_default=True, type=click.Choice(list(DTYPES)))
@click.option("--seed", default=0, show_default=True)
@click.option("--shard-mb", default=2000, show_default=True, type=click.IntRange(1))
def main(output: Path, like: str, layers: int | None, dtype: str, seed: int, shard_mb: int) -> None:
    """Write a Hugging Face folder with random weights at a real model's size."""
    config = MODELS[like] | ({"num_hidden_layers": layers} if layers else {})
    if output.exists():
        raise click.BadParameter(f"{output} exists already", param_hint="--output")
    output.mkdir(parents=True)
    num_bytes = sum(weight.num_bytes(getattr(torch, dtype)) for weight in list_weights(config))
    try:
        free = shutil.disk_usage(output).free
        if num_bytes > free:
            raise click.ClickException(f"{num_bytes:,} bytes needed, {free:,} free at {output}")
        make_model(output, config, dtype, seed, shard_mb * 1_000_000)
    except BaseException:  # an interrupt, too: half a model must not be taken for one
        shutil.rmtree(output)
        raise
    click.echo(f"{output}: {num_bytes / 1e9:.2f} GB of weights")


if __name__ == "__main__":
    main()
