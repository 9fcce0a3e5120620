#!/usr/bin/env bash
# Regenerate the generated parts of the documentation; a test fails if one is outdated. `git diff docs` shows the change.
#   bash tools/pages.sh
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH" PYTHONPATH="$PWD"
python tools/pages.py
python -m tests.engines_page > docs/engines.md.new && mv docs/engines.md.new docs/engines.md # a minute
