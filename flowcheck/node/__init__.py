"""The checkpoint node as a service: `flowcheck-node --config node.toml` (docs/use/node.md).

    cli       one process: settings, DPDK, control server, one thread per group; ends with SIGTERM or Ctrl-C
    config    the settings file; captures: what it says of mirror ports, for the dataplane; budget: does that fit here
    control   who may speak: connections of trainers, their messages into the groups' inboxes
    group     one job at a time: what it still needs, its session, its members
    live      one job's traffic into versions: engine, verdict, replica
    output    what people and programs see of it: status lines, hashes, checkpoints on disk
"""
