"""Native code of this package, built as plain shared objects with a C ABI."""
