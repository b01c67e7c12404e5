"""`flowcheck bench`: how far each stage is from what the machine can do, measured in the same run.

    rows.py      a Row and where it was taken, and contenders measured in alternating rounds
    workload.py  packets of one communicator's life in a ring in memory, with the bytes they must become
    limits.pyx   the limits in C that shares nothing with the parser: copies past the cache, the least a parser does
    feed.py      a job's packets without an end, from one window in memory, for benches of the live node
    parse.py     Engine on packets that carry nothing to keep, against the minimal parse
    place.py     Engine and kernels placing gradients, against a roof of the same traffic
    ingest.py    packets from a DPDK port to placed gradients, against minimal.pyx: a loop that does the least
    streams.py   the same packets over 1, 2, 4, 8 and 16 streams
    loss.py      the live node's loop with losses, against without
    pipeline.py  the stages of a live node, one after another and overlapped; packets from feeder.pyx
    figure.py    that as a picture
    closing.py   evidence and verdict of an iteration that closes
    sums.py      checksums of a version's parameters, against reading them
    adam.py      a step of the optimizer, against its memory traffic and torch's

docs/understand/performance.md says what the rows mean. Timing is never a test: tests only run a round or two, for the
form.
"""
