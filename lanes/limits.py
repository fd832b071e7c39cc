"""Every bound of a lane in one table: nothing here is configurable, everything is tested at the limit and past it."""

from __future__ import annotations

PROTOCOL_VERSION = 1

# requests
MAX_REQUEST_ID_CHARACTERS = 64
MAX_STOP_IDS = 128  # a client's 64, and the ends of model and format
MAX_TOP_LOGPROBS = 20
MAX_TEMPERATURE = 100.0
MAX_REPETITION_PENALTY = 100.0
MAX_PENALTY = 2.0  # presence and frequency, either sign
MAX_BIAS = 100.0
MAX_LOGIT_BIASES = 300

# options
MAX_PREFILL_CHUNK_ROWS = 8192
DEFAULT_PREFILL_CHUNK_ROWS = 256
DEFAULT_CONTEXT_TOKENS = 32768
DEFAULT_NGRAM_CACHE_BYTES = 64 << 20
MAX_SOCKET_PATH_BYTES = 107

# state
MAX_CHECKPOINT_HINTS = 64  # of a request
MAX_TENANT_SALT_BYTES = 64
MAX_GRAMMAR_BYTES = 1 << 20
MAX_GRAMMAR_SYMBOLS = 20_000  # as the library counts: a compilation takes most of a second there, ten at 67,000
GRAMMAR_COMPILE_S = 3.0  # waited for after the prompt was read
GRAMMAR_LOOK_S = 0.02  # a cancel is seen that often meanwhile
MAX_TOKENIZER_BYTES = 1 << 28  # of the pack, for grammars
MAX_RESIDENTS = 256  # conversations in a lane's memory
MAX_CHECKPOINTS = 32  # of one conversation; the ones that save the fewest tokens give way
PREFIXES = 1 << 16  # that a lane tells of; the ones it knows longest are left out first
PREFIX_NEWS = 1024  # changes kept for readers that are behind
PREFIXES_PER_EVENT = 4096
PAGE_TOKENS = 256  # of a parked conversation: whole ones are copied once
LEAST_PARKED_TOKENS = 64  # shorter conversations are read again
PARK_BYTES_PER_STEP = 8 << 20  # copied between two windows, at most about that much
MOST_INHERITED = 24  # checkpoints that a conversation has in the pool only
MOST_HEADER_BYTES = 16 << 20
PARK_RETRY_S = 5.0  # after the pool was full or its owner away
PARK_POLL_S = 0.4
IDLE_S = 0.5  # a lane without work looks around that often
CHECKPOINT_EVERY_TOKENS = 4096
CHECKPOINT_GAP_TOKENS = 256  # between hints, at least (half a chunk, if longer): each one ends a window early
DEFAULT_STATE_BYTES = 512 << 20

# the wire
MAX_RECEIVE_BYTES = 8 << 20
MAX_METADATA_BYTES = 8 << 10
MAX_STREAMS_PER_CONNECTION = 128
MAX_CONCURRENT_CALLS = 512
# A client that is gone or frozen is noticed after at most the sum of these two (5 s is the promise).
KEEPALIVE_TIME_MS = 1000
KEEPALIVE_TIMEOUT_MS = 3000
# Without these two, gRPC buffers over 100,000 token messages for a client that stopped reading.
LOOKAHEAD_BYTES = 64 << 10
MIN_CLIENT_PING_INTERVAL_MS = 500

# the stream of one generation
OUTBOX_TOKENS = 1024
CHUNK_TOKENS = 256
SLOW_READER_S = 3.0
WATCH_INTERVAL_S = 0.5

# the end of the process
DRAIN_S = 30.0
FLUSH_S = 2.0  # for the last event of a stream to reach its reader
STOP_GRACE_S = 0.5

# start
REGION_ATTACH_S = 600.0
REGION_WAIT_LOG_S = 2.0
MEASURING_WAIT_S = 15.0  # for other lanes of the host that time themselves; then a lane does beside them

# drafts
MAX_DRAFTS = 3  # tokens guessed ahead of one pass
MAX_WINDOW_TOKENS = 1 + MAX_DRAFTS  # rows of a decode window: one token that is certain, and drafts
DRAFT_VOCABULARY_BYTES = 32 << 20  # of its file

# experts
SCRATCH_BYTES = 64 << 20  # unweighted expert rows of one kernel call
# Copied into the cache between two windows, at most. On a CPU lane a copy from RAM to RAM makes nothing faster: this
# much costs about a millisecond and keeps budget, policy and counters real.
SWAP_BYTES_PER_WINDOW = 8 << 20
RING_SLOTS = 64  # of a GPU lane's cache, borrowed while a prompt's window runs, at least
MAX_RING_SLOTS = 512  # at most: 1.4 GB of the true model
PROMPT_PLACES = 8192  # (row, expert) pairs of one batch there: scratch for their rows
GPU_SWAP_BYTES_PER_WINDOW = 64 << 20  # beside the windows: 1.3 ms of a link of 51 GB/s

# profiles of hot experts
MAX_PROFILES = 256  # read at a start; the first by name
PROFILE_EVERY_S = 60.0  # written that often while a lane works, and at its end

# GPU lanes
CUDA_CONTEXT_BYTES = 912 << 20  # of a budget: the context, kernels, captured graphs, what cuBLAS takes
CUDA_WORKSPACE_BYTES = 640 << 20  # of a budget: what eager passes take in slices of bounded size, and fragments
PROMPT_ROWS_IN_PLACE = 1024  # of a pass whose activations have memory of their own; of more the expert cache lends it
VRAM_RESERVE_BYTES = 256 << 20  # of a budget: never used
HANDSHAKE_S = 10.0  # a doorbell that does not ring, or a second later a thread that does not answer, ends the lane

# routing traces
TRACE_BYTES = 1 << 30
MAX_TRACE_LAYERS = 1040  # of a pack: decoder and draft layers
MAX_TRACE_EXPERTS = (1 << 16) - 1  # per layer
MAX_TRACE_ROWS = (1 << 16) - 1
