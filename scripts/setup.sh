# SPDX-License-Identifier: Apache-2.0
# Sourced by the other scripts: goes to the repository root and makes .venv with the project and its tools.
# Installs again only when what is installed has changed since. Needs Python 3.11 or newer and pip, nothing else.
# What is installed is locked with hashes in requirements/ (scripts/dependencies), but for torch, of which only the version
# is: its builds differ from index to index. UNLOCKED=1 takes whatever pyproject.toml allows.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python; do
    [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "isthmus: needs Python 3.11 or newer, and found none; install it or name it with PYTHON=/path/to/python3" >&2
  return 3
}

install_locked() {
  local install=(.venv/bin/python -m pip install --quiet --disable-pip-version-check)
  "${install[@]}" --require-hashes --no-deps -r requirements/dev.txt -r requirements/build.txt \
    && "${install[@]}" -r requirements/torch.txt \
    && "${install[@]}" --no-deps --no-build-isolation -e . \
    && .venv/bin/python -m pip check
}

set_up() {
  local stamp=.venv/installed-for wanted
  wanted=$(cat pyproject.toml requirements/*.txt hatch_build.py collective/transport/*.c | cksum)
  if [ ! -x .venv/bin/isthmus ] || [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    local python
    python=$(find_python)
    echo "isthmus: installing into .venv (once; torch is the large part)" >&2
    if ! "$python" -m venv .venv; then
      echo "isthmus: cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2
      return 3
    fi
    if [ -n "${UNLOCKED:-}" ]; then
      .venv/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test,check,plot]' >&2
    elif ! install_locked >&2; then
      echo "isthmus: the locked versions could not be installed; UNLOCKED=1 takes what this package index has" >&2
      return 3
    fi
    echo "$wanted" >"$stamp"
  fi
  export PATH="$PWD/.venv/bin:$PATH"
}

set_up
