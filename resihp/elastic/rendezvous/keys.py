"""Names of all keys in a job's store, relative to the prefix of the run.

Every change of another key that a waiting rank must notice is followed by an increment of `SIGNAL`:
a rank polls that one key, and reads others only after it has changed.
"""

from __future__ import annotations

SIGNAL = "signal"
"""Counter of changes."""
FINISHED = "finished"
"""Set by the first rank that has completed the last step; ends idle ranks and joiners."""
ENDED = "ended"
"""Counter of ranks of the last generation that have completed the last step."""
ANNOUNCEMENTS = "announcements"
"""List of `RANK:NUMBER:ENDS`, one entry for each time that a joiner announced itself."""
STOPPED = "stopped"
"""Reason for which the launcher that hosts the store ends the job."""
LEAVING = "leaving"
"""List of `RANK:INVITATIONS:HANDS_OVER` of ranks that are to leave; the last of a rank counts."""
ARGUMENTS = "arguments"
"""Arguments of the job, and the rank that came first and has set them."""
CHECKPOINTS = "checkpoints"
"""Identity of the job in its checkpoints; the first writer sets it."""
CHECKPOINT_TOKEN = "checkpoint-token"
"""Secret of the connections between memory replicas of checkpoints; the first writer sets it."""


def model(part: int = 0) -> str:
    """Description of a part of the model that the job trains; the first member sets it."""
    return f"model/{part}"


# Liveness.

PROCESS_HISTORY = "process-history"
"""`ProcessHistory`: list of ends of processes and of invitations."""
JOB_LIVENESS = "job-liveness"
"""`LivenessSummary` of all hosts; the job's watcher sets it."""
HOST_COUNTS = "host-counts"
"""Counts of the job's watcher, for its successor."""
HOSTS = "hosts"
"""List of the hosts of members."""
HEARTBEAT_TABLE = "heartbeat-table"
"""Secret name of the table of heartbeats on each host; the first member sets it."""


def host_liveness(host: str) -> str:
    """`LivenessSummary` of one host; its watcher sets it."""
    return f"host-liveness/{host}"


# One rank.


def announced(rank: int) -> str:
    """Counter of announcements of `rank` as a joiner."""
    return f"announced/{rank}"


def invitation(rank: int, number: int) -> str:
    """Answer to announcement `number` of `rank`."""
    return f"invitation/{rank}/{number}"


def checkpoint_server(rank: int) -> str:
    """Address at which `rank` serves memory replicas of checkpoints."""
    return f"checkpoint-server/{rank}"


# Generations; `recovery` is the number of recoveries before.


def proposal(recovery: int, generation: int) -> str:
    """Proposed plan of `generation`; the first writer sets it."""
    return f"proposal/{recovery}/{generation}"


def reshard_started(recovery: int, generation: int) -> str:
    """Set when the working ranks start the change to `generation`; idle ranks then follow."""
    return f"reshard-started/{recovery}/{generation}"


def arrivals(barrier: str) -> str:
    """Counter of ranks that have arrived at a barrier."""
    return f"arrivals/{barrier}"


def claims(recovery: int, generation: int, step: int, replica: int) -> str:
    """Counter of claims on the microbatches of `replica` in a step (`MicrobatchQueue`)."""
    return f"claims/{recovery}.{generation}/{step}/{replica}"


# Recoveries.


def broken(recovery: int) -> str:
    """Reason for recovery number `recovery`; the first writer sets it."""
    return f"broken/{recovery}"


def abandoned(recovery: int, work: str) -> str:
    """Set by a rank that gives up `work`, which the other ranks of its replica cannot finish."""
    return f"abandoned/{recovery}/{work}"


def report(recovery: int, rank: int) -> str:
    """`SurvivorReport` of `rank`."""
    return f"report/{recovery}/{rank}"


def reported(recovery: int) -> str:
    """List of ranks whose `report` is there."""
    return f"reported/{recovery}"


def decision(recovery: int) -> str:
    """`RecoveryDecision`; the first writer sets it."""
    return f"decision/{recovery}"


# Process groups; `AbortableProcessGroup` uses its own name as prefix.


def replica_group_starts(rank: int) -> str:
    """Counter of the default process groups that `rank` has created."""
    return f"replica-group-starts/{rank}"


def replica_group_prefix(replica: int, start: int) -> str:
    """Prefix of the addresses of a replica's default process group."""
    return f"replica-group/{replica}/{start}"
