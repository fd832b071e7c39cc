"""How large anything may be that is read from a file, in one table.

Every number is a refusal, not a promise: far above what a true model needs, far below what hurts the reader.
"""

from __future__ import annotations

# --- JSON and msgpack -------------------------------------------------------------------------------------------
CONFIG_BYTES = 1 << 20
INDEX_BYTES = 64 << 20
MANIFEST_BYTES = 16 << 20
NESTING = 16
NODES = 200_000  # values in one parsed document that is kept

# --- safetensors ------------------------------------------------------------------------------------------------
HEADER_BYTES = 100_000_000
TENSORS = 200_000
DIMENSIONS = 4
TENSOR_NAME_BYTES = 256
SHARDS = 900  # all are open at once

# --- model sizes ------------------------------------------------------------------------------------------------
VOCABULARY = 1 << 24
WIDTH = 1 << 20  # any one dimension of a weight
HIDDEN = 1 << 16
LAYERS = 1024
DRAFT_LAYERS = 16
EXPERTS = 1 << 16
NGRAM_ROWS = 1 << 40
NGRAM_HEADS = 256

# --- packs ------------------------------------------------------------------------------------------------------
SECTIONS = 4096
SECTION_BYTES = 1 << 46
FILE_NAME_BYTES = 128
EXTRA_FILE_BYTES = 256 << 20
EXTRA_FILES = 32

DAMAGE_RECORD_BYTES = 16 << 10  # of what an owner found; a longer record is none

# --- golden record ----------------------------------------------------------------------------------------------
GOLDEN_BYTES = 1 << 20
GOLDEN_TOKENS = 64
GOLDEN_EXPERTS = 128
GOLDEN_TOP = 16

# --- working memory of the converter ----------------------------------------------------------------------------
BLOCK_BYTES = 4 << 20  # of source bytes, per step of a stream

# --- park pool --------------------------------------------------------------------------------------------------
PARK_SEGMENT_BYTES = 256 << 10
PARK_LEAST_BYTES = 1 << 30  # of a pool whose size nobody told
PARK_SHARE = 8  # such a pool is one part of so many of what is free beside the region
PARK_ENTRIES = 4096  # parked conversations
PARK_BLOBS = 8192  # parts of one conversation: pages, checkpoints, header
PARK_MARKS = 64  # places where one conversation can be taken up
PARK_REMOVALS = 4096  # remembered for lanes that are behind
PARK_MARKS_PER_REPLY = 1024
PARK_BLOBS_PER_MESSAGE = 256
PARK_MESSAGE_BYTES = 128 << 10
PARK_CONNECTIONS = 64
PARK_POOL_BYTES = 1 << 46
PARK_DISK_AGE_S = 7 * 86400.0
