from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LaneState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LANE_STATE_UNSPECIFIED: _ClassVar[LaneState]
    LANE_STATE_STARTING: _ClassVar[LaneState]
    LANE_STATE_READY: _ClassVar[LaneState]
    LANE_STATE_BUSY: _ClassVar[LaneState]
    LANE_STATE_DRAINING: _ClassVar[LaneState]

class StepKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STEP_KIND_UNSPECIFIED: _ClassVar[StepKind]
    STEP_KIND_PREFILL: _ClassVar[StepKind]
    STEP_KIND_DECODE: _ClassVar[StepKind]
    STEP_KIND_BETWEEN: _ClassVar[StepKind]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]

class PrefixPlace(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PREFIX_PLACE_UNSPECIFIED: _ClassVar[PrefixPlace]
    PREFIX_PLACE_LIVE: _ClassVar[PrefixPlace]
    PREFIX_PLACE_PARKED: _ClassVar[PrefixPlace]
LANE_STATE_UNSPECIFIED: LaneState
LANE_STATE_STARTING: LaneState
LANE_STATE_READY: LaneState
LANE_STATE_BUSY: LaneState
LANE_STATE_DRAINING: LaneState
STEP_KIND_UNSPECIFIED: StepKind
STEP_KIND_PREFILL: StepKind
STEP_KIND_DECODE: StepKind
STEP_KIND_BETWEEN: StepKind
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_ERROR: FinishReason
PREFIX_PLACE_UNSPECIFIED: PrefixPlace
PREFIX_PLACE_LIVE: PrefixPlace
PREFIX_PLACE_PARKED: PrefixPlace

class HelloRequest(_message.Message):
    __slots__ = ("protocol_version",)
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    def __init__(self, protocol_version: _Optional[int] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("protocol_version", "lane", "incarnation", "pid", "device", "model", "status")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    lane: str
    incarnation: bytes
    pid: int
    device: str
    model: ModelInfo
    status: LaneStatus
    def __init__(self, protocol_version: _Optional[int] = ..., lane: _Optional[str] = ..., incarnation: _Optional[bytes] = ..., pid: _Optional[int] = ..., device: _Optional[str] = ..., model: _Optional[_Union[ModelInfo, _Mapping]] = ..., status: _Optional[_Union[LaneStatus, _Mapping]] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "architecture", "fingerprint", "vocab_size", "context_tokens", "eos_ids", "expert_format", "region_bytes", "max_output_tokens", "visitor_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_IDS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    REGION_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VISITOR_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    architecture: str
    fingerprint: bytes
    vocab_size: int
    context_tokens: int
    eos_ids: _containers.RepeatedScalarFieldContainer[int]
    expert_format: str
    region_bytes: int
    max_output_tokens: int
    visitor_tokens: int
    def __init__(self, name: _Optional[str] = ..., architecture: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., vocab_size: _Optional[int] = ..., context_tokens: _Optional[int] = ..., eos_ids: _Optional[_Iterable[int]] = ..., expert_format: _Optional[str] = ..., region_bytes: _Optional[int] = ..., max_output_tokens: _Optional[int] = ..., visitor_tokens: _Optional[int] = ...) -> None: ...

class LaneStatus(_message.Message):
    __slots__ = ("state", "counters", "active_request_id", "stamp_ns", "step", "step_times", "decode_times", "resident_sequences", "prefix_sequence", "request_ids", "cached_experts", "layer_experts")
    STATE_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STAMP_NS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMES_FIELD_NUMBER: _ClassVar[int]
    DECODE_TIMES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    LAYER_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    state: LaneState
    counters: Counters
    active_request_id: str
    stamp_ns: int
    step: RunningStep
    step_times: _containers.RepeatedCompositeFieldContainer[StepTimes]
    decode_times: _containers.RepeatedCompositeFieldContainer[DecodeTimes]
    resident_sequences: int
    prefix_sequence: int
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    cached_experts: _containers.RepeatedScalarFieldContainer[int]
    layer_experts: int
    def __init__(self, state: _Optional[_Union[LaneState, str]] = ..., counters: _Optional[_Union[Counters, _Mapping]] = ..., active_request_id: _Optional[str] = ..., stamp_ns: _Optional[int] = ..., step: _Optional[_Union[RunningStep, _Mapping]] = ..., step_times: _Optional[_Iterable[_Union[StepTimes, _Mapping]]] = ..., decode_times: _Optional[_Iterable[_Union[DecodeTimes, _Mapping]]] = ..., resident_sequences: _Optional[int] = ..., prefix_sequence: _Optional[int] = ..., request_ids: _Optional[_Iterable[str]] = ..., cached_experts: _Optional[_Iterable[int]] = ..., layer_experts: _Optional[int] = ...) -> None: ...

class RunningStep(_message.Message):
    __slots__ = ("kind", "started_ns", "progress_ns", "p99_ns")
    KIND_FIELD_NUMBER: _ClassVar[int]
    STARTED_NS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_NS_FIELD_NUMBER: _ClassVar[int]
    P99_NS_FIELD_NUMBER: _ClassVar[int]
    kind: StepKind
    started_ns: int
    progress_ns: int
    p99_ns: int
    def __init__(self, kind: _Optional[_Union[StepKind, str]] = ..., started_ns: _Optional[int] = ..., progress_ns: _Optional[int] = ..., p99_ns: _Optional[int] = ...) -> None: ...

class StepTimes(_message.Message):
    __slots__ = ("kind", "count", "p99_ns")
    KIND_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    P99_NS_FIELD_NUMBER: _ClassVar[int]
    kind: StepKind
    count: int
    p99_ns: int
    def __init__(self, kind: _Optional[_Union[StepKind, str]] = ..., count: _Optional[int] = ..., p99_ns: _Optional[int] = ...) -> None: ...

class DecodeTimes(_message.Message):
    __slots__ = ("rows", "windows", "mean_ns")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    MEAN_NS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    windows: int
    mean_ns: int
    def __init__(self, rows: _Optional[int] = ..., windows: _Optional[int] = ..., mean_ns: _Optional[int] = ...) -> None: ...

class Counters(_message.Message):
    __slots__ = ("requests", "prompt_tokens", "generated_tokens", "windows", "expert_hits", "expert_misses", "expert_hit_bytes", "expert_miss_bytes", "cache_admissions", "cache_evictions", "cache_used_bytes", "cache_budget_bytes", "cancelled", "failed", "prefill_ns", "decode_ns", "ngram_rows", "ngram_cache_hits", "ngram_prefetch_hits", "ngram_read_bytes", "ngram_wait_ns", "cache_admitted_hits", "decode_windows", "drafts_at_1", "drafts_at_2", "drafts_at_3", "drafts_right_at_1", "drafts_right_at_2", "drafts_right_at_3", "reused_tokens", "checkpoints", "state_used_bytes", "state_budget_bytes", "parks", "park_bytes", "park_ns", "restores", "restore_ns", "restores_refused", "prompt_choices", "replaced_choices", "expert_cpu_bytes", "visits", "streamed_bytes", "streaming_ns", "stream_wait_ns", "ahead_tokens", "window_tokens")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_HITS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_MISSES_FIELD_NUMBER: _ClassVar[int]
    EXPERT_HIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPERT_MISS_BYTES_FIELD_NUMBER: _ClassVar[int]
    CACHE_ADMISSIONS_FIELD_NUMBER: _ClassVar[int]
    CACHE_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    CACHE_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CACHE_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_NS_FIELD_NUMBER: _ClassVar[int]
    NGRAM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NGRAM_CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
    NGRAM_PREFETCH_HITS_FIELD_NUMBER: _ClassVar[int]
    NGRAM_READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    NGRAM_WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    CACHE_ADMITTED_HITS_FIELD_NUMBER: _ClassVar[int]
    DECODE_WINDOWS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_AT_1_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_AT_2_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_AT_3_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_RIGHT_AT_1_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_RIGHT_AT_2_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_RIGHT_AT_3_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    STATE_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARKS_FIELD_NUMBER: _ClassVar[int]
    PARK_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARK_NS_FIELD_NUMBER: _ClassVar[int]
    RESTORES_FIELD_NUMBER: _ClassVar[int]
    RESTORE_NS_FIELD_NUMBER: _ClassVar[int]
    RESTORES_REFUSED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_CHOICES_FIELD_NUMBER: _ClassVar[int]
    REPLACED_CHOICES_FIELD_NUMBER: _ClassVar[int]
    EXPERT_CPU_BYTES_FIELD_NUMBER: _ClassVar[int]
    VISITS_FIELD_NUMBER: _ClassVar[int]
    STREAMED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STREAMING_NS_FIELD_NUMBER: _ClassVar[int]
    STREAM_WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    AHEAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    requests: int
    prompt_tokens: int
    generated_tokens: int
    windows: int
    expert_hits: int
    expert_misses: int
    expert_hit_bytes: int
    expert_miss_bytes: int
    cache_admissions: int
    cache_evictions: int
    cache_used_bytes: int
    cache_budget_bytes: int
    cancelled: int
    failed: int
    prefill_ns: int
    decode_ns: int
    ngram_rows: int
    ngram_cache_hits: int
    ngram_prefetch_hits: int
    ngram_read_bytes: int
    ngram_wait_ns: int
    cache_admitted_hits: int
    decode_windows: int
    drafts_at_1: int
    drafts_at_2: int
    drafts_at_3: int
    drafts_right_at_1: int
    drafts_right_at_2: int
    drafts_right_at_3: int
    reused_tokens: int
    checkpoints: int
    state_used_bytes: int
    state_budget_bytes: int
    parks: int
    park_bytes: int
    park_ns: int
    restores: int
    restore_ns: int
    restores_refused: int
    prompt_choices: int
    replaced_choices: int
    expert_cpu_bytes: int
    visits: int
    streamed_bytes: int
    streaming_ns: int
    stream_wait_ns: int
    ahead_tokens: int
    window_tokens: int
    def __init__(self, requests: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., windows: _Optional[int] = ..., expert_hits: _Optional[int] = ..., expert_misses: _Optional[int] = ..., expert_hit_bytes: _Optional[int] = ..., expert_miss_bytes: _Optional[int] = ..., cache_admissions: _Optional[int] = ..., cache_evictions: _Optional[int] = ..., cache_used_bytes: _Optional[int] = ..., cache_budget_bytes: _Optional[int] = ..., cancelled: _Optional[int] = ..., failed: _Optional[int] = ..., prefill_ns: _Optional[int] = ..., decode_ns: _Optional[int] = ..., ngram_rows: _Optional[int] = ..., ngram_cache_hits: _Optional[int] = ..., ngram_prefetch_hits: _Optional[int] = ..., ngram_read_bytes: _Optional[int] = ..., ngram_wait_ns: _Optional[int] = ..., cache_admitted_hits: _Optional[int] = ..., decode_windows: _Optional[int] = ..., drafts_at_1: _Optional[int] = ..., drafts_at_2: _Optional[int] = ..., drafts_at_3: _Optional[int] = ..., drafts_right_at_1: _Optional[int] = ..., drafts_right_at_2: _Optional[int] = ..., drafts_right_at_3: _Optional[int] = ..., reused_tokens: _Optional[int] = ..., checkpoints: _Optional[int] = ..., state_used_bytes: _Optional[int] = ..., state_budget_bytes: _Optional[int] = ..., parks: _Optional[int] = ..., park_bytes: _Optional[int] = ..., park_ns: _Optional[int] = ..., restores: _Optional[int] = ..., restore_ns: _Optional[int] = ..., restores_refused: _Optional[int] = ..., prompt_choices: _Optional[int] = ..., replaced_choices: _Optional[int] = ..., expert_cpu_bytes: _Optional[int] = ..., visits: _Optional[int] = ..., streamed_bytes: _Optional[int] = ..., streaming_ns: _Optional[int] = ..., stream_wait_ns: _Optional[int] = ..., ahead_tokens: _Optional[int] = ..., window_tokens: _Optional[int] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "seed", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    seed: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    min_tokens: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., min_tokens: _Optional[int] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "prompt_ids", "max_tokens", "sampling", "stop_ids", "logprobs", "top_logprobs", "replayed_tokens", "checkpoint_positions", "tenant_salt", "grammar", "interrupts", "alone_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    INTERRUPTS_FIELD_NUMBER: _ClassVar[int]
    ALONE_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    sampling: Sampling
    stop_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: bool
    top_logprobs: int
    replayed_tokens: int
    checkpoint_positions: _containers.RepeatedScalarFieldContainer[int]
    tenant_salt: bytes
    grammar: str
    interrupts: str
    alone_ms: int
    def __init__(self, request_id: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., stop_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[bool] = ..., top_logprobs: _Optional[int] = ..., replayed_tokens: _Optional[int] = ..., checkpoint_positions: _Optional[_Iterable[int]] = ..., tenant_salt: _Optional[bytes] = ..., grammar: _Optional[str] = ..., interrupts: _Optional[str] = ..., alone_ms: _Optional[int] = ...) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("accepted", "tokens", "finished")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    tokens: TokenChunk
    finished: Finished
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., tokens: _Optional[_Union[TokenChunk, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("stamp_ns",)
    STAMP_NS_FIELD_NUMBER: _ClassVar[int]
    stamp_ns: int
    def __init__(self, stamp_ns: _Optional[int] = ...) -> None: ...

class TokenChunk(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    def __init__(self, tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("id", "stamp_ns", "logprob", "top")
    ID_FIELD_NUMBER: _ClassVar[int]
    STAMP_NS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    id: int
    stamp_ns: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, id: _Optional[int] = ..., stamp_ns: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("id", "logprob")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "completion_tokens", "restored_tokens", "draft_tokens", "accepted_draft_tokens", "prompt_choices", "replaced_choices", "waited_windows", "approximations")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESTORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_CHOICES_FIELD_NUMBER: _ClassVar[int]
    REPLACED_CHOICES_FIELD_NUMBER: _ClassVar[int]
    WAITED_WINDOWS_FIELD_NUMBER: _ClassVar[int]
    APPROXIMATIONS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    restored_tokens: int
    draft_tokens: int
    accepted_draft_tokens: int
    prompt_choices: int
    replaced_choices: int
    waited_windows: int
    approximations: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., restored_tokens: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_draft_tokens: _Optional[int] = ..., prompt_choices: _Optional[int] = ..., replaced_choices: _Optional[int] = ..., waited_windows: _Optional[int] = ..., approximations: _Optional[_Iterable[str]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "usage", "counters", "error_code", "error_message")
    REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    usage: Usage
    counters: Counters
    error_code: str
    error_message: str
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., counters: _Optional[_Union[Counters, _Mapping]] = ..., error_code: _Optional[str] = ..., error_message: _Optional[str] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class CancelReply(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: _Optional[bool] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefixesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefixEvent(_message.Message):
    __slots__ = ("sequence", "snapshot", "complete", "added", "removed")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    snapshot: bool
    complete: bool
    added: _containers.RepeatedCompositeFieldContainer[Prefix]
    removed: _containers.RepeatedCompositeFieldContainer[Prefix]
    def __init__(self, sequence: _Optional[int] = ..., snapshot: _Optional[bool] = ..., complete: _Optional[bool] = ..., added: _Optional[_Iterable[_Union[Prefix, _Mapping]]] = ..., removed: _Optional[_Iterable[_Union[Prefix, _Mapping]]] = ...) -> None: ...

class Prefix(_message.Message):
    __slots__ = ("chain", "tokens", "place")
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    chain: bytes
    tokens: int
    place: PrefixPlace
    def __init__(self, chain: _Optional[bytes] = ..., tokens: _Optional[int] = ..., place: _Optional[_Union[PrefixPlace, str]] = ...) -> None: ...
