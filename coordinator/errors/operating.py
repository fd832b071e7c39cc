"""Errors of those who run a cluster: it cannot start, an operation failed, a command was stopped.

The tree is drawn in the package. Invariant: their messages are for the operator, with paths and addresses.
"""

from coordinator.errors.base import CoordinatorError


class SetupError(CoordinatorError):
    """The coordinator cannot start; the message is for the operator."""

    code = "setup"


class BadAddress(SetupError):
    """An address to listen on that cannot be parsed, is taken or is not local."""

    code = "bad_address"


class BadTokenizer(SetupError):
    """The pack's tokenizer cannot be used."""

    code = "bad_tokenizer"


class BadOption(SetupError):
    """An option has a value that cannot work on this host."""

    code = "bad_option"


class BadPack(SetupError):
    """What was named is no pack."""

    code = "bad_pack"


class BadTenants(SetupError):
    """The file of tenants cannot be used."""

    code = "bad_tenants"


class BadIdentity(SetupError):
    """A host's certificate, or what makes them, cannot be used."""

    code = "bad_identity"


class LauncherError(SetupError):
    """Processes cannot be started on this host in the way that was asked for."""

    code = "launcher"


class StartFailed(SetupError):
    """A process ended, or was not ready in time, while the cluster came up; carries the process's own words."""

    code = "start_failed"


class RunDirError(SetupError):
    """The run directory cannot be used, or there is none."""

    code = "run_dir"


class RunDirBusy(RunDirError):
    """Another live supervisor holds the run directory."""

    code = "run_dir_busy"
    retryable = True


class OperationError(CoordinatorError):
    """What an operator asked of a lane could not be done."""

    code = "operation"


class LaneNotFound(OperationError):
    """No lane has that name."""

    code = "lane_not_found"
    http = 404
    grpc = "NOT_FOUND"


class HostTaken(OperationError):
    """A host of that name is in the cluster already, and it is alive."""

    code = "host_taken"
    retryable = True
    http = 409
    grpc = "ALREADY_EXISTS"


class OperationFailed(OperationError):
    """It could not be done; the message says why, and what was left as it was."""

    code = "operation_failed"
    grpc = "FAILED_PRECONDITION"


class Interrupted(CoordinatorError):
    """A command was told to stop before it was done."""

    code = "interrupted"

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number
