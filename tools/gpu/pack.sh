#!/usr/bin/env bash
# Fetch the wheels of tools/gpu/packing.txt into gpu-wheels/, and print the size of everything to take to the GPU machine.
#   bash tools/gpu.sh --pack [MiB]     the limit (default: 64); exit code 1 above it
#   PYTHON=python3   whose pip fetches    PYTHON_VERSION=3.12   of the GPU machine
set -euo pipefail
cd "$(dirname "$0")/../.."
limit=${1:-64}
PYTHON=${PYTHON:-python3}
version=${PYTHON_VERSION:-3.12}

rm -rf gpu-wheels
mkdir gpu-wheels
pip() { "$PYTHON" -m pip --quiet --disable-pip-version-check --no-input "$@" 2> >(grep -v '^WARNING: Location' >&2); }
platforms=(--implementation cp --python-version "$version")
for glibc in 2_28 2_27 2_17 2_5; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
grep -v '^#' tools/gpu/packing.txt | while read -r wanted; do
  pip download --no-deps --only-binary=:all: "${platforms[@]}" --dest gpu-wheels "$wanted" 2>/dev/null ||
    # Published only as source, but pure Python: the wheel that is built here works there.
    pip wheel --no-deps --wheel-dir gpu-wheels "$wanted"
done
if foreign=$(ls gpu-wheels | grep -v -e 'none-any\.whl$' -e "cp${version/./}.*x86_64\.whl$" -e 'abi3.*x86_64\.whl$'); then
  echo "error: not for Python $version on x86_64: $foreign" >&2
  exit 1
fi

tree=$(git ls-files -z --cached --others --exclude-standard | xargs -0 cat | wc -c)
{ find gpu-wheels -name '*.whl' -printf '%s %f\n' | sort -rn; echo "$tree the working tree"; } | awk -v limit="$limit" '
  { bytes += $1; size = $1 / 1048576; $1 = ""; printf "%10.2f MiB %s\n", size, $0 }
  END { printf "%10.2f MiB  in all, of %s\n", bytes / 1048576, limit; exit bytes > limit * 1048576 }'
