"""Redis keys, and the Lua scripts for updates that other clients must see as one step."""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache

JOBS = "resihp:jobs"  # set: names of all jobs
GENERATIONS = "resihp:generations"  # counter: registrations with new content
FENCES = "resihp:fences"  # counter: leases given out
LOADS = "resihp:loads"  # hash: job -> share of a core that it costs its worker
WORKERS = "resihp:workers"  # sorted set: worker -> time of its last sign of life
APIS = "resihp:apis"  # hash: API process -> its last report, see REPORT_DELAY
NEWS = "resihp:news"  # channel: names of jobs that changed
PLANS = "resihp:plans"  # channel: names of jobs with a new plan, registered anew or deleted
URGENT = "resihp:urgent"  # channel: message streams with a new entry that ends a worker's pause
PREDICTOR = "resihp:predictor:"  # string: fitted predictor, by kind of job
GROUP = "detector"  # consumer group of every message stream


class Subject(StrEnum):
    """Subject of the events of one history."""

    VERDICTS = "verdicts"
    PLANS = "plans"
    INCIDENTS = "incidents"
    ACTIVITY = "activity"

    @classmethod
    def of(cls, kind: str) -> Subject:
        """The history of a kind of event: `ACTIVITY` for what each rank may cause again and again,
        such as acknowledgements, probes and messages that cannot be applied."""
        return _SUBJECTS.get(kind, cls.ACTIVITY)


_SUBJECTS = {
    "verdict": Subject.VERDICTS,
    "link": Subject.VERDICTS,
    "plan": Subject.PLANS,
    "plan_applied": Subject.PLANS,
    "planning": Subject.PLANS,
    "registered": Subject.INCIDENTS,
    "failure": Subject.INCIDENTS,
    "joiner": Subject.INCIDENTS,
}


def edition(document: str) -> str:
    """Field of a job's `meta` that counts the changes of a status document, of its `plans` or of
    its `steps`."""
    return f"edition:{document}"


class JobKeys:
    """Keys of one job; all have its name as a prefix, without colons of its own: else keys of one
    job were those of another.

    meta       hash: job, generation, plan (version of the newest), event (id of the newest),
               commits (how many), registered_at (s), and the fields of `edition`
    messages   stream of telemetry, heartbeats, acks and failures, in order of arrival
    lease      token of the worker that owns the job
    state      hash: detector, steps, session, their large arrays by names made of their content,
               applied (id of the newest message in them), shown (the same of the steps that are
               shown already)
    status     hash: verdicts, devices, diagnosis, planning, last_step, ... (JSON)
    plans      hash: version -> plan
    digests    hash: version -> digest of the plan, from version 1 on
    histories  capped streams of events by subject, so that many of one push out none of another;
               ids rise over all of them
    steps      capped stream of step summaries
    counts     hash of counters
    """

    def __init__(self, job: str) -> None:
        name = job.replace("%", "%25").replace(":", "%3A")
        self._prefix = f"resihp:job:{name}:"
        self.meta, self.messages, self.lease, self.state, self.status, self.plans = map(
            self._key, ("meta", "messages", "lease", "state", "status", "plans")
        )
        self.digests, self.steps, self.counts = map(self._key, ("digests", "steps", "counts"))
        self.histories = {subject: self._key(f"events:{subject}") for subject in Subject}

    def _key(self, name: str) -> str:
        return self._prefix + name

    def seen(self, retry_key: str) -> str:
        """Marker of a received message, so that its retry is not applied again."""
        return self._key(f"seen:{retry_key}")

    def owned(self) -> list[str]:
        """All keys that a reset or the deletion of the job removes."""
        first = [self.meta, self.messages, self.lease, self.state, self.status, self.plans]
        return [*first, self.digests, self.steps, self.counts, *self.histories.values()]


keys_of = lru_cache(maxsize=4_096)(JobKeys)
"""Keys of a job, kept for the next request."""


# Redis that is out of memory refuses transactions, and a script's first write if that may need
# memory, and no later one. PERSIST of a key without expiry never needs memory and changes nothing:
# after it, a script is carried out whole. So what is small or frees memory is never refused: a
# commit above all, which removes the messages that it applies.

