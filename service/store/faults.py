"""Errors of Redis: those that keep it from serving, and those of single keys."""

from __future__ import annotations

import re

import redis

# Error code of Redis -> why it cannot serve at present, and what helps.
_FAULTS = {
    "OOM": "Redis is out of memory: let workers apply the backlog, or raise maxmemory",
    "READONLY": "Redis is a read-only replica: name its primary with --redis or REDIS_URL",
    "NOPERM": "Redis denies the sidecar's user a command or key that it needs (ACL)",
    "MISCONF": "Redis cannot write to its disk, which may be full: its log says more",
    "BUSY": "Redis is busy with a script of another client: SCRIPT KILL ends it",
    "LOADING": "Redis is loading its data",
    "NOREPLICAS": "Redis has fewer replicas than it needs for writing",
    "MASTERDOWN": "Redis is a replica that has lost its primary",
    "CLUSTERDOWN": "the Redis cluster is down",
    "CROSSSLOT": "Redis is a part of a cluster: name one that is not",
    "NOSCRIPT": "Redis was started again or flushed a moment ago",
}
_FAULT_CLASSES: dict[type[redis.RedisError], str] = {
    redis.OutOfMemoryError: "OOM",
    redis.ReadOnlyError: "READONLY",
    redis.exceptions.NoPermissionError: "NOPERM",
    redis.BusyLoadingError: "LOADING",
    redis.exceptions.MasterDownError: "MASTERDOWN",
    redis.exceptions.ClusterDownError: "CLUSTERDOWN",
    redis.exceptions.AskError: "CROSSSLOT",
    redis.exceptions.ClusterCrossSlotError: "CROSSSLOT",
    redis.exceptions.NoScriptError: "NOSCRIPT",
}
_SILENCE = redis.ConnectionError, redis.TimeoutError, redis.exceptions.InvalidResponse
# What a script runs into is told in other ways by some versions of Redis.
_CODE = re.compile(rf"\b({'|'.join(_FAULTS)})\b")
_ENDED_SCRIPT = "Script killed by user"
_DENIED_IN_SCRIPT = "The user executing the script can't"


def store_fault(error: redis.RedisError) -> str | None:
    """Reason why Redis cannot serve at present; None for an error of the keys that were asked for,
    as where one holds another kind of value, which leaves all other keys usable."""
    for kind, code in _FAULT_CLASSES.items():
        if isinstance(error, kind):
            return _FAULTS[code]
    if isinstance(error, redis.AuthenticationError):
        return "Redis refuses the name or the password of the sidecar's user"
    if isinstance(error, _SILENCE):
        return "the sidecar cannot reach its Redis"
    if _DENIED_IN_SCRIPT in str(error):
        return _FAULTS["NOPERM"]
    if _ENDED_SCRIPT in str(error):
        return _FAULTS["BUSY"]
    found = _CODE.search(str(error))
    return _FAULTS[found[1]] if found else None
