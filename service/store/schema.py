"""Redis keys, and the Lua scripts for updates that other clients must see as one step."""

from __future__ import annotations

JOBS = "resihp:jobs"  # set: names of all jobs
GENERATIONS = "resihp:generations"  # counter: registrations with new content
FENCES = "resihp:fences"  # counter: leases given out
WORKERS = "resihp:workers"  # sorted set: worker -> time of its last sign of life
NEWS = "resihp:news"  # channel: names of jobs that changed
PLANS = "resihp:plans"  # channel: names of jobs with a new plan, registered anew or deleted
PREDICTORS = "resihp:predictors"  # hash: kind of job -> fitted predictor
GROUP = "detector"  # consumer group of every message stream


class JobKeys:
    """Keys of one job; all have its name as a prefix.

    meta       hash: job, generation, plan (version of the newest), registered_at
    messages   stream of telemetry, heartbeats, acks and failures, in order of arrival
    lease      token of the worker that owns the job
    state      hash: detector, session, applied (id of the newest message in them), published_step
    status     hash: verdicts, diagnosis, planning, last_step, ... (JSON, as the API answers them)
    plans      hash: version -> plan
    digests    hash: version -> digest of the plan, from version 1 on
    events     capped stream of verdicts, plans, acks, failures
    steps      capped stream of step summaries
    counts     hash of counters
    """

    def __init__(self, job: str) -> None:
        self._prefix = f"resihp:job:{job}:"
        self.meta, self.messages, self.plans, self.events, *others = self.owned()
        self.lease, self.state, self.status, self.digests, self.steps, self.counts = others

    def seen(self, retry_key: str) -> str:
        """Marker of a received message, so that its retry is not applied again."""
        return f"{self._prefix}seen:{retry_key}"

    def owned(self) -> list[str]:
        """All keys that a reset or the deletion of the job removes, in the order of `REGISTER`."""
        first = ("meta", "messages", "plans", "events")
        others = ("lease", "state", "status", "digests", "steps", "counts")
        return [self._prefix + name for name in first + others]


# KEYS: meta, messages, counts, seen
# ARGV: max entries, max bytes, kind, body, records, dropped, remember (s; 0: no retry key)
# Returns "unknown", "full", "duplicate" or the id of the entry.
INGEST = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 'unknown' end
local remember = tonumber(ARGV[7])
if remember > 0 and redis.call('EXISTS', KEYS[4]) == 1 then
  redis.call('HINCRBY', KEYS[3], 'duplicates', 1)
  return 'duplicate'
end
local waiting = tonumber(redis.call('HGET', KEYS[3], 'backlog_bytes') or '0')
if redis.call('XLEN', KEYS[2]) >= tonumber(ARGV[1])
    or waiting + #ARGV[4] > tonumber(ARGV[2]) then
  redis.call('HINCRBY', KEYS[3], 'refused', 1)
  return 'full'
end
local id = redis.call('XADD', KEYS[2], '*', 'kind', ARGV[3], 'body', ARGV[4])
if remember > 0 then redis.call('SET', KEYS[4], id, 'EX', remember) end
redis.call('HINCRBY', KEYS[3], 'backlog_bytes', #ARGV[4])
redis.call('HINCRBY', KEYS[3], 'messages', 1)
redis.call('HINCRBY', KEYS[3], 'bytes', #ARGV[4])
redis.call('HINCRBY', KEYS[3], 'records', ARGV[5])
redis.call('HINCRBY', KEYS[3], 'dropped', ARGV[6])
return id
"""

# KEYS: jobs, generations, then the keys of the job: meta, messages, plans, events, all others
# ARGV: name, job, plan 0, now, max jobs, consumer group, event
# Returns 0 (registered before with equal content), 1 (registered) or -1 (too many jobs).
REGISTER = """
local meta, messages, plans, events = KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local old = redis.call('HGET', meta, 'job')
if old == ARGV[2] then return 0 end
if not old and redis.call('SCARD', KEYS[1]) >= tonumber(ARGV[5]) then return -1 end
for index = 3, #KEYS do redis.call('DEL', KEYS[index]) end
local generation = redis.call('INCR', KEYS[2])
redis.call('HSET', meta, 'job', ARGV[2], 'generation', generation, 'plan', 0,
  'registered_at', ARGV[4])
redis.call('HSET', plans, 0, ARGV[3])
redis.call('XGROUP', 'CREATE', messages, ARGV[6], '0', 'MKSTREAM')
redis.call('XADD', events, '*', 'kind', 'registered', 'body', ARGV[7])
redis.call('SADD', KEYS[1], ARGV[1])
return 1
"""

# KEYS: lease, fences   ARGV: worker, time to live (ms)
# Returns the new token, or false while another worker holds the lease.
ACQUIRE = """
local held = redis.call('GET', KEYS[1])
if held and string.match(held, ':(.*)$') ~= ARGV[1] then return false end
local token = redis.call('INCR', KEYS[2]) .. ':' .. ARGV[1]
redis.call('SET', KEYS[1], token, 'PX', ARGV[2])
return token
"""

# KEYS: lease   ARGV: token, time to live (ms; 0: release it)
# Returns 1 if the token was still that of the lease.
RENEW = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[2] == '0' then redis.call('DEL', KEYS[1])
else redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 1
"""
