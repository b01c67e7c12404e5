"""A c10d backend for CPU tensors that puts NCCL's wire format on the network as RoCEv2 RC.

    os.environ["FLOWCHECK_SOFTROCE"] = '{"interface": "fab0", "address": "10.77.0.10", "protocol": "LL"}'
    import lab.softroce
    torch.distributed.init_process_group("softroce", ...)
    DistributedDataParallel(model)                          unmodified
    lab.softroce.describe()                       communicator and flows for the job manifest

Written from the reference documents, on synth's layout rules and nothing of `parser`: lab and parser check each other.

    settings        what a rank is told             process_group  torch.distributed's calls
    bootstrap       NCCL's TCP bootstrap            communicator   connections, issue order, description
    connect         connect infos, QP handshakes    primitives     primitives of a collective
    nic             sockets, completion thread      _engine        C: frames, queue pairs, slots, payloads
"""

import torch.distributed as _dist

from lab.softroce.process_group import SoftRoceGroup, calls, create, describe
from lab.softroce.settings import Settings

__all__ = ["Settings", "SoftRoceGroup", "calls", "describe"]

if not hasattr(_dist.Backend, "SOFTROCE"):
    _dist.Backend.register_backend("softroce", create, devices=["cpu"])
