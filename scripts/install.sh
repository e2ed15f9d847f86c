#!/bin/sh
# Find a Python that can run the project and hand over to install.py. `make install` calls this.
# PYTHON=... chooses one; an environment that works is kept, whatever made it.
set -eu
cd "$(dirname "$0")/.."

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

for python in ${PYTHON:-.venv/bin/python python3.11 python3.12 python3}; do
    if is_new_enough "$python"; then
        exec "$python" scripts/install.py
    fi
done
echo "error: no Python 3.11 or newer (looked for: ${PYTHON:-python3.11 python3.12 python3})" >&2
echo "  try: install python3.11 with its venv module, or PYTHON=/path/to/python make install" >&2
exit 1
