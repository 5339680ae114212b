from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Precision(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRECISION_UNSPECIFIED: _ClassVar[Precision]
    F16: _ClassVar[Precision]
    F32: _ClassVar[Precision]
PRECISION_UNSPECIFIED: Precision
F16: Precision
F32: Precision

class DescribeRequest(_message.Message):
    __slots__ = ("version", "pair")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PAIR_FIELD_NUMBER: _ClassVar[int]
    version: int
    pair: str
    def __init__(self, version: _Optional[int] = ..., pair: _Optional[str] = ...) -> None: ...

class Description(_message.Message):
    __slots__ = ("version", "pair", "width", "n_ctx", "max_message_bytes", "max_hidden", "max_rollback", "public_key", "can_drop", "sinks")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PAIR_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    N_CTX_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_HIDDEN_FIELD_NUMBER: _ClassVar[int]
    MAX_ROLLBACK_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    CAN_DROP_FIELD_NUMBER: _ClassVar[int]
    SINKS_FIELD_NUMBER: _ClassVar[int]
    version: int
    pair: str
    width: int
    n_ctx: int
    max_message_bytes: int
    max_hidden: int
    max_rollback: int
    public_key: bytes
    can_drop: bool
    sinks: int
    def __init__(self, version: _Optional[int] = ..., pair: _Optional[str] = ..., width: _Optional[int] = ..., n_ctx: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., max_hidden: _Optional[int] = ..., max_rollback: _Optional[int] = ..., public_key: _Optional[bytes] = ..., can_drop: _Optional[bool] = ..., sinks: _Optional[int] = ...) -> None: ...

class Vectors(_message.Message):
    __slots__ = ("session", "position", "running_hash", "precision", "n", "data", "n_hidden", "wrapped_key", "drop_begin", "drop_end")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    RUNNING_HASH_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    N_HIDDEN_FIELD_NUMBER: _ClassVar[int]
    WRAPPED_KEY_FIELD_NUMBER: _ClassVar[int]
    DROP_BEGIN_FIELD_NUMBER: _ClassVar[int]
    DROP_END_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    position: int
    running_hash: bytes
    precision: Precision
    n: int
    data: bytes
    n_hidden: int
    wrapped_key: bytes
    drop_begin: int
    drop_end: int
    def __init__(self, session: _Optional[bytes] = ..., position: _Optional[int] = ..., running_hash: _Optional[bytes] = ..., precision: _Optional[_Union[Precision, str]] = ..., n: _Optional[int] = ..., data: _Optional[bytes] = ..., n_hidden: _Optional[int] = ..., wrapped_key: _Optional[bytes] = ..., drop_begin: _Optional[int] = ..., drop_end: _Optional[int] = ...) -> None: ...

class Hidden(_message.Message):
    __slots__ = ("position", "running_hash", "n", "data")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    RUNNING_HASH_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    position: int
    running_hash: bytes
    n: int
    data: bytes
    def __init__(self, position: _Optional[int] = ..., running_hash: _Optional[bytes] = ..., n: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class KeepRequest(_message.Message):
    __slots__ = ("session", "position", "running_hash", "wrapped_key")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    RUNNING_HASH_FIELD_NUMBER: _ClassVar[int]
    WRAPPED_KEY_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    position: int
    running_hash: bytes
    wrapped_key: bytes
    def __init__(self, session: _Optional[bytes] = ..., position: _Optional[int] = ..., running_hash: _Optional[bytes] = ..., wrapped_key: _Optional[bytes] = ...) -> None: ...

class KeepReply(_message.Message):
    __slots__ = ("n_stored",)
    N_STORED_FIELD_NUMBER: _ClassVar[int]
    n_stored: int
    def __init__(self, n_stored: _Optional[int] = ...) -> None: ...

class ForgetRequest(_message.Message):
    __slots__ = ("session", "wrapped_key")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    WRAPPED_KEY_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    wrapped_key: bytes
    def __init__(self, session: _Optional[bytes] = ..., wrapped_key: _Optional[bytes] = ...) -> None: ...

class ForgetReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
