from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class JoinRequest(_message.Message):
    __slots__ = ("protocol_version", "version", "fingerprint", "address", "incarnation", "suffix", "alike")
    class AlikeEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SUFFIX_FIELD_NUMBER: _ClassVar[int]
    ALIKE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    version: str
    fingerprint: bytes
    address: str
    incarnation: bytes
    suffix: str
    alike: _containers.ScalarMap[str, str]
    def __init__(self, protocol_version: _Optional[int] = ..., version: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., address: _Optional[str] = ..., incarnation: _Optional[bytes] = ..., suffix: _Optional[str] = ..., alike: _Optional[_Mapping[str, str]] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("name", "lanes", "lanes_ready")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    LANES_READY_FIELD_NUMBER: _ClassVar[int]
    name: str
    lanes: int
    lanes_ready: int
    def __init__(self, name: _Optional[str] = ..., lanes: _Optional[int] = ..., lanes_ready: _Optional[int] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("incarnation", "suffix")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SUFFIX_FIELD_NUMBER: _ClassVar[int]
    incarnation: bytes
    suffix: str
    def __init__(self, incarnation: _Optional[bytes] = ..., suffix: _Optional[str] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
