#!/bin/sh
# Install FlowCheck and its pinned Python packages into .venv, which is made with $PYTHON (/usr/bin/python3).
#
#   tools/python-packages.sh EXTRAS HOW-LONG      EXTRAS of pyproject.toml: node,switch,lab,plan,dev
set -eu
export PIP_DISABLE_PIP_VERSION_CHECK=1

python=.venv/bin/python
test -x $python || "${PYTHON:-/usr/bin/python3}" -m venv .venv
echo "flowcheck: installing Python packages, usually $2"
$python -m pip install -q -c constraints.txt setuptools wheel Cython cffi numpy
# none: the editable install records the packages, `make build` compiles.
FLOWCHECK_BUILD=none $python -m pip install -q -c constraints.txt --no-build-isolation -e ".[$1]"
