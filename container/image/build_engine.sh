#!/bin/sh
# Wheels of Transformer Engine in /wheels, empty where the image has the version already.
# Variables: ENGINE_VERSION, CUDA_ARCHITECTURES, MAX_JOBS.
set -eu
: "${WHEELS:=/wheels}"
mkdir -p "$WHEELS"

installed=$(python -c 'from importlib.metadata import version; print(version("transformer-engine"))' \
  2>/dev/null || true)
case "$installed" in
  "${ENGINE_VERSION%.*}".*)
    echo "Transformer Engine $installed is here"
    exit 0
    ;;
esac
echo "Transformer Engine ${installed:-is not here}: building $ENGINE_VERSION"

# Headers of CUDA's libraries: an image for running has the compiler only.
cuda=$(python -c 'import torch; print(torch.version.cuda)' | tr . -)
if command -v dnf >/dev/null 2>&1; then
  dnf install -y "cuda-libraries-devel-$cuda" "cuda-nvtx-$cuda" "cuda-profiler-api-$cuda"
fi
python -m pip --version >/dev/null 2>&1 || python -m ensurepip
python -m pip install --no-cache-dir ninja pybind11 setuptools wheel

# torch's own cuDNN and NCCL: headers and libraries of one version.
site=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
for library in cudnn nccl; do
  [ -d "$site/nvidia/$library" ] || continue
  cp -r "$site/nvidia/$library/include/." /usr/local/cuda/include/
done
[ ! -d "$site/nvidia/cudnn" ] || export CUDNN_HOME="$site/nvidia/cudnn" CUDNN_PATH="$site/nvidia/cudnn"

NVTE_FRAMEWORK=pytorch NVTE_CUDA_ARCHS="$CUDA_ARCHITECTURES" MAX_JOBS="$MAX_JOBS" \
  python -m pip wheel --no-deps --no-build-isolation --wheel-dir "$WHEELS" \
  "transformer-engine==$ENGINE_VERSION" \
  "transformer-engine-cu13==$ENGINE_VERSION" \
  "transformer-engine-torch==$ENGINE_VERSION"
