"""What is sent, and when: prompts of known length, conversations, arrivals. All of it seeded.

Prompts are random sequences of short words, each different, so that a prefix cache gains nothing
but what --shared-prefix-tokens and --turns give it on purpose. No tokenizer is needed: two probes
tell what the server counts beside the words and for each word, and every answer's `usage` checks
it. The words are one token each for the tokenizers of Llama, Phi-3, Qwen and SmolLM2; with a
tokenizer's folder those that are not are left out.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dialects import Target
from load_client import Answer, LoadClient, Run, User

SHORT_WORDS = (
    "air all and arm art ask bad bag bar bed big box boy bus but buy car cat cold cup cut day dog "
    "door dry ear eat egg end eye face fall far fast fish fly food for free full fun game girl go "
    "good half hand hat head help high home hot how ice job key land last left life light line "
    "long look lost love man map men milk moon more move name near new night now off oil old one"
)


class ProbeFailed(Exception):
    """The server does not answer, or its prompts cannot be made that short."""


@dataclass(frozen=True)
class Fit:
    """Tokens of a prompt = `overhead` + `per_word` x words."""

    overhead: float
    per_word: float

    def words(self, tokens: int) -> int:
        """Raises: ProbeFailed: the overhead alone is more"""
        words = round((tokens - self.overhead) / self.per_word)
        if words < 1:
            least = round(self.overhead + self.per_word)
            raise ProbeFailed(f"{tokens} prompt tokens are too few: the server counts {least}")
        return words


@dataclass(frozen=True)
class Shape:
    """Of one conversation. Words are what the prompts are made of; tokens what was asked for."""

    words: int
    output_tokens: int
    prompt_tokens: int = 0  # 0: not checked
    turns: int = 1


@dataclass(frozen=True)
class Conversation:
    """The user's texts, made before the clock runs."""

    texts: tuple[str, ...]
    shape: Shape


def make_prompts(
    rng: random.Random, length: int, count: int, words: Sequence[str] = ()
) -> list[str]:
    """`count` texts of `length` words."""
    chosen = words or SHORT_WORDS.split()
    return [" ".join(rng.choices(chosen, k=length)) for _ in range(count)]


def single_token_words(folder: Path) -> list[str]:
    """Those that this folder's tokenizer makes one token of, inside a text and in front of it."""
    if not (file := folder / "tokenizer.json").is_file():
        raise ProbeFailed(f"{file} is not there")
    from tokenizers import Tokenizer  # only --tokenizer needs it

    tokenizer = Tokenizer.from_file(str(file))

    def is_single(text: str) -> bool:
        return len(tokenizer.encode(text, add_special_tokens=False).ids) == 1

    return [word for word in SHORT_WORDS.split() if is_single(word) and is_single(f" {word}")]


def fit(target: Target, tokens: int, rng: random.Random, words: Sequence[str] = ()) -> Fit:
    """Ask the server what it counts in a prompt of `tokens` words and in one of one word."""
    many = max(2, tokens)
    [long], [short] = make_prompts(rng, many, 1, words), make_prompts(rng, 1, 1, words)
    counted_long, counted_short = count_tokens(target, long), count_tokens(target, short)
    per_word = (counted_long - counted_short) / (many - 1)
    if per_word <= 0:
        raise ProbeFailed(f"{target.url} does not tell how many tokens a prompt has")
    return Fit(counted_short - per_word, per_word)


def count_tokens(target: Target, prompt: str) -> int:
    """By the server's own `usage`."""
    whole = Target(target.url, target.api, False, target.model, target.extra, True)
    answers: list[Answer] = []
    conversation = Conversation((prompt,), Shape(1, 1))
    with LoadClient(target.url) as client:
        client.run([(None, converse(whole, conversation, answers))])
    if answers[0].failure:
        told = f"the probe request to {target.url} failed: {answers[0].failure}"
        raise ProbeFailed(told)
    return answers[0].prompt_tokens


def make_conversations(
    rng: random.Random,
    shapes: Sequence[Shape],
    count: int,
    prefix: str = "",
    words: Sequence[str] = (),
) -> list[Conversation]:
    """Of shapes drawn at random, if there are several; `prefix` opens each."""
    made = []
    for _ in range(count):
        shape = shapes[0] if len(shapes) == 1 else rng.choice(shapes)
        first, *others = make_prompts(rng, shape.words, shape.turns, words)
        made.append(Conversation((f"{prefix} {first}" if prefix else first, *others), shape))
    return made


def arrivals(rng: random.Random, rate: float, count: int) -> list[float]:
    """Instants in seconds: a Poisson process of `rate` a second."""
    instants, now = [], 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        instants.append(now)
    return instants


def converse(target: Target, conversation: Conversation, answers: list[Answer]) -> User:
    """Say all turns, each with the whole history; a failed one ends it."""
    history: list[str] = []
    shape = conversation.shape
    for turn, text in enumerate(conversation.texts, 1):
        history.append(text)
        wanted = shape.prompt_tokens if turn == 1 else 0
        answer = yield target.request(history, shape.output_tokens, turn, wanted)
        answers.append(answer)
        if answer.failure:
            return
        history.append(answer.text)


def work(target: Target, conversations: Iterator[Conversation], answers: list[Answer]) -> User:
    """A patient client: one conversation after the other, until none is left."""
    for conversation in conversations:
        yield from converse(target, conversation, answers)


def run_closed(
    client: LoadClient, target: Target, concurrency: int, conversations: Sequence[Conversation]
) -> Run:
    """`concurrency` clients, each with its next request when its last is answered."""
    run, left = Run(), iter(conversations)
    users = [(None, work(target, left, run)) for _ in range(concurrency)]
    run.cpu_share = client.run(users)
    return run


def run_open(
    client: LoadClient, target: Target, instants: Sequence[float], said: Sequence[Conversation]
) -> Run:
    """A crowd: each conversation starts at its instant, whatever the others do."""
    run = Run()
    starts = [
        (at, converse(target, conversation, run))
        for at, conversation in zip(instants, said, strict=True)
    ]
    run.cpu_share = client.run(starts)
    return run
