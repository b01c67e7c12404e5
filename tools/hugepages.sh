#!/bin/sh
# Try to have a modest number of free 2 MiB huge pages; says what happened and never fails.
# Without them DPDK runs with --no-huge: the same code, slower.
WANTED=${1:-256}
KNOB=/proc/sys/vm/nr_hugepages

of() { awk -v key="$1:" '$1 == key { print $2 }' /proc/meminfo; }

if [ "$(of Hugepagesize)" != 2048 ]; then
    echo "flowcheck: no 2 MiB huge pages on this machine, DPDK runs without (--no-huge)"
    exit 0
fi
free=$(of HugePages_Free)
[ "${free:-0}" -ge "$WANTED" ] && exit 0
before=$(of HugePages_Total)
short=$((WANTED - free))
if [ ! -w "$KNOB" ]; then
    echo "flowcheck: $free of $WANTED huge pages free and no right to reserve more; if DPDK finds too few it" \
         "runs without (--no-huge). As root: echo $((before + short)) > $KNOB"
elif [ "$(of MemAvailable)" -lt $((short * 2048 * 4)) ]; then
    echo "flowcheck: $free huge pages free, memory too small to reserve $short more; leaving it alone"
elif ! echo $((before + short)) 2>/dev/null > "$KNOB"; then
    echo "flowcheck: the kernel refused to reserve huge pages, DPDK runs without (--no-huge)"
else
    echo "flowcheck: huge pages free: $(of HugePages_Free) of $WANTED wanted (were $free);" \
         "give them back with: echo $before > $KNOB"
fi
exit 0