# KEYS: meta, messages, counts, seen, status, urgent
# ARGV: max entries, max bytes, kind, body, records, dropped, remember (s; 0: no retry key), field
# Returns "unknown", "full", "duplicate" or the id of the entry, and that field of the status. The
# marker of a message counts for the registration under which it was received only. A stream without
# entries has no bytes, whatever was counted: Redis may have deleted it.
INGEST = """
local generation = redis.call('HGET', KEYS[1], 'generation')
if not generation then return {'unknown', false} end
local status = redis.call('HGET', KEYS[5], ARGV[8])
if ARGV[3] ~= 'telemetry' then redis.call('PERSIST', KEYS[1]) end
local remember = tonumber(ARGV[7])
if remember > 0 and redis.call('GET', KEYS[4]) == generation then
  redis.call('HINCRBY', KEYS[3], 'duplicates', 1)
  return {'duplicate', status}
end
local entries, waiting = redis.call('XLEN', KEYS[2]), 0
if entries > 0 then waiting = tonumber(redis.call('HGET', KEYS[3], 'backlog_bytes') or '0') end
if entries >= tonumber(ARGV[1])
    or waiting + #ARGV[4] > tonumber(ARGV[2]) then
  redis.call('HINCRBY', KEYS[3], 'refused', 1)
  return {'full', status}
end
redis.call('HINCRBY', KEYS[3], 'dropped', ARGV[6])
local id = redis.call('XADD', KEYS[2], '*', 'kind', ARGV[3], 'body', ARGV[4])
if remember > 0 then redis.call('SET', KEYS[4], generation, 'EX', remember) end
redis.call('HSET', KEYS[3], 'backlog_bytes', waiting + #ARGV[4])
redis.call('HINCRBY', KEYS[3], 'messages', 1)
redis.call('HINCRBY', KEYS[3], 'bytes', #ARGV[4])
redis.call('HINCRBY', KEYS[3], 'records', ARGV[5])
if ARGV[3] ~= 'telemetry' and ARGV[3] ~= 'heartbeat' then
  redis.call('PUBLISH', KEYS[6], KEYS[2])
end
return {id, status}
"""

# KEYS: jobs, generations, meta, messages, plans, history of the event, all keys of the job
# ARGV: name, job, plan 0, max jobs, consumer group, event
# Returns 0 (registered before with equal content), 1 (registered) or -1 (too many jobs). A key that
# holds another kind of value is no obstacle.
REGISTER = """
local meta, messages, plans, history = KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local old = redis.pcall('HGET', meta, 'job')
if old == ARGV[2] then return 0 end
if not old and redis.call('SCARD', KEYS[1]) >= tonumber(ARGV[4]) then return -1 end
local now = redis.call('TIME')
local generation = redis.call('INCR', KEYS[2])
for index = 7, #KEYS do redis.call('DEL', KEYS[index]) end
local event = redis.call('XADD', history, '*', 'kind', 'registered', 'body', ARGV[6])
redis.call('HSET', meta, 'job', ARGV[2], 'generation', generation, 'plan', 0, 'event', event,
  'registered_at', string.format('%d.%06d', now[1], now[2]))
redis.call('HSET', plans, 0, ARGV[3])
redis.call('XGROUP', 'CREATE', messages, ARGV[5], '0', 'MKSTREAM')
redis.call('SADD', KEYS[1], ARGV[1])
return 1
"""

# KEYS: jobs, all keys of the job   ARGV: name
# Returns 1 if the job was registered.
DELETE = """
for index = 2, #KEYS do redis.call('DEL', KEYS[index]) end
return redis.call('SREM', KEYS[1], ARGV[1])
"""

# KEYS: lease, fences   ARGV: worker, time to live (ms)
# Returns the new token, or false while another worker holds the lease; a value of another kind is
# none. DEL comes before the writes that need memory, like PERSIST above.
ACQUIRE = """
local held = redis.pcall('GET', KEYS[1])
if type(held) == 'string' and string.match(held, ':(.*)$') ~= ARGV[1] then return false end
redis.call('DEL', KEYS[1])
local token = redis.call('INCR', KEYS[2]) .. ':' .. ARGV[1]
redis.call('SET', KEYS[1], token, 'PX', ARGV[2])
return token
"""

