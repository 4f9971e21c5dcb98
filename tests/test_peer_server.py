"""What serves a peer that is a library, around an engine that echoes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from random import Random

import pytest
from dialects import Target
from load_client import LoadClient, Run
from peer_server import Handler, Inbox, Request, Server
from workload import Shape, make_conversations, run_closed


class Echo:
    """A word of the prompt is a token; a prompt of seven words is too much for it."""

    def run(self, take: Callable[[bool], Sequence[Request]]) -> None:
        while True:
            for request in take(True):
                words = request.prompt.split()
                request.num_prompt = len(words)
                for word in words[: request.max_tokens]:
                    request.tokens.put(f"{word} ")
                if len(words) == 7:
                    request.tokens.put(ValueError("seven is too much"))
                request.tokens.put(None)


@pytest.fixture
def url() -> Iterator[str]:
    Handler.inbox = Inbox()
    threading.Thread(target=Echo().run, args=(Handler.inbox.take,), daemon=True).start()
    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def load(url: str, words: int, stream: bool) -> Run:
    said = make_conversations(Random(0), [Shape(words, 4)], 6)
    with LoadClient(url) as client:
        return run_closed(client, Target(url, "completions", stream), 3, said)


@pytest.mark.parametrize("stream", [True, False])
def test_tokens_come_out_with_their_usage(url: str, stream: bool) -> None:
    run = load(url, 9, stream)
    assert [a.failure for a in run] == [""] * 6
    assert {(a.prompt_tokens, a.completion_tokens, len(a.text.split())) for a in run} == {(9, 4, 4)}
    assert all(len(a.text_at) == 4 * stream for a in run)


@pytest.mark.parametrize(("stream", "kind"), [(True, "error_event"), (False, "http_500")])
def test_what_the_engine_raises_is_told(url: str, stream: bool, kind: str) -> None:
    run = load(url, 7, stream)
    assert {a.kind for a in run} == {kind}
    assert all("seven is too much" in a.failure for a in run)
