#!/usr/bin/env bash
# Lints the Dockerfiles, and what deploy/ brings to a cluster: hadolint, and trivy from HIGH on. Offline,
# with the checks that are built into them.
# usage: scripts/lint_image.sh      LINT: the environment of requirements-lint.txt; KUBECTL: a program
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${LINT:-.venv-lint}/bin
kubectl=${KUBECTL:-.venv/bin/kubectl}
inputs=$(mktemp -d)
trap 'rm -rf "$inputs"' EXIT

dockerfiles=(Dockerfile*)
"$bin/hadolint" "${dockerfiles[@]}"

# The whole objects as a cluster gets them, not the patches that they are made of.
cp "${dockerfiles[@]}" "$inputs"
for folder in deploy/k8s/base deploy/k8s/overlays/*; do
  "$kubectl" kustomize "$folder" >"$inputs/$(basename "$folder").yaml"
done
for folder in deploy/k8s/components/*; do
  mkdir "$inputs/overlay"
  printf 'resources: [%s]\ncomponents: [%s]\n' \
    "$(realpath --relative-to "$inputs/overlay" deploy/k8s/base)" \
    "$(realpath --relative-to "$inputs/overlay" "$folder")" >"$inputs/overlay/kustomization.yaml"
  "$kubectl" kustomize "$inputs/overlay" >"$inputs/with-$(basename "$folder").yaml"
  rm -r "$inputs/overlay"
done
"$bin/trivy" config --quiet --skip-check-update --skip-version-check --disable-telemetry \
  --severity HIGH,CRITICAL --exit-code 1 "$inputs"