# KEYS: lease, meta
# ARGV: token, generation, number of commits so far, events kept per history, number of events,
# history, kind and body of each event, and of each command to carry out the number of its parts and
# the parts
# Returns 0, and writes nothing, if the token, the generation or the number is not the present one:
# a Redis that has lost its last writes, in a crash or to a replica, may still have the lease. The
# token changes with the owner only: extending the lease meanwhile does not matter. An error, and no
# write, where a key holds another kind of value.
COMMIT = """
local kinds, at = {H = 'hash', X = 'stream'}, 6
local function refusal(command, key)
  local kind, found = kinds[string.sub(command, 1, 1)], redis.call('TYPE', key).ok
  if kind and found ~= kind and found ~= 'none' then
    return redis.error_reply('WRONGTYPE ' .. key .. ' holds a ' .. found)
  end
end
if redis.pcall('GET', KEYS[1]) ~= ARGV[1]
    or redis.call('HGET', KEYS[2], 'generation') ~= ARGV[2]
    or (redis.call('HGET', KEYS[2], 'commits') or '0') ~= ARGV[3] then return 0 end
for _ = 1, tonumber(ARGV[5]) do
  local error = refusal('XADD', ARGV[at])
  if error then return error end
  at = at + 3
end
while at <= #ARGV do
  local error = refusal(ARGV[at + 1], ARGV[at + 2])
  if error then return error end
  at = at + ARGV[at] + 1
end
redis.call('PERSIST', KEYS[2])
redis.call('HINCRBY', KEYS[2], 'commits', 1)
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
local event = redis.call('HGET', KEYS[2], 'event')
at = 6
for _ = 1, tonumber(ARGV[5]) do
  local ms, number = string.match(event, '(%d+)-(%d+)')
  if now_ms > tonumber(ms) then event = string.format('%.0f-0', now_ms)
  else event = ms .. '-' .. (number + 1) end
  redis.call('XADD', ARGV[at], 'MAXLEN', '~', ARGV[4], event,
    'kind', ARGV[at + 1], 'body', ARGV[at + 2])
  at = at + 3
end
redis.call('HSET', KEYS[2], 'event', event)
while at <= #ARGV do
  local last = at + ARGV[at]
  redis.call(unpack(ARGV, at + 1, last))
  at = last + 1
end
return 1
"""

# KEYS: lease, meta and message stream of each job
# ARGV: group, worker, most messages of a job, size of bodies from which on no more are read and the
# jobs that follow are left out, token and generation of each job
# Returns the number of jobs that are not left out, and for each of them that has new messages its
# number and the messages, or the error that its keys lead to; none of those whose token or
# generation is not the present one, as who reads messages takes them from everybody else.
READ = """
local function unread(lease, meta, stream, token, generation, room)
  if redis.pcall('GET', lease) ~= token
      or redis.call('HGET', meta, 'generation') ~= generation then return end
  local messages, size = {}, 0
  while #messages < tonumber(ARGV[3]) and size < room do
    local answer = redis.call(
      'XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', 1, 'STREAMS', stream, '>')
    if not answer then break end
    messages[#messages + 1] = answer[1][2][1]
    size = size + #(messages[#messages][2][4] or '')
  end
  return messages, size
end
local found, size, job = {}, 0, 0
while job < #KEYS / 3 and size < tonumber(ARGV[4]) do
  job = job + 1
  local is_read, messages, more = pcall(unread, KEYS[3 * job - 2], KEYS[3 * job - 1], KEYS[3 * job],
    ARGV[2 * job + 3], ARGV[2 * job + 4], ARGV[4] - size)
  if not is_read then messages = type(messages) == 'table' and messages.err or messages end
  if is_read and messages then size = size + more end
  if messages and #messages > 0 then
    found[#found + 1] = {job, messages}
  end
end
return {job, found}
"""

# KEYS: lease, meta, message stream   ARGV: token, generation, group
# Makes the group of a stream that Redis has deleted, for the messages that came since; returns 0
# if the token or the generation is not the present one.
RESTORE_GROUP = """
if redis.pcall('GET', KEYS[1]) ~= ARGV[1]
    or redis.call('HGET', KEYS[2], 'generation') ~= ARGV[2] then return 0 end
redis.call('PERSIST', KEYS[2])
redis.call('XGROUP', 'CREATE', KEYS[3], ARGV[3], '0', 'MKSTREAM')
return 1
"""

# KEYS: meta, counts, status   ARGV: error (JSON)
# Counts and shows why a job is not worked on, as far as these keys can be written.
NOTE_ERROR = """
if redis.call('EXISTS', KEYS[1]) == 0 then return end
redis.pcall('HINCRBY', KEYS[2], 'errors', 1)
redis.pcall('HSET', KEYS[3], 'error', ARGV[1])
redis.pcall('HINCRBY', KEYS[1], 'edition:error', 1)
"""

