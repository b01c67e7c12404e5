"""`flowcheck plan`: what a person asks before ports and servers are bought. Formulas, each with its source.

    loss         how often an iteration stays incomplete, by the mirrored ports and the mirror's loss
    capacity     does a node keep up with a job, and with how many nodes, ports and cores
    goodput      how much of the time trains under failures, by checkpointing system, and what the rest costs
    verify       the papers' printed numbers beside what comes out here
    report       all of it for one cluster, as one HTML page

A command makes an Answer (answer.py) of inputs and results, and output.py prints it: a table, JSON, a picture. Pure
functions stand in modules of their own (loss_law.py, renewal.py, ...), so that measured figures can be held against
them. Packets and bytes come from the parser's wire model, ports from switch_configs' planner: what is planned is what a
node will read and a switch will mirror. No module here reads a capture, opens a port or starts a thread.
"""
