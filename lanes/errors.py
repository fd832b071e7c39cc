"""The errors of a lane, drawn, and the one table from a code to its gRPC status:

    LaneError                        code                     retryable
    ├── ConfigError                  bad_config               no    an option is refused; the process exits 64
    ├── StartError                   start_failed             no    pack, region or self-test; the process exits 65
    │   ├── SelfTestFailed           self_test_failed         no    a fixed question got a wrong answer
    │   ├── NativeKernelUnavailable  no_native_kernel         no    not built, or not for this CPU: says what to do
    │   ├── CudaUnavailable          no_cuda                  no    no GPU, driver or CUDA torch: says what to look at
    │   ├── VramTooSmall             vram_too_small           no    the budget holds no lane: says what needs how much
    │   └── HostMemoryTooSmall       host_memory_too_small    no    the host has no room for what a GPU lane holds there
    ├── RequestError                 bad_request              no    refused before Accepted; never the lane's fault
    │   ├── EmptyPrompt              empty_prompt
    │   ├── ContextExceeded          context_length_exceeded
    │   ├── TokenOutOfRange          token_out_of_range
    │   ├── BadSampling              bad_sampling
    │   ├── BadGrammar               bad_grammar              no    also while it runs: its bounds were exceeded
    │   └── TooManyStopIds           too_many_stop_ids
    ├── TraceRefused             bad_trace                no    a file is no routing trace
    ├── BadProtocolVersion           bad_protocol_version     no
    ├── Busy                         busy                     yes   a generation is running
    ├── Draining                     draining                 yes   the lane takes nothing new
    ├── SlowReader                   slow_reader              no    the client stopped reading its stream
    ├── NonFiniteLogits              non_finite_logits        yes   ends the request, then the process (exit 70)
    └── EngineFailed                 engine_failed            yes   ends the request, then the process (exit 70)
        ├── GpuFailed                gpu_failed               yes   a call of the CUDA driver failed
        ├── HandshakeLost            handshake_lost           yes   the GPU and the CPU's share of experts lost touch
        ├── NativeKernelFailed       native_kernel_failed     yes   the expert kernel ran out of memory or threads
        └── TableReadFailed          table_read_failed        yes   rows of an n-gram table cannot be read from disk

Messages say what was wrong with the request; they never hold a path, an address or a prompt.
"""

from __future__ import annotations

import grpc

ERROR_CODE_METADATA = "expressway-error-code"

EXIT_CONFIG = 64
EXIT_START = 65
EXIT_ENGINE = 70


class LaneError(Exception):
    """The root; `code` is stable, `retryable` says whether another lane or a later try may succeed."""

    code = "lane"
    retryable = False


class ConfigError(LaneError):
    """A command-line option is refused."""

    code = "bad_config"


class StartError(LaneError):
    """The lane cannot become ready."""

    code = "start_failed"


class SelfTestFailed(StartError):
    """The lane answers a fixed question otherwise than it should; the message says where."""

    code = "self_test_failed"


class NativeKernelUnavailable(StartError):
    """The native expert kernel is not built, or this CPU cannot run what was asked for."""

    code = "no_native_kernel"


class CudaUnavailable(StartError):
    """A GPU lane was asked for, and there is no GPU that can be used."""

    code = "no_cuda"


class VramTooSmall(StartError):
    """The VRAM budget does not even hold what is no expert; the message lists the parts."""

    code = "vram_too_small"


class HostMemoryTooSmall(StartError):
    """The host does not give the memory that a GPU lane takes at its start for conversations that wait."""

    code = "host_memory_too_small"


class RequestError(LaneError):
    """The request can not be served as it is, by any lane."""

    code = "bad_request"


class EmptyPrompt(RequestError):
    """The prompt has no token."""

    code = "empty_prompt"


class ContextExceeded(RequestError):
    """The prompt leaves no room for a single output token."""

    code = "context_length_exceeded"


class TokenOutOfRange(RequestError):
    """A token id is not in the vocabulary."""

    code = "token_out_of_range"


class BadSampling(RequestError):
    """A sampling value is not a number or out of its range."""

    code = "bad_sampling"


class BadGrammar(RequestError):
    """The grammar cannot be used, or outgrew its bounds while the answer was made."""

    code = "bad_grammar"


class TooManyStopIds(RequestError):
    """More stop ids than a lane accepts."""

    code = "too_many_stop_ids"


class TraceRefused(LaneError):
    """A file is no routing trace, or a damaged one."""

    code = "bad_trace"


class BadProtocolVersion(LaneError):
    """The coordinator speaks another version of lane.proto."""

    code = "bad_protocol_version"


class Busy(LaneError):
    """A generation is running; the lane never queues."""

    code = "busy"
    retryable = True


class Draining(LaneError):
    """The lane is on its way out."""

    code = "draining"
    retryable = True


class SlowReader(LaneError):
    """The client stopped reading; its bounded outbox stayed full for too long."""

    code = "slow_reader"


class NonFiniteLogits(LaneError):
    """The model answered NaN or infinity: nothing it says can be trusted, so the process ends."""

    code = "non_finite_logits"
    retryable = True


class EngineFailed(LaneError):
    """The engine raised where it never should; the process ends."""

    code = "engine_failed"
    retryable = True


class GpuFailed(EngineFailed):
    """A call of the CUDA driver failed."""

    code = "gpu_failed"


class HandshakeLost(EngineFailed):
    """The GPU and the thread that computes the CPU's share of experts no longer answer each other."""

    code = "handshake_lost"


class NativeKernelFailed(EngineFailed):
    """The native expert kernel ran out of memory or threads."""

    code = "native_kernel_failed"


class TableReadFailed(EngineFailed):
    """Rows of an n-gram table cannot be read from disk; the log says where."""

    code = "table_read_failed"


_STATUS: dict[type[LaneError], grpc.StatusCode] = {
    RequestError: grpc.StatusCode.INVALID_ARGUMENT,
    BadProtocolVersion: grpc.StatusCode.FAILED_PRECONDITION,
    Busy: grpc.StatusCode.RESOURCE_EXHAUSTED,
    SlowReader: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Draining: grpc.StatusCode.UNAVAILABLE,
    LaneError: grpc.StatusCode.INTERNAL,
}


def grpc_status(error: LaneError) -> grpc.StatusCode:
    """The gRPC status of an error: that of its nearest ancestor in the table."""
    return next(_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS)
