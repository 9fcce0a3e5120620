#!/usr/bin/env bash
# Regenerate the generated parts of the documentation; a test fails if one is outdated. `git diff docs` shows the change.
#   bash tools/pages.sh
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH" PYTHONPATH="$PWD"
made() { "${@:2}" > "$1.new" && mv "$1.new" "$1"; } # PAGE COMMAND...: an error leaves the page as it was
made docs/settings.md python tools/settings_page.py
made docs/upstream.md python tools/upstream_page.py
made docs/engines.md python -m tests.engines_page # a minute
python tools/plan_page.py docs/plan.md
python tools/doctor_page.py docs/doctor.md
made docs/field-guide.md python tools/cases.py guide
