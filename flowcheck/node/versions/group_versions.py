"""All that a group has on this machine of its versions: replica files, what ranks gave, and what is said against them.

    versions = GroupVersions(config, group, say)
    versions.files, .standing            replica files, and which of them the group stands on
    versions.users                       what ranks gave of themselves, next to a replica
    versions.journal                     gradients of the last iterations, and bases
    versions.divergences, .shadow        which versions are not the trainer's, and which are not offered yet

    versions.published(job, replica, verified, matches)     a version was built, or came from a peer
    versions.abandon()                                      a job that is not followed leaves nothing
    versions.close(keep)                                    the group has ended

The group's thread.
"""

from __future__ import annotations

from collections.abc import Callable

from flowcheck.job.model import Job
from flowcheck.node.config.node import NodeConfig
from flowcheck.node.versions.divergences import Divergences
from flowcheck.node.versions.journal.group_journal import GroupJournal
from flowcheck.node.versions.replica_files import ReplicaFiles
from flowcheck.node.versions.shadow import Shadow
from flowcheck.node.versions.standing import Standing
from flowcheck.node.versions.user_states import UserStates
from flowcheck.rebuild.version.replica import JobReplica

__all__ = ["GroupVersions"]


class GroupVersions:
    """say: events of the group."""

    def __init__(self, config: NodeConfig, group: str, say: Callable[..., None]) -> None:
        directory = config.replica.directory
        self.files = ReplicaFiles(directory, config.name, group, config.shadow)
        for path, why in sorted(self.files.foreign.items()):
            say("problem", why=f"{path}: {why}; it is left alone. Remove it, or run the node as that user")
        self.shadow = Shadow(config.shadow, say)
        self.divergences = Divergences(directory, config.name, group, say)
        self.standing = Standing(self.files, say)
        self.users = UserStates(say)
        self.journal = GroupJournal(config, group, say)

    def published(self, job: Job, replica: JobReplica, step: int, matches: int) -> None:
        """step: of the version. matches: checksums of the run that have matched."""
        self.standing.first(job, step)
        self.shadow.published(step, matches)
        self.users.published(replica.steps)

    def abandon(self) -> None:
        """What has no version is of no use, nor what ranks gave for it."""
        self.users.close()  # what it has not written yet would be there again
        self.files.abandon()

    def close(self, keep: bool) -> None:
        """keep: the replica."""
        self.journal.close()
        self.users.close()
        self.files.end(keep)
