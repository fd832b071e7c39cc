"""Native reader of n-gram rows, built as a plain shared object with a C ABI."""
