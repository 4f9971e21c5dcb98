"""Hugging Face ids: a hub on this machine, its cache, and what is refused. No network."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, file_download
from huggingface_hub.utils import reset_sessions

from quantize.errors import QuantizeError
from quantize.hub import is_hub_id
from quantize.sources import resolve

from .conftest import TinyModel

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def lay_out(cache: Path, source: Path, ref: str = "main") -> Path:
    """What a download leaves in the cache; the snapshot."""
    repository = cache / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / ref).write_text(COMMIT)
    return shutil.copytree(source, repository / "snapshots" / COMMIT)


@pytest.fixture
def cache(tiny_llama: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, with org/tiny; conftest has set HF_HUB_OFFLINE."""
    folder = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    lay_out(folder, tiny_llama.source)
    return folder


def refusal(model: str, scratch: Path, revision: str | None = None) -> str:
    with (
        pytest.raises(QuantizeError) as raised,
        resolve(model, scratch / "cache", scratch, revision=revision),
    ):
        pass
    return str(raised.value)


@pytest.mark.parametrize("model", ["microsoft/Phi-3-mini-4k-instruct", "a/b", "Org_1/m.v2"])
def test_id_is_organization_and_name(model: str) -> None:
    assert is_hub_id(model)


@pytest.mark.parametrize("model", ["nope", "/nope", "./a", "../a/b", "a/b/c", "a/b c", "a/"])
def test_other_names_are_no_ids(model: str) -> None:
    assert not is_hub_id(model)


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_cached_snapshot_serves_offline_and_its_commit_is_noted(
    revision: str | None, cache: Path, tmp_path: Path
) -> None:
    with resolve("org/tiny", tmp_path / "c", tmp_path, revision=revision) as source:
        assert source.folder == cache / "models--org--tiny" / "snapshots" / COMMIT
        assert (source.name, source.description) == ("tiny", f"org/tiny@{COMMIT}")


@pytest.mark.parametrize(("model", "revision"), [("org/other", None), ("org/tiny", "v2")])
def test_what_the_cache_lacks_is_refused_offline(
    model: str, revision: str | None, cache: Path, tmp_path: Path
) -> None:
    message = refusal(model, tmp_path, revision)
    assert message.startswith(f"no model at {model!r}")
    assert "is not in the cache, and the hub cannot be reached" in message


def test_snapshot_that_is_not_whole_is_refused(cache: Path, tmp_path: Path) -> None:
    (cache / "models--org--tiny" / "snapshots" / COMMIT / "model.safetensors").unlink()
    assert "holds no .safetensors weights" in refusal("org/tiny", tmp_path)


def test_folder_of_that_name_goes_before_the_hub(
    cache: Path, tiny_llama: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_llama.source, tmp_path / "org" / "tiny")
    monkeypatch.chdir(tmp_path)
    with resolve("org/tiny", tmp_path / "c", tmp_path) as source:
        assert source.description == "tiny"


# --- a hub on this machine ------------------------------------------------------------------------


class Hub(ThreadingHTTPServer):
    """As much of the hub's HTTP as a download needs; `asked` are the paths of the files."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.models: dict[str, dict[str, bytes]] = {}
        self.asked: list[str] = []


class _Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0].strip("/")
        is_api = path.startswith("api/models/")
        model = "/".join(path.removeprefix("api/models/").split("/")[:2])
        if model == "org/gated":
            self._send(403, b"", {"X-Error-Code": "GatedRepo"})
        elif model not in self.server.models:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif is_api and path.endswith("/revision/nope"):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif is_api:
            files = self.server.models[model]
            siblings = [{"rfilename": name, "size": len(files[name])} for name in files]
            answer = {"id": model, "sha": COMMIT, "siblings": siblings}
            self._send(200, json.dumps(answer).encode(), {})
        else:
            name = path.split("/", 4)[4]
            self.server.asked.append(name)
            content = self.server.models[model][name]
            self._send(200, content, {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(tiny_llama: TinyModel) -> Iterator[Hub]:
    files = {path.name: path.read_bytes() for path in tiny_llama.source.iterdir()}
    with Hub() as server:
        server.models["org/tiny"] = files | {
            "modeling.py": b"code",
            "pytorch_model.bin": b"pickle",
            "consolidated.safetensors": b"the same again",
        }
        wide = json.loads(files["config.json"]) | {"vocab_size": 160}
        server.models["org/wide"] = {"config.json": json.dumps(wide).encode(), **_WEIGHTS}
        server.models["org/nope"] = {"config.json": b'{"model_type": "nope"}', **_WEIGHTS}
        only_bin = {"config.json": files["config.json"], "pytorch_model.bin": b"pickle"}
        server.models["org/bin"] = only_bin
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield server
        server.shutdown()


_WEIGHTS = {"model.safetensors": bytes(1000), "tokenizer.json": b"{}"}


@pytest.fixture
def online(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment as huggingface_hub would have read it at its import."""
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(file_download, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    reset_sessions()  # they hold on to being offline, or not
    yield
    reset_sessions()


def test_download_takes_only_what_a_build_needs_and_serves_again_without_the_hub(
    hub: Hub, online: None, tmp_path: Path
) -> None:
    with resolve("org/tiny", tmp_path, tmp_path, revision="v1") as source:
        assert source.description == f"org/tiny@{COMMIT}"
        files = {path.name for path in source.folder.iterdir()}
    assert files >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert not {"modeling.py", "pytorch_model.bin", "consolidated.safetensors"} & set(hub.asked)
    assert (tmp_path / "hub" / "models--org--tiny" / "refs" / "v1").read_text() == COMMIT
    hub.shutdown()
    hub.server_close()
    with resolve("org/tiny", tmp_path, tmp_path, revision="v1") as again:
        assert (again.folder, again.description) == (source.folder, source.description)
    assert "the hub cannot be reached" in refusal("org/other", tmp_path)


@pytest.mark.parametrize(
    ("model", "revision", "says"),
    [
        ("org/tiny", "nope", "at revision 'nope' does not exist"),
        ("org/gated", None, "is gated: accept its terms"),
        ("org/no", None, "is not on the hub, or private"),
    ],
)
def test_what_the_hub_refuses_is_told(
    model: str, revision: str | None, says: str, online: None, tmp_path: Path
) -> None:
    assert says in refusal(model, tmp_path, revision)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("org/nope", "model_type 'nope' is not known"),
        ("org/wide", "would take that layer for the LM head"),
        ("org/bin", "only .bin files, which can run code"),
    ],
)
def test_model_that_cannot_be_built_costs_no_download(
    model: str, says: str, hub: Hub, online: None, tmp_path: Path
) -> None:
    assert says in refusal(model, tmp_path)
    assert set(hub.asked) == {"config.json"}
