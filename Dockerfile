# The server on CUDA. Targets: `runtime`, without a model (mount one at /models), and `with-model`,
# which holds the one that stage `builder` builds, or a folder that is ready:
#   docker build --target runtime -t phi-serve .
#   docker build --target with-model --build-arg MODEL_ID=org/name -t phi-serve:name .
#   docker build --target with-model --build-context model=DIR -t phi-serve:name .
# Only what Debian's buildah builds, too: scripts/image_test.sh.
# The bases have the same Python, at the same place, and the same torch.
ARG BASE_DEVEL=pytorch/pytorch:2.6.0-cuda12.4-cudnn9-devel
ARG BASE_RUNTIME=pytorch/pytorch:2.6.0-cuda12.4-cudnn9-runtime

# Where a model to be quantized lies: --build-context source=DIR --build-arg MODEL_ID=/source/NAME
FROM scratch AS source
COPY LICENSE /

# Beside the base's torch, what the server imports: no pip, no tests, nothing of the build.
FROM ${BASE_RUNTIME} AS dependencies
ARG REQUIREMENTS=requirements-gpu.txt
# requirements-tracing.txt, where OTLP_TRACES_ENDPOINT is to be set.
ARG MORE_REQUIREMENTS=
WORKDIR /build
COPY requirements*.txt ./
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,source=scripts/check_wheels.py,target=/tmp/check_wheels.py \
    python3 -m venv --system-site-packages --without-pip /opt/venv \
    && python3 -m pip --python /opt/venv/bin/python install -r "${REQUIREMENTS}" \
        ${MORE_REQUIREMENTS:+-r "${MORE_REQUIREMENTS}"} \
    && /opt/venv/bin/python /tmp/check_wheels.py \
    && find /opt/venv -type d \( -name test -o -name tests \) -prune -exec rm -rf {} + \
    && chmod -R go-w /opt/venv

# The server's own packages, and the exporter's: that list is complete as it is, and by its
# dependencies it would ask for the other ONNX Runtime.
FROM ${BASE_DEVEL} AS builder
WORKDIR /build
COPY requirements-build.txt ./
COPY --from=dependencies /opt/venv /opt/venv
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -m pip --python /opt/venv/bin/python install --no-deps -r requirements-build.txt
ENV PATH=/opt/venv/bin:${PATH} ORT_DISABLE_TELEMETRY=1 HF_HUB_DISABLE_TELEMETRY=1
COPY quantize quantize
ARG MODEL_ID=microsoft/Phi-3-mini-4k-instruct
ARG MODEL_REVISION=
ARG PRECISION=auto
# What the model is for; cpu where REQUIREMENTS is requirements-cpu.txt.
ARG MODEL_DEVICE=cuda
# The token of a gated model is there for this step alone: --secret id=hf_token,src=FILE
RUN --mount=type=secret,id=hf_token \
    --mount=type=bind,from=source,target=/source \
    if [ -s /run/secrets/hf_token ]; then HF_TOKEN="$(cat /run/secrets/hf_token)" && export HF_TOKEN; fi \
    && python -m quantize "${MODEL_ID}" ${MODEL_REVISION:+--revision "${MODEL_REVISION}"} \
        --precision "${PRECISION}" --device "${MODEL_DEVICE}" --output /models/default

# The model folder by itself, so that --build-context model=DIR can take its place.
FROM scratch AS model
COPY --from=builder /models/default/ /

# Readable by any user, whatever the umask of the checkout was, and compiled: nobody could write it.
FROM ${BASE_RUNTIME} AS code
COPY app /srv/app
COPY LICENSE /srv/
RUN python3 -m compileall -q /srv/app && chmod -R u=rwX,go=rX /srv

FROM ${BASE_RUNTIME} AS runtime
ARG BASE_RUNTIME
ARG VERSION=0.1.0
ARG REVISION=
LABEL org.opencontainers.image.title="phi-serve" \
      org.opencontainers.image.description="Serves Phi-3 Mini and other small language models on ONNX Runtime" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE_RUNTIME}"
# TOKENIZERS_PARALLELISM holds no token.
# hadolint ignore=DL3064
ENV PATH=/opt/venv/bin:${PATH} \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    ORT_DISABLE_TELEMETRY=1 \
    HF_HUB_OFFLINE=1 \
    HF_HUB_DISABLE_TELEMETRY=1 \
    TOKENIZERS_PARALLELISM=false \
    MODEL_PATH=/models/default
COPY --from=dependencies /opt/venv /opt/venv
COPY --from=code /srv /srv
WORKDIR /srv
# Any other will do: it owns nothing, and needs neither name nor home.
USER 10001:10001
EXPOSE 8080
# Ready, not only alive: a load may take its time, then three failures tell. OPS_PORT has health alone.
HEALTHCHECK --interval=10s --timeout=6s --start-period=1800s --retries=3 \
    CMD ["python", "-c", "import os, sys; from http.client import HTTPConnection; e = os.environ.get; c = HTTPConnection('127.0.0.1', int(e('OPS_PORT') or 0) or int(e('PORT') or 8080), timeout=5); c.request('GET', '/health/ready'); sys.exit(c.getresponse().status != 200)"]
# The server hears signals as the first process, too, and starts no others: no init is needed.
ENTRYPOINT ["python", "-m", "app"]

FROM runtime AS with-model
COPY --chmod=755 --from=model / /models/default/

# What a build without --target gives.
FROM runtime AS default
