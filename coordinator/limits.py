"""Every bound of the coordinator in one table. Values only: no code, no defaults elsewhere.

Each request limit is inclusive: the value is accepted, one more is refused (tested at limit and limit + 1).
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20

# --- A request, whatever its door -------------------------------------------------------------------------------------
BODY_BYTES: Final = 8 * MIB
JSON_DEPTH: Final = 32
MESSAGES: Final = 4096
STOPS: Final = 16
STOP_BYTES: Final = 256  # of one stop string, in UTF-8
STOP_IDS: Final = 64
CHECKPOINT_HINTS: Final = 64  # beginnings of messages that a lane is told of
TOP_LOGPROBS: Final = 20
TEMPERATURE_MAX: Final = 2.0
TOP_K_MAX: Final = 1_000_000
REPETITION_PENALTY_MIN: Final = 0.009999999776482582  # 0.01 as gRPC's fp32 has it
REPETITION_PENALTY_MAX: Final = 100.0
PENALTY_MAX: Final = 2.0  # presence and frequency; their least is its negative
BIAS_MAX: Final = 100.0  # the same
LOGIT_BIASES: Final = 300
END_IDS: Final = 16  # of the pack's generation_config.json
GENERATION_CONFIG_BYTES: Final = 64 * KIB
MAX_TOKENS_MAX: Final = (1 << 31) - 1  # anything up to it is cut to what the context leaves
SESSION_CHARS: Final = 256
CLIENT_REQUEST_ID_CHARS: Final = 128

DEFAULT_MAX_TOKENS: Final = 4096  # or what the context leaves, if that is less
DEFAULT_MAX_TOKENS_COMPLETIONS: Final = 16  # the default of the OpenAI completions endpoint
DEFAULT_MAX_TOKENS_RESPONSES: Final = 32_768  # Codex names no limit, and takes a cut answer for an error

TIMEOUT_MAX_S: Final = 86_400.0  # that a client may give its request from queue to end
DEFAULT_TIMEOUT_S: Final = 3600.0

# --- Tenants ----------------------------------------------------------------------------------------------------------
TENANTS: Final = 4096
TENANT_KEYS: Final = 64
TENANTS_FILE_BYTES: Final = 4 * MIB

# --- Queue and placement ----------------------------------------------------------------------------------------------
QUEUE_REQUESTS: Final = 256
QUEUE_TENANT_REQUESTS: Final = 32  # of one tenant, unless its entry says otherwise
QUEUE_BYTES: Final = 256 * MIB  # of memory that waiting requests take
TOKEN_BYTES: Final = 40  # of one waiting prompt token: a Python integer and the references to it
AGEING_S: Final = 30.0  # of waiting make a request's class one better
DEFAULT_PREFILL_TOKENS_PER_S: Final = 1000.0  # of a lane, while none was measured
DEFAULT_DECODE_TOKENS_PER_S: Final = 20.0
DEFAULT_OUTPUT_TOKENS: Final = 256
LOOKAHEAD: Final = 32  # requests that are looked at for a free lane, in fair order
PASSING: Final = 4.0  # times the work that another lane would cost it, a request lets others pass
COLD_COST: Final = 0.5  # what work on a lane with a cold expert cache costs more
WARM_TOKENS: Final = 2000  # that a new lane has computed when its cache is warm
KNOWN_PREFIXES: Final = 10_000  # of one lane
PARKED_WORTH: Final = 0.9  # of a token that has to be fetched from the host's pool, against one that the lane has
SHARE_CREDIT: Final = 4000.0  # tokens that a tenant who asks rarely may be owed: its burst goes before who always asks
SHARE_ACCOUNTS: Final = 4096  # tenants, and sessions of one tenant, whose tokens are remembered
LANE_CAPACITY: Final = 1  # running generations per lane
VISIT_WORK: Final = 0.25  # a request interrupts another's reading when it takes at most this part of what it would wait
VISITS: Final = 0.5  # all visits together have the lane alone for at most that many times what the reading takes
VISIT_ALONE: Final = 2.0  # times what it is expected to take, a visitor has the lane alone; then both run by turns
VISIT_HOSTS: Final = 4  # readings that a waiting request may choose from: those that will take longest
AFFINITY_SESSIONS: Final = 65_536
REPLAYS: Final = 2  # lanes that may be lost under a request before it fails
BUFFERED_TOKENS: Final = 1024  # chosen by the lane and not yet taken by the door: more means a reader that has stopped
STREAM_BUFFER_BYTES: Final = 64 * KIB  # of an event stream that its client has not taken, in the kernel

# --- Time -------------------------------------------------------------------------------------------------------------
CANCEL_CONFIRM_S: Final = 5.0  # a lane that has not confirmed a cancel by then is suspect
CANCEL_RETRY_S: Final = 0.02  # a cancel can overtake its own Generate on the wire: asked again until found
BUSY_PAUSE_S: Final = 0.05  # before a lane that said "busy" is asked again; doubles up to the next line
BUSY_PAUSE_MAX_S: Final = 1.0
LOST_PROBE_S: Final = 0.25  # how often a lane whose stream broke is asked whether it still lives
CALL_TIMEOUT_S: Final = 5.0  # Hello, Cancel, Drain
KEEPALIVE_COMMENT_S: Final = 10.0  # SSE comment while nothing else is sent
BODY_READ_S: Final = 30.0
IDLE_CONNECTION_S: Final = 75.0
WRITE_STALL_S: Final = 30.0  # a client that takes nothing for that long is cut off
RETRY_AFTER_S: Final = 1  # what a refused client is told to wait, when nobody knows better
RETRY_AFTER_MAX_S: Final = 60.0
DOOR_CLOSE_S: Final = 5.0  # cancelled requests get that long to end when the doors close
GRPC_CLOSE_S: Final = 1.0  # then calls that never end (health watches) get that long

# --- Fleet: when processes start again, when a lane is given up -------------------------------------------------------
BACKOFF_FIRST_S: Final = 0.5  # before a restart; doubles up to the next line
BACKOFF_MAX_S: Final = 30.0
STABLE_S: Final = 60.0  # a process that lived that long begins with the first backoff again
CRASH_WINDOW_S: Final = 600.0
CRASHES_TO_QUARANTINE: Final = 3  # inside the window
LANE_SUSPECT_S: Final = 5.0  # without a sign of life, or without progress of a step: no new work
LANE_KILL_S: Final = 15.0  # without either: killed and started again
LANE_START_S: Final = 600.0  # without a first answer, once the region can be had: killed and started again
SUSPECT_STEPS: Final = 10.0  # a step may stand still for that many times what its kind takes (p99), if that is longer
KILL_STEPS: Final = 20.0
OWN_STALL_S: Final = 2.0  # between two looks at the clock: we slept, so the lanes' silence says nothing
COORDINATOR_STOP_S: Final = 10.0  # beyond its drain: DOOR_CLOSE_S, GRPC_CLOSE_S and the exit; then SIGKILL
LANE_STOP_S: Final = 35.0  # a lane's own drain (30 s), last words (2 s), close (0.5 s) and exit; then SIGKILL
OWNER_STOP_S: Final = 5.0
PING_S: Final = 1.0  # between two questions of the supervisor to the coordinator
PING_TIMEOUT_S: Final = 2.0
COORDINATOR_SILENT_S: Final = 15.0  # without an answer: killed and started again
COORDINATOR_START_S: Final = 120.0  # before its first answer
FLEET_FILE_BYTES: Final = MIB
STOP_GRACE_MAX_S: Final = 60.0  # that anybody may ask of the supervisor
FLEET_TICK_S: Final = 0.1
PREFIXES_RETRY_S: Final = 1.0  # between two calls of a lane's Prefixes
OPERATION_LOOK_S: Final = 0.1  # how often an operation looks whether a lane is idle, or back
LANE_RETRY_S: Final = 0.1  # between two attempts to say hello
SUPERVISOR_RETRY_S: Final = 0.5
RUN_FILE_RETRY_S: Final = 5.0  # until a cluster.json that could not be written is tried again
OWNER_ASK_S: Final = 1.0  # between two questions to the owner; LANE_SUSPECT_S and LANE_KILL_S hold for its silence too

# --- Other hosts ------------------------------------------------------------------------------------------------------
HOSTS: Final = 64  # that have joined
IDENTITY_BYTES: Final = 64 * KIB  # of a host's file of key and certificates
REVOKED_BYTES: Final = 64 * KIB  # of the list of certificates that count no longer: 600 of them
JOIN_BYTES: Final = 4 * KIB  # of a message of a host
JOIN_S: Final = 1.0  # between two words of a host to the coordinator
HOST_SILENT_S: Final = LANE_KILL_S  # without one, or without its supervisor's answer: its lanes are dead
HOST_FORGET_S: Final = 3600.0  # after that its dead lanes are no longer shown
GATE_BUFFER_BYTES: Final = 64 * KIB
GATE_HANDSHAKE_S: Final = 5.0
GATE_CLOSE_S: Final = 1.0
GATE_SILENT_S: Final = 5.0  # of the coordinator's host, in TCP: then its generations are orphans

# --- Text -------------------------------------------------------------------------------------------------------------
INLINE_ENCODE_CHARS: Final = 4096  # longer texts are encoded in a worker thread
SMALL_BODY_BYTES: Final = 4 * KIB  # read and parsed before there is known to be room: 30 µs, and its mistakes are told
INLINE_PARSE_BYTES: Final = 64 * KIB  # larger bodies are parsed in a worker thread
INLINE_PROMPT_TOKENS: Final = 8192  # longer prompts are checked and chained in a worker thread: 100,000 take 6 ms
TEXT_THREADS: Final = 2
CHAT_TEMPLATE_BYTES: Final = MIB  # of the file that tells the chat format
TOOLS: Final = 1024
GRAMMAR_BYTES: Final = MIB  # schemas of one request, and what stands around them
SCHEMA_LEVELS: Final = 1024  # of a schema and all that it refers to, added up: 1,900 overflow a stack of 8 MiB
SCHEMA_PATTERNS: Final = 8  # that one value has to match: at 22 a compilation takes seconds, at 50 for ever
SCHEMA_STEPS: Final = 100_000  # of looking for them
SCHEMA_PROPERTIES: Final = 2000  # of one schema: a compilation's time grows with their square, half a second here
GRAMMAR_SYMBOLS: Final = 20_000  # as the library counts; a lane refuses more
TOOL_NAME_CHARS: Final = 128
TOKENIZER_FILE_BYTES: Final = 256 * MIB
TOKENIZER_IDS: Final = 1 << 24  # every id is below: a table of that many entries is kept

# --- gRPC -------------------------------------------------------------------------------------------------------------
GRPC_MESSAGE_BYTES: Final = 8 * MIB
GRPC_METADATA_BYTES: Final = 8 * KIB
GRPC_STREAMS_PER_CONNECTION: Final = 128
GRPC_CALLS: Final = 512
GRPC_OTHER_CALLS: Final = 32  # of these, of each of six methods that make no answer: 320 places are for answers
GRPC_PING_S: Final = 30.0  # a connection that was silent that long is asked whether it lives
GRPC_PING_TIMEOUT_S: Final = 20.0  # without an answer: its calls are cancelled, their lanes free
GRPC_CLIENT_PING_S: Final = 10.0  # clients that ask more often than that, without a call, are cut off

# --- The page and traces ----------------------------------------------------------------------------------------------
PAGE_SUBSCRIBERS: Final = 16  # that watch it live
PAGE_SAMPLES: Final = 61  # of counters, for rates and curves
PAGE_SAMPLE_S: Final = 1.0  # between two of them
PAGE_RATE_S: Final = 5.0  # a rate is over that long
PAGE_PAUSE_S: Final = 0.1  # at least, between two events of a stream
PAGE_RECENT_S: Final = 300.0  # a typical first token is of those of that long
PAGE_FAILURES: Final = 20  # the latest requests that failed
PAGE_FIRST_TOKENS: Final = 256  # the latest ones
PAGE_CHANGES: Final = 20  # the latest of lanes' states
PAGE_CONVERSATIONS: Final = 32  # sessions that asked last, with where their prompts are kept
PAGE_LAYERS: Final = 256  # of a lane's cache, one cell each
PAGE_QUEUE_ROWS: Final = 32  # of tenants' sessions that wait; the others are counted
PAGE_NAME_CHARS: Final = 40  # of a session's name
TRACE_STAMPS: Final = 1 << 16  # of one request's tokens; later ones have none
TRACE_WAITING: Final = 1024  # lines for the disk; more are lost
TRACE_FILE_BYTES: Final = 64 * MIB  # then another file
TRACE_FILES: Final = 8  # the newest are kept
