"""Hold the image to its claims, and show of each claim that it can fail. `image_test.sh` calls it.

    python scripts/image_check.py --store DIR --secret TEXT --folder DIR --folder-model NAME
        --own-model NAME RUNTIME_IMAGE MODEL_IMAGE

RUNTIME_IMAGE has no model: --folder is mounted, whose model is --folder-model. MODEL_IMAGE holds
--own-model. Prints a line for each claim, and ends with "N passed, N failed".
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import image_claims as claims
from image_claims import CONTAINER_CLAIMS, HARDENED, IMAGE_CLAIMS, Image
from podman import running

# Each of these lines breaks a claim about images.
BAD_IMAGE = """\
FROM {image}
USER 0:0
COPY token /tmp/token
RUN rm /tmp/token && cp -a /opt/venv/lib/python3.*/site-packages/onnxruntime-*.dist-info \
        "$(echo /opt/venv/lib/python3.*/site-packages)/onnxruntime_gpu-1.26.0.dist-info" \
    && sed -i 's/^Name: .*/Name: onnxruntime-gpu/' /opt/venv/lib/*/*/onnxruntime_gpu*/METADATA \
    && chmod o+w /srv/app/api.py && mkdir -p /srv/tests
EXPOSE 22
LABEL org.opencontainers.image.version="0"
ENV HF_HUB_OFFLINE=0
HEALTHCHECK NONE
"""
# These serve something else, and the server badly.
BAD_SERVERS = {
    "files": "HEALTHCHECK CMD true\n"
    'ENTRYPOINT ["python3", "-m", "http.server", "--directory", "/srv", "8080"]\n',
    "shell": "ENV THREADS=2\n"
    """ENTRYPOINT ["sh", "-c", "trap 'exit 143' TERM; python -m app & wait"]\n""",
}
BY_SHELL = (claims.its_threads_are_the_quota, claims.sigterm_lets_a_stream_end_and_exits_with_0)


class Count:
    def __init__(self) -> None:
        self.num_passed = self.num_failed = 0

    def note(self, is_good: bool, told: str) -> None:
        self.num_passed += is_good
        self.num_failed += not is_good
        print(f"{'ok  ' if is_good else 'FAIL'} {told}", flush=True)

    def holds(self, claim: Callable[..., None], *subject: Any) -> None:
        problem = _problem_of(claim, *subject)
        self.note(problem is None, f"{_words(claim)}{f': {problem}' if problem else ''}")

    def fails(self, claim: Callable[..., None], *subject: Any) -> None:
        problem = _problem_of(claim, *subject)
        words = _words(claim)
        if problem is None:
            self.note(False, f"of a bad one it cannot be told: {words}")
        else:
            self.note(True, f"seen to fail: {words}: {problem.splitlines()[0]:.120}")


def _problem_of(claim: Callable[..., None], *subject: Any) -> str | None:
    try:
        claim(*subject)
    except Exception as error:  # a claim that cannot be judged does not hold
        return str(error).strip() or repr(error)
    return None


def _words(claim: Callable[..., None]) -> str:
    return claim.__name__.replace("_", " ")


def check_ours(count: Count, options: argparse.Namespace) -> None:
    image = Image(options.model_image, options.secret, options.store)
    for claim in IMAGE_CLAIMS:
        count.holds(claim, image)
    mounted = ("--volume", f"{options.folder}:/models/default:ro")
    elsewhere = (
        "--volume",
        f"{options.folder}:/other/model:ro",
        "--env",
        "MODEL_PATH=/other/model",
    )
    with running(options.runtime_image, *HARDENED, *mounted) as container:
        print(f"--- without a model, {options.folder_model} mounted at /models")
        container.wait_ready()
        count.holds(claims.serves, container, options.folder_model)
        for claim in CONTAINER_CLAIMS:
            count.holds(claim, container)
    with running(options.model_image, *HARDENED) as container:
        print("--- with a model, which the builder built")
        container.wait_ready()
        count.holds(claims.serves, container, options.own_model)
        count.holds(claims.it_generates, container)
    with running(options.model_image, *HARDENED, *elsewhere) as container:
        print("--- with a model, but MODEL_PATH names another one")
        container.wait_ready()
        count.holds(claims.serves, container, options.folder_model)
    with running(options.model_image, *HARDENED, "--env", "OPS_PORT=9090") as container:
        print("--- with OPS_PORT, where health is then")
        give_up_at = time.monotonic() + 60
        while not (healthy := container.is_healthy()) and time.monotonic() < give_up_at:
            time.sleep(0.5)
        count.note(healthy, "the healthcheck finds the port")


def check_bad_ones(count: Count, options: argparse.Namespace) -> None:
    print("--- each claim, of something that is bad")
    context = options.store.parent / "bad"
    context.mkdir(exist_ok=True)
    secret = options.secret[::-1]
    (context / "token").write_text(secret)
    bad = build(context, "bad", BAD_IMAGE.format(image=options.model_image))
    for claim in IMAGE_CLAIMS:
        count.fails(claim, Image(bad, secret, options.store))
    lines = f"FROM {options.model_image}\n"
    names = {name: build(context, name, lines + more) for name, more in BAD_SERVERS.items()}
    with running(names["files"], "--network", "none", "--user", "0:0") as container:
        container.wait_ready("/")
        count.fails(claims.serves, container, options.own_model)
        for claim in CONTAINER_CLAIMS:
            if claim not in (*BY_SHELL, claims.it_has_no_network):
                count.fails(claim, container)
    # Nothing listens: its ports would be the machine's.
    asleep = ("--network", "host", "--entrypoint", '["sleep", "600"]')
    with running(options.runtime_image, *asleep) as container:
        count.fails(claims.it_has_no_network, container)
    with running(names["shell"], "--network", "none") as container:
        container.wait_ready()
        for claim in BY_SHELL:
            count.fails(claim, container)


def build(context: Path, name: str, dockerfile: str) -> str:
    """A bad image; its name."""
    (context / name).write_text(dockerfile)
    image = f"localhost/bad:{name}"
    command = ["buildah", "bud", "--quiet", "--pull-never", "--layers", "--format=docker"]
    command += ["--network=none", "--file", str(context / name), "--tag", image, str(context)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return image


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--secret", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--folder-model", required=True)
    parser.add_argument("--own-model", required=True)
    parser.add_argument("runtime_image")
    parser.add_argument("model_image")
    options = parser.parse_args()
    count = Count()
    check_ours(count, options)
    check_bad_ones(count, options)
    print(f"{count.num_passed} passed, {count.num_failed} failed")
    return 1 if count.num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
