#!/bin/sh
# Install the Debian packages FlowCheck needs; does nothing, and asks for nothing, when all are present.
#
#   tools/apt-packages.sh run     to build and run it. libisal: invariant CRC; libpcap: link-type tables of captures
#   tools/apt-packages.sh test    what tests need more. tshark: second opinion; clang: fuzzing; openssh-client: an SSH
#                                 agent; openvswitch-switch: a real switch (userspace datapath, no kernel module);
#                                 etcd-server: a registry
set -eu

RUN="build-essential pkg-config python3 python3-dev python3-venv libdpdk-dev libpcap-dev libisal-dev iproute2"
TEST="tshark openssh-client openvswitch-switch etcd-server clang-14 libclang-rt-14-dev"
case "${1:-}" in
    run) PACKAGES=$RUN ;;
    test) PACKAGES=$TEST ;;
    *) echo "usage: $0 run|test" >&2; exit 2 ;;
esac

missing=""
for package in $PACKAGES; do
    state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$state" = installed ] || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" -eq 0 ]; then
    as_root=""
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    as_root="sudo"
else
    echo "flowcheck: these Debian packages are missing:$missing" >&2
    echo "  remedy: run as root:  apt-get update && apt-get install --no-install-recommends$missing" >&2
    exit 1
fi
echo "flowcheck: installing Debian packages, usually one or two minutes:$missing"
$as_root apt-get update -qq
# env: sudo drops the variable otherwise, and tshark's package asks a question.
# shellcheck disable=SC2086  # a list of words
$as_root env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends -o Dpkg::Use-Pty=0 $missing >/dev/null
