#!/usr/bin/env bash
# Builds the documents as a site into site/, where every warning is an error; site/index.html opens without a server.
# Needs the extra `docs`: pip install -c constraints.txt -e '.[docs]'. Further arguments go to mkdocs.
#
#   scripts/docs.sh             build
#   scripts/docs.sh --serve     build, serve on http://127.0.0.1:8100, and build again when a file changes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH" NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true
python -c 'import material, mkdocstrings' 2>/dev/null || {
    echo "docs.sh: the extra docs is missing: pip install -c constraints.txt -e '.[docs]'" >&2
    exit 1
}
if [ "${1:-}" = --serve ]; then
    shift
    exec python -m mkdocs serve --dev-addr 127.0.0.1:8100 "$@"
fi
exec python -m mkdocs build --strict "$@"
