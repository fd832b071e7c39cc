from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class PingRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PingReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LaneName(_message.Message):
    __slots__ = ("lane",)
    LANE_FIELD_NUMBER: _ClassVar[int]
    lane: str
    def __init__(self, lane: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("lane", "stop")
    LANE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    lane: str
    stop: bool
    def __init__(self, lane: _Optional[str] = ..., stop: _Optional[bool] = ...) -> None: ...

class RestartRequest(_message.Message):
    __slots__ = ("lanes",)
    LANES_FIELD_NUMBER: _ClassVar[int]
    lanes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lanes: _Optional[_Iterable[str]] = ...) -> None: ...

class AddRequest(_message.Message):
    __slots__ = ("host",)
    HOST_FIELD_NUMBER: _ClassVar[int]
    host: str
    def __init__(self, host: _Optional[str] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("lane", "state", "doing", "running")
    LANE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DOING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    lane: str
    state: str
    doing: str
    running: int
    def __init__(self, lane: _Optional[str] = ..., state: _Optional[str] = ..., doing: _Optional[str] = ..., running: _Optional[int] = ...) -> None: ...
