#!/bin/sh
# Contract suite of dataplane and parser under AddressSanitizer or ThreadSanitizer.
#
#   tools/sanitize.sh address|thread [pytest arguments]
#
# Works in a copy of the tree (out/sanitize-KIND), so that the ordinary extensions stay as they are. Python itself
# is not instrumented: the sanitizer's library is preloaded. DPDK is not either, so what two of our threads hand
# each other through its rings looks unordered to ThreadSanitizer; tools/tsan.supp names those places. It also
# cannot place its shadow memory under full address randomisation: setarch -R.
set -eu

kind=$1
shift
case $kind in
    address) library=libasan.so ;;
    thread) library=libtsan.so ;;
    *) echo "usage: $0 address|thread [pytest arguments]" >&2; exit 2 ;;
esac
root=$(cd "$(dirname "$0")/.." && pwd)
tree=$root/out/sanitize-$kind
python=$root/.venv/bin/python
mkdir -p "$tree"
cd "$root"
# Sources with their times, so that a second run compiles only what changed.
tar --exclude='*.so' --exclude='__pycache__' -cf - \
    setup.py pyproject.toml README.md dataplane parser tests/conftest.py tests/dataplane tests/parser examples \
    flowcheck/__init__.py flowcheck/__main__.py flowcheck/*.py | tar -C "$tree" -xf -
cd "$tree"
# Short stacks and no inlining: reports that can be read. -O1: without it the code is too large to compile here.
export CFLAGS="-fsanitize=$kind -fno-omit-frame-pointer -g -O1" LDFLAGS="-fsanitize=$kind"
FLOWCHECK_BUILD=dataplane,parser.lane,parser.machine,parser.place,parser.roce,parser.survey \
    nice "$python" setup.py -q build_ext --inplace
unset CFLAGS LDFLAGS
[ $# -gt 0 ] || set -- tests/dataplane/test_contract.py tests/dataplane/test_live.py tests/dataplane/test_endurance.py \
    tests/dataplane/test_lifecycle.py tests/parser/test_survey.py tests/parser/test_place.py tests/parser/test_roce.py
# Leaks: Python keeps what it has to the end. Freed in another thread, C++ exceptions: not ours to judge.
export ASAN_OPTIONS=detect_leaks=0:halt_on_error=1:exitcode=86
export TSAN_OPTIONS="suppressions=$root/tools/tsan.supp:halt_on_error=1:exitcode=86:ignore_noninstrumented_modules=1"
export PYTHONPATH="$tree" PYTHONMALLOC=malloc
preload=$(gcc -print-file-name=$library)
exec setarch "$(uname -m)" -R env LD_PRELOAD="$preload" \
    "$python" -m pytest -q -m "not slow" -p no:cacheprovider "$@"
