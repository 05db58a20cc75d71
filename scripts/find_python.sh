#!/usr/bin/env bash
# Print the path of a Python that can build the environment: 3.12 or newer, with venv and pip.
# Looks at $PYTHON, at PATH, at uv's Pythons, then at pyenv's; says what to install when there is none.
set -u

fits() {
    # A pyenv shim can exist and still refuse to run, so a candidate has to prove itself.
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

real_path() {
    "$1" -c 'import sys; print(sys.executable)'
}

if [ -n "${PYTHON:-}" ]; then
    fits "$PYTHON" && real_path "$PYTHON" && exit 0
    echo "PYTHON=$PYTHON is not a Python >= 3.12 with the venv and ensurepip modules; unset it or name another" >&2
    exit 1
fi

# Inside another virtual environment, "python3" is that environment's: still fine to build a new one from.
for name in python3.12 python3.13 python3.14 python3; do
    fits "$name" && real_path "$name" && exit 0
done

if command -v uv >/dev/null 2>&1; then
    found=$(UV_PYTHON_DOWNLOADS=never uv python find --no-project '>=3.12' 2>/dev/null) || found=""
    if [ -n "$found" ] && fits "$found"; then
        real_path "$found" && exit 0
    fi
fi

if command -v pyenv >/dev/null 2>&1; then
    for version in 3.12 3.13 3.14; do
        for found in "$(pyenv root)"/versions/$version*/bin/python3; do
            fits "$found" && real_path "$found" && exit 0
        done
    done
fi

printf '%s\n' >&2 \
    "No Python >= 3.12 with the venv and ensurepip modules was found on PATH, through uv, or through pyenv. Install one:" \
    "  uv python install 3.12        (uv)" \
    "  pyenv install 3.12            (pyenv)" \
    "  apt install python3.12-venv   (Debian, Ubuntu, where the release has it)" \
    "  brew install python@3.12      (macOS)" \
    "or name one: make setup PYTHON=/path/to/python3.12"
exit 1
