#!/usr/bin/env bash
# Run the numeric tests as other CPUs would: with older kernels of torch, oneDNN and MKL, and other thread counts.
#   bash tools/check_kernels.sh [ARGUMENTS OF PYTEST]
# If two machines have different results although their tests agree here, add a combination. The exit status is 1 if a
# combination failed. A CPU without AVX-512 runs that combination with the kernels of the first.
set -uo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH" HYPOTHESIS_PROFILE=fast

# Each of torch's, oneDNN's and MKL's choices (CBWR picks a code path), and the number of parts that a sum is cut into,
# has its extremes at least once; and there are combinations as whole machines have them.
combinations=(
  "OMP_NUM_THREADS=2"
  "OMP_NUM_THREADS=1"
  "OMP_NUM_THREADS=2 ATEN_CPU_CAPABILITY=default"
  "OMP_NUM_THREADS=2 MKL_CBWR=COMPATIBLE"
  "OMP_NUM_THREADS=2 ONEDNN_MAX_CPU_ISA=SSE41"
  "OMP_NUM_THREADS=2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_CBWR=AVX2"
  "OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE MKL_CBWR=AVX512"
  "OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE"
)
unset ATEN_CPU_CAPABILITY ONEDNN_MAX_CPU_ISA MKL_CBWR
mapfile -t tests < <(grep -rlE --include='test_*.py' '^\s*(import|from) torch\b' \
  tests/unit/{core,routing,workers,upstream,trainer,support} | sort)
failed=0
for combination in "${combinations[@]}"; do
  echo "== $combination; torch has $(env $combination python -c 'import torch; print(torch.backends.cpu.get_cpu_capability())')"
  env $combination pytest -q -rfE --tb=short -p no:cacheprovider -m "not e2e" "$@" "${tests[@]}" || failed=1
done
exit $failed
