"""The errors of this package, drawn:

    SharedExpertsError            code               retryable
    ├── CheckpointError           bad_checkpoint     no    a source checkpoint is refused
    ├── PackError                 bad_pack           no    a pack is refused
    ├── NoSpace                   no_space           yes   a conversion does not fit on the target's disk
    ├── StorageError              storage            yes   a disk refused to read or write
    ├── ConversionBusy            conversion_busy    yes   another conversion to the same target is running
    ├── NgramReadError            ngram_read         no    rows of an n-gram table cannot be read from their file
    ├── NativeMissing             native_missing     no    the native library was not built
    ├── OutputExists              output_exists      no    the target of a conversion is already there
    ├── ParkError                 park               no    the park pool does not take or give a conversation
    │   ├── ParkFull              park_full          yes   everything in it is in use
    │   ├── ParkRefused           park_refused       no    a request that makes no sense, or of what is not there
    │   └── ParkUnavailable       park_unavailable   yes   no owner answers
    └── RegionError               region             no    the shared region cannot be made or attached
        ├── RegionBusy            region_busy        yes   another owner serves this run directory
        ├── RegionUnavailable     region_unavailable yes   no owner answers, or the region is not ready in time
        ├── RegionMismatch        region_mismatch    no    wrong fingerprint, layout, size, generation or seals
        └── HandoffError          bad_handoff        no    the peer sent something that is not a descriptor message

Every message names the file and, where there is one, the tensor or section, then the reason.
"""

from __future__ import annotations

from os import PathLike


class SharedExpertsError(Exception):
    """Base of every error this package raises on purpose."""

    code = "shared_experts"
    retryable = False


class CheckpointError(SharedExpertsError):
    """A source checkpoint is refused: names the file, the tensor if any, and the reason."""

    code = "bad_checkpoint"

    def __init__(self, file: str | PathLike[str], reason: str, *, tensor: str | None = None) -> None:
        self.file, self.tensor, self.reason = str(file), tensor, reason
        super().__init__(f"{file}: {reason}" if tensor is None else f"{file}: tensor {tensor!r}: {reason}")


class PackError(SharedExpertsError):
    """A pack is refused: names the file, the section or tensor if any, and the reason."""

    code = "bad_pack"

    def __init__(self, file: str | PathLike[str], reason: str, *, section: str | None = None) -> None:
        self.file, self.section, self.reason = str(file), section, reason
        super().__init__(f"{file}: {reason}" if section is None else f"{file}: section {section!r}: {reason}")


class NgramReadError(SharedExpertsError):
    """Rows of an n-gram table cannot be read: names the file, the table, the place in the file and the reason."""

    code = "ngram_read"

    def __init__(self, file: str | PathLike[str], layer: int, offset: int, reason: str) -> None:
        self.file, self.layer, self.offset, self.reason = str(file), layer, offset, reason
        super().__init__(f"{file}: section 'ngram.{layer}': at byte {offset}: {reason}")


class OutputExists(SharedExpertsError):
    """The target of a conversion is already there; packs are never overwritten."""

    code = "output_exists"


class NoSpace(SharedExpertsError):
    """A conversion does not fit on the target's disk; what is written of it stays for the next attempt."""

    code = "no_space"
    retryable = True


class StorageError(SharedExpertsError):
    """A disk refused to read or write; finished sections of a conversion stay for the next attempt."""

    code = "storage"
    retryable = True


class ConversionBusy(SharedExpertsError):
    """Another conversion to the same target is running."""

    code = "conversion_busy"
    retryable = True


class NativeMissing(SharedExpertsError):
    """The native library was not built when the package was installed."""

    code = "native_missing"


class ParkError(SharedExpertsError):
    """The park pool does not take or give a conversation: it is read again instead."""

    code = "park"


class ParkFull(ParkError):
    """Everything in the park pool is in use."""

    code = "park_full"
    retryable = True


class ParkRefused(ParkError):
    """A request that makes no sense, or one of a conversation that is not there."""

    code = "park_refused"


class ParkUnavailable(ParkError):
    """No owner answers in time."""

    code = "park_unavailable"
    retryable = True


class RegionError(SharedExpertsError):
    """The shared region cannot be made or attached."""

    code = "region"


class RegionBusy(RegionError):
    """Another live owner holds this run directory."""

    code = "region_busy"
    retryable = True


class RegionUnavailable(RegionError):
    """No owner answers, or the region was not ready in time."""

    code = "region_unavailable"
    retryable = True


class RegionMismatch(RegionError):
    """The region is not the one that was asked for, or its seals are not what the contract says.

    `check` names the one that failed: seals, access_mode, ready, magic, crc, layout_version, reserved, fingerprint,
    shape, size, generation or digest.
    """

    code = "region_mismatch"

    def __init__(self, reason: str, *, check: str) -> None:
        self.check = check
        super().__init__(reason)


class HandoffError(RegionError):
    """The peer sent something that is not a well-formed descriptor message."""

    code = "bad_handoff"
