"""Settings of a node: each table of node.toml is a class (docs/use/settings.md has every key).

    capture.py    [capture], [[follow]]                      protect.py      [protect]
    control.py    [control], [api], [tls], [tokens]          journal.py      [journal]
    replica.py    [replica], [common]                        telemetry.py    [telemetry]
    store.py      [store], [output]                          nodes.py        [nodes]

node.py: the whole file, and keys without a table. load.py reads it. tokens.py reads token files, renewal.py knows keys
of earlier releases.
"""
