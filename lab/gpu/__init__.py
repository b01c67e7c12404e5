"""`make gpu-demo`: ranks on one GPU, whose NCCL sends through a network of the lab (docs/use/gpu-demo.md).

    python -P -m lab.gpu      device.py: is there a GPU; demo.py: what is run and compared
    rank.py                             one rank: what a training script writes
    plugin.py, src/net_plugin.c         NCCL's transport: frames of queue pairs, and copies of them on a mirrored port
    pair.py                             that port and the node on it, in a network namespace where those are allowed

The generator of packets here is softroce's code for frames and the plugin's own for the rest; neither reaches `parser`.
"""