# KEYS: lease, message stream   ARGV: token, group, worker
# Removes workers that have read no message beyond the saved state from the group, except the one
# that holds the lease. With a worker that reads meanwhile its messages would be forgotten: who took
# the job over would not find them.
REMOVE_IDLE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return end
for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[2], ARGV[2])) do
  local about = {}
  for at = 1, #consumer, 2 do about[consumer[at]] = consumer[at + 1] end
  if about.name ~= ARGV[3] and about.pending == 0 then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[2], ARGV[2], about.name)
  end
end
"""

# KEYS: lease   ARGV: token, time to live (ms; 0: release it)
# Returns 1 if the token was still that of the lease.
RENEW = """
if redis.pcall('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[2] == '0' then redis.call('DEL', KEYS[1])
else redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 1
"""

# KEYS: predictor   ARGV: its content, lifetime in seconds
KEEP_PREDICTOR = """
redis.call('DEL', KEYS[1])
return redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
"""

# Age in ms of the oldest request that may not have been stored, by the last reports of the API
# processes; -1 without one. A report ages as if its process hung since. One that is much older than
# the newest is of a process that is gone, and whose clients have turned to others; one of the
# future was made before the clock went back.
_API_DELAY = """
local function now_ms()
  local now = redis.call('TIME')
  return now[1] * 1000 + math.floor(now[2] / 1000)
end
local function api_delay_ms(apis)
  local reports, now, newest_ms, oldest_ms = redis.call('HGETALL', apis), now_ms(), 0, math.huge
  for at = 2, #reports, 2 do
    local reported_ms = tonumber(string.match(reports[at], '%d+$'))
    if reported_ms <= now + 5000 then newest_ms = math.max(newest_ms, reported_ms) end
  end
  for at = 2, #reports, 2 do
    local stored_ms, reported_ms = string.match(reports[at], '(%d+) (%d+)')
    reported_ms = tonumber(reported_ms)
    if newest_ms - reported_ms <= 30000 and reported_ms <= now + 5000 then
      oldest_ms = math.min(oldest_ms, tonumber(stored_ms))
    end
  end
  return newest_ms > 0 and math.max(0, now - oldest_ms) or -1
end
"""

API_DELAY = _API_DELAY + "return api_delay_ms(KEYS[1])"  # KEYS: apis

# KEYS: apis   ARGV: process, age of its oldest request (ms)
# A report is the time before which all requests of the process are stored, and that of the report.
REPORT_DELAY = (
    _API_DELAY
    + """
redis.call('HDEL', KEYS[1], ARGV[1])
local now = now_ms()
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f %.0f', now - ARGV[2], now))
local reports = redis.call('HGETALL', KEYS[1])
for at = 2, #reports, 2 do
  local age = now - string.match(reports[at], '%d+$')
  if age > 30000 or age < -5000 then
    redis.call('HDEL', KEYS[1], reports[at - 1])
  end
end
"""
)

# KEYS: apis, message streams
# Returns the delay of the API, then the age of the oldest message in each stream that no worker has
# read; all in ms, 0 without one.
LAGS = (
    _API_DELAY
    + """
local lags = {math.max(0, api_delay_ms(KEYS[1]))}
for index = 2, #KEYS do
  lags[index] = 0
  local group, read = redis.pcall('XINFO', 'GROUPS', KEYS[index])[1], '0-0'
  for at = 1, group and #group or 0, 2 do
    if group[at] == 'last-delivered-id' then read = group[at + 1] end
  end
  local unread = redis.pcall('XRANGE', KEYS[index], '(' .. read, '+', 'COUNT', 1)[1]
  if unread then
    local arrived_ms = tonumber(string.match(unread[1], '%d+'))
    lags[index] = math.max(0, now_ms() - arrived_ms)
  end
end
return lags
"""
)

# KEYS: workers, loads
# ARGV: worker, seconds without a report after which a worker counts as gone, JSON: load of each of
# its jobs
# By the clock of Redis, as those of hosts differ; a report of the future was made before that clock
# went back. What frees memory comes first, so that a full Redis does not refuse the rest.
REPORT_LOADS = """
local now = tonumber(redis.call('TIME')[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], 0, now - ARGV[2])
redis.call('ZREMRANGEBYSCORE', KEYS[1], now + 5, '+inf')
redis.call('ZADD', KEYS[1], now, ARGV[1])
for job, load in pairs(cjson.decode(ARGV[3])) do redis.call('HSET', KEYS[2], job, load) end
"""
