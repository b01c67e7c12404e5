"""Calls and connections of a communicator of NCCL: what its plugin, its log, the kernel and torch say of them."""
