#!/bin/sh
# EFA's libraries and NCCL's plug-in for them, where the image has none.
# $1: version of AWS's EFA installer; empty: the image must have them. ROOT is for tests.
set -eu
version=${1:-}
root=${ROOT:-}

for folder in "$root"/opt/amazon/ofi-nccl/lib* "$root"/opt/amazon/ofi-nccl/lib/* \
  "$root"/opt/amazon/aws-ofi-nccl/lib; do
  for name in libnccl-net-ofi.so libnccl-net.so; do
    if [ -e "$folder/$name" ]; then
      echo "NCCL's plug-in for EFA is here: $folder/$name"
      exit 0
    fi
  done
done
if [ -z "$version" ]; then
  echo "this base has no EFA: build with --efa VERSION (tools/image.py)" >&2
  exit 1
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
curl -fsSL "https://efa-installer.amazonaws.com/aws-efa-installer-$version.tar.gz" | tar xz
cd aws-efa-installer
# The kernel's part and its limits are the host's; -g: for GPUs' memory; -d: no debug packages.
./efa_installer.sh -y -g -d --skip-kmod --skip-limit-conf --no-verify
