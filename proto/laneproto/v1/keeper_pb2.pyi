from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ProcessPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROCESS_PHASE_UNSPECIFIED: _ClassVar[ProcessPhase]
    PROCESS_PHASE_RUNNING: _ClassVar[ProcessPhase]
    PROCESS_PHASE_EXITED: _ClassVar[ProcessPhase]
    PROCESS_PHASE_STOPPED: _ClassVar[ProcessPhase]
PROCESS_PHASE_UNSPECIFIED: ProcessPhase
PROCESS_PHASE_RUNNING: ProcessPhase
PROCESS_PHASE_EXITED: ProcessPhase
PROCESS_PHASE_STOPPED: ProcessPhase

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProcessName(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ("name", "grace_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    grace_s: float
    def __init__(self, name: _Optional[str] = ..., grace_s: _Optional[float] = ...) -> None: ...

class StartReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AddLaneRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RemoveLaneReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Process(_message.Message):
    __slots__ = ("name", "phase", "pid", "exit_code", "address", "starts")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    phase: ProcessPhase
    pid: int
    exit_code: int
    address: str
    starts: int
    def __init__(self, name: _Optional[str] = ..., phase: _Optional[_Union[ProcessPhase, str]] = ..., pid: _Optional[int] = ..., exit_code: _Optional[int] = ..., address: _Optional[str] = ..., starts: _Optional[int] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("processes",)
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    processes: _containers.RepeatedCompositeFieldContainer[Process]
    def __init__(self, processes: _Optional[_Iterable[_Union[Process, _Mapping]]] = ...) -> None: ...

class RegionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RegionReply(_message.Message):
    __slots__ = ("state", "done_bytes", "total_bytes", "source", "fingerprint", "generation")
    STATE_FIELD_NUMBER: _ClassVar[int]
    DONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    state: str
    done_bytes: int
    total_bytes: int
    source: str
    fingerprint: bytes
    generation: bytes
    def __init__(self, state: _Optional[str] = ..., done_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., source: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., generation: _Optional[bytes] = ...) -> None: ...
