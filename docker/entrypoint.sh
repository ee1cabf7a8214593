#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Shapes the link as root, gives root up for good, then runs the command it was given.
#
#   SHAPE_LINK       the link of the scenario that this container is, auto: by its number; empty: not shaped
#   SHAPE_SCENARIO   the scenario file            (default: scenario.toml beside this script)
#   SHAPE_INTERFACE  the interface to shape       (default: eth0)
#   SHAPE_OPTIONS    further options of shape.py  (--emulate)
#   ON_FAILURE       1: exit codes that no restart cures become 0, for `restart: on-failure`
set -eu

here=$(dirname "$0")
user=10001

finish() { # with this exit code, or with 0 where the engine would restart in vain
    case ${ON_FAILURE:-}:$1 in
        1:2 | 1:3 | 1:5 | 1:8 | 1:9 | 1:20 | 1:130)
            echo "entrypoint: exit code $1, which no restart cures: ending with 0" >&2
            exit 0
            ;;
    esac
    exit "$1"
}

if [ "$(id -u)" -eq 0 ]; then
    if [ -n "${SHAPE_LINK:-}" ]; then
        # shellcheck disable=SC2086 # the options are several words on purpose
        python3 "$here/shape.py" --link "$SHAPE_LINK" --scenario "${SHAPE_SCENARIO:-$here/scenario.toml}" \
            --interface "${SHAPE_INTERFACE:-eth0}" ${SHAPE_OPTIONS:-} >&2 || finish $?
        unset SHAPE_LINK
    fi
    # With no_new_privs no program started from here on, setuid or not, can become root again.
    exec setpriv --reuid "$user" --regid "$user" --clear-groups --inh-caps=-all --no-new-privs -- "$0" "$@"
elif [ -n "${SHAPE_LINK:-}" ]; then
    echo "entrypoint: link '$SHAPE_LINK' can be shaped by root only: start the container with user 0" >&2
    finish 3
fi

[ "${ON_FAILURE:-}" = 1 ] || exec "$@"

# The shell stays, to translate the exit code. It passes SIGTERM on, and goes on waiting until the child is gone.
child='' asked=''
trap 'asked=1; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null || true' TERM INT
"$@" &
child=$!
[ -z "$asked" ] || kill -TERM "$child" 2>/dev/null || true # asked before there was a child to tell
while :; do
    code=0
    wait "$child" || code=$?
    kill -0 "$child" 2>/dev/null || break
done
finish "$code"
