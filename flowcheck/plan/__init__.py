"""`flowcheck plan`: what a person asks before ports and servers are bought. Formulas, each with its source.

    loss         how often an iteration stays incomplete, by the mirrored ports and the mirror's loss
    capacity     does a node keep up with a job, and with how many nodes, ports and cores
    goodput      how much of the time trains under failures, by checkpointing system, and what the rest costs
    holders      which machine keeps what of which, and what may be lost
    report       all of it for one cluster, as one HTML page

Each command has a room of its own, and makes an Answer (answers/answer.py) of inputs and results, which
answers/output.py prints: a table, JSON, a picture. Two rooms are shared: jobs/ (jobs by name, which of them can be
followed) and traffic/ (what they put on the wire, what a mirror loses of it). Pure functions stand in modules of their
own (loss_law.py, renewal.py, ...), so that measured figures can be held against them. Packets and bytes come from the
parser's wire model, ports from switch_configs' planner: what is planned is what a node will read and a switch will
mirror. No module here reads a capture, opens a port or starts a thread.
"""
