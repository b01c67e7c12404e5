"""The lab: real training over real RoCEv2 packets, a leaf switch that mirrors, a live checkpoint node; one machine.

    network/     fabric.py: namespaces, cables, the leaf (bridge with tc, or Open vSwitch), mirror, control network
                 impair.py: cables that lose, double, move and damage packets, and write down which (impairer.pyx)
    softroce/    the c10d backend that puts NCCL's wire format on the fabric
    jobs.py      models, text, optimizer settings;  trainer.py: what every rank runs, forked by starter.py
    run.py       fabric + node + trainers of one run;  record.py: what they have said;
    compare.py   the replica against the trainers, bit for bit;  node_files.py: node.toml of each node
    experiment.py  what `flowcheck lab run` does;  view.py: the live screen;  cli.py: `flowcheck lab up|run|status|down`

docs/use/lab.md is the manual. Importing this package imports none of it.
"""
