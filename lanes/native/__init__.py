"""The native expert kernel, built as a plain shared object with a C ABI."""
