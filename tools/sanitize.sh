#!/bin/sh
# Contract suite of dataplane and parser under AddressSanitizer or ThreadSanitizer.
#
#   tools/sanitize.sh address|thread [pytest arguments]
#
# Works in a copy of the tree (out/sanitize-KIND), so that the ordinary extensions stay as they are. Python and
# DPDK are not instrumented; the sanitizer's library is preloaded. ThreadSanitizer cannot place its shadow memory
# under full address randomisation (setarch -R), and does not see the order that net_ring's own ring gives to
# buffers which a test fills: those tests run under AddressSanitizer only.
set -eu

kind=$1
shift
case $kind in
    address) library=libasan.so choice="" ;;
    thread)
        library=libtsan.so
        choice="not ring- and not if_asked and not from_outside and not by_hand and not several_ports and not hold_gives"
        # Thousands of captures one after the other: more shadow memory than there is.
        choice="$choice and not byte_changed and not scan_accepts" ;;
    *) echo "usage: $0 address|thread [pytest arguments]" >&2; exit 2 ;;
esac
root=$(cd "$(dirname "$0")/.." && pwd)
tree=$root/out/sanitize-$kind
python=$root/.venv/bin/python
mkdir -p "$tree"
cd "$root"
# Sources with their times, so that a second run compiles only what changed.
tar --exclude='*.so' --exclude='__pycache__' -cf - \
    setup.py pyproject.toml README.md LICENSE dataplane parser tests/conftest.py tests/dataplane tests/parser examples \
    flowcheck | tar -C "$tree" -xf -
# Captures of real traffic are looked for beside the tree.
[ ! -d "$root/../shared" ] || ln -sfn ../../shared "$root/out/shared"
cd "$tree"
# Short stacks and no inlining: reports that can be read. -O1: without it the code is too large to compile here.
export CFLAGS="-fsanitize=$kind -fno-omit-frame-pointer -g -O1" LDFLAGS="-fsanitize=$kind"
FLOWCHECK_BUILD=dataplane,$(cd parser && echo *.pyx | sed 's/\(\w*\)\.pyx */parser.\1,/g') \
    nice "$python" setup.py -q build_ext --inplace
unset CFLAGS LDFLAGS
[ $# -gt 0 ] || set -- tests/dataplane/test_contract.py tests/dataplane/test_live.py tests/dataplane/test_endurance.py \
    tests/dataplane/test_lifecycle.py tests/parser/test_machine_properties.py \
    tests/parser/test_observer_counts.py tests/parser/test_observer_messages.py tests/parser/test_place.py tests/parser/test_roce.py
# Leaks: Python keeps what it has to the end. Freed in another thread, C++ exceptions: not ours to judge.
# A quarantine of 16 MB: what is freed must go back some time, a test looks at that.
export ASAN_OPTIONS=detect_leaks=0:halt_on_error=1:exitcode=86:quarantine_size_mb=16
export TSAN_OPTIONS="halt_on_error=1:exitcode=86:log_path=$tree/report"
export PYTHONPATH="$tree" PYTHONMALLOC=malloc
preload=$(gcc -print-file-name=$library)
rm -f "$tree"/report.*
status=0
setarch "$(uname -m)" -R env LD_PRELOAD="$preload" \
    "$python" -m pytest -q -m "not slow" -k "$choice" -p no:cacheprovider "$@" || status=$?
# pytest keeps what a dying process wrote.
cat "$tree"/report.* 2>/dev/null || true
exit $status
