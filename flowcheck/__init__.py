"""FlowCheck: checkpoints rebuilt from mirrored RoCEv2 allreduce traffic."""

__version__ = "0.1.0"


def attach(*args, **kwargs):  # type: ignore[no-untyped-def]
    """Attach a DDP training job to a checkpoint node: trainer.attachment.attach, imported when it is needed."""
    from flowcheck.trainer.attachment import attach as implementation

    return implementation(*args, **kwargs)
